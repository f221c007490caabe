"""GPU time of functions, without what Python takes to launch them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import torch


def gpu_time(function: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds."""
    return gpu_times([function], passes=repeats)[0]


def gpu_times(
    functions: Sequence[Callable[[], object]], passes: int = 5, seconds: float = 0.0
) -> list[float]:
    """Milliseconds of each: recorded once as a graph and replayed in turns, each time at least for so long;
    the mean of a turn, and of turns the median.

    A GPU at its power limit changes its clock all the time. In turns, what is compared has the same share of
    good and bad moments.
    """
    pool = torch.cuda.graph_pool_handle()  # one for all: they are replayed one after the other
    graphs = [_recorded(function, pool) for function in functions]
    replays = [max(1, math.ceil(1e3 * seconds / _replayed(graph, 1))) for graph in graphs]
    turns = [
        [_replayed(graph, times) for graph, times in zip(graphs, replays, strict=True)] for _ in range(passes)
    ]
    for graph in graphs:
        graph.reset()
    for function in functions:
        function()  # what the recording left behind is gone with it
    return [median(times) for times in zip(*turns, strict=True)]


def _recorded(function: Callable[[], object], pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        function()
    graph.replay()
    function()  # what comes next must not read what the recording left behind
    torch.cuda.synchronize()
    return graph


def _replayed(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Mean milliseconds, one replay right behind the other."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / times
