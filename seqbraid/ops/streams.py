"""Independent kernel calls side by side: while one drains, the next fills the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle

import torch
from torch import Tensor

Call = Callable[[], tuple[Tensor, ...]]

NUM_STREAMS = 3
"""Beside each other; more do not help, since one call of usual size fills a GPU."""


class Calls:
    """Kernel calls that do not depend on each other; on a GPU they take turns on a few streams.

    With `ahead` they wait, however late they are started, only for what was launched before this object was
    made, and not for the calls started before them. At most one such object is started ahead of another's
    results.

    What a call returns is memory of its stream, and is used on the main one. Nothing holds it back until the
    GPU is done with it, as `record_stream` would: two sets of streams serve in turns, so that when one serves
    again, it waits for the uses of all that it returned before.
    """

    def __init__(self, calls: Sequence[Call], like: Tensor, ahead: bool = False) -> None:
        self._calls = list(calls)
        self._results: list[tuple[Tensor, ...]] = []
        self._done: list[torch.cuda.Event] = []
        self._ready: torch.cuda.Event | None = None
        if uses_streams(like) and (ahead or len(calls) > 1):
            self._main = torch.cuda.current_stream(like.device)
            self._ready = self._main.record_event()

    def start(self) -> None:
        """Launch them."""
        if self._ready is None:
            self._results = [call() for call in self._calls]
            return
        streams = next(_stream_sets(self._main))[: len(self._calls)]
        for stream in streams:
            stream.wait_event(self._ready)
        for i, call in enumerate(self._calls):
            with torch.cuda.stream(streams[i % len(streams)]):
                self._results.append(call())
        self._done = [stream.record_event() for stream in streams]

    def results(self) -> list[tuple[Tensor, ...]]:
        """What they return, once; they are let go, and their inputs with them."""
        for event in self._done:
            self._main.wait_event(event)
        results, self._results, self._calls = self._results, [], []
        return results


def uses_streams(like: Tensor) -> bool:
    """Whether calls on such tensors run side by side."""
    return like.is_cuda


@cache
def _stream_sets(main: torch.cuda.Stream) -> cycle[list[torch.cuda.Stream]]:
    return cycle([torch.cuda.Stream(main.device) for _ in range(NUM_STREAMS)] for _ in range(2))
