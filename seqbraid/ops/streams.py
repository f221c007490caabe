"""Independent kernel calls side by side: while one drains, the next fills the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

NUM_STREAMS = 3
"""Beside each other; more do not help, since one call of usual size fills a GPU."""


@cache
def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(NUM_STREAMS - 1)]


def side_by_side(calls: Sequence[Callable[[], tuple[Tensor, ...]]], like: Tensor) -> list[tuple[Tensor, ...]]:
    """What the calls return; on a GPU they take turns on a few streams."""
    if not like.is_cuda or len(calls) < 2:
        return [call() for call in calls]
    main = torch.cuda.current_stream(like.device)
    streams = [main, *_side_streams(like.device)]
    for stream in streams[1:]:
        stream.wait_stream(main)
    results = []
    for i, call in enumerate(calls):
        with torch.cuda.stream(streams[i % NUM_STREAMS]):
            results.append(call())
        if i % NUM_STREAMS:
            for tensor in results[-1]:
                tensor.record_stream(main)
    for stream in streams[1:]:
        main.wait_stream(stream)
    return results
