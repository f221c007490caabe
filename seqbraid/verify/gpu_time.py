"""GPU time of a function, without what Python takes to launch it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch


def gpu_time(function: Callable[[], object], seconds: float = 0.0, repeats: int = 5) -> float:
    """Median milliseconds: recorded once as a graph and replayed, so often and at least for so long; of a
    long time the second half counts.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    times: list[float] = []
    while len(times) < repeats or sum(times) < 1e3 * seconds:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    graph.reset()
    function()  # what the recording left behind is gone with it
    return median(times[len(times) // 2 :] if seconds else times)
