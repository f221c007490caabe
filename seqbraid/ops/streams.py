"""Independent kernel calls side by side: while one drains, the next fills the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import cycle

import torch
from torch import Tensor

Call = Callable[[], tuple[Tensor, ...]]

NUM_STREAMS = 3
"""Beside each other; more do not help, since one call of usual size fills a GPU."""


def take_turns(num_calls: int, like: Tensor, ahead: bool) -> bool:
    """Whether so many calls on such tensors have streams of their own, and so memory of other streams."""
    return like.is_cuda and (ahead or num_calls > 1)


class Calls:
    """Kernel calls that do not depend on each other; on a GPU they take turns on a few streams.

    With `ahead` they wait, however late they are started, only for what was launched before this object was
    made, and not for calls that were started before them.

    What a call returns is memory of its stream, used on the main one. Before it is let go, its stream is made
    to wait for these uses: nobody gets the memory earlier, whatever the allocator, and unlike with
    `record_stream` nothing is held back until the GPU is done with it.
    """

    def __init__(self, calls: Sequence[Call], like: Tensor, ahead: bool = False) -> None:
        self._calls = list(calls)
        self._results: list[tuple[Tensor, ...]] = []
        self._streams: list[torch.cuda.Stream] = []
        self._running: list[torch.cuda.Event] = []
        self._ready: torch.cuda.Event | None = None
        if take_turns(len(calls), like, ahead):
            self._main = torch.cuda.current_stream(like.device)
            self._ready = self._main.record_event()

    def start(self) -> None:
        """Launch them."""
        if self._ready is None:
            self._results = [call() for call in self._calls]
            return
        self._streams = next(_stream_sets(self._main))[: len(self._calls)]
        for stream in self._streams:
            stream.wait_event(self._ready)
        try:
            for i, call in enumerate(self._calls):
                with torch.cuda.stream(self._streams[i % NUM_STREAMS]):
                    self._results.append(call())
        finally:
            self._running = [stream.record_event() for stream in self._streams]

    @contextmanager
    def results(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """What they return, for use within alone; they are let go, and their inputs with them."""
        self._wait()
        results, self._results, self._calls = self._results, [], []
        try:
            yield results
        finally:
            # While a graph is recorded nothing is freed that others could get.
            if self._streams and not torch.cuda.is_current_stream_capturing():
                used = self._main.record_event()
                for stream in self._streams:
                    stream.wait_event(used)

    def _wait(self) -> None:
        for event in self._running:
            self._main.wait_event(event)
        self._running = []

    def __del__(self) -> None:
        self._wait()  # after an error: the main stream must not get their inputs' memory before they are done


@cache
def _stream_sets(main: torch.cuda.Stream) -> cycle[list[torch.cuda.Stream]]:
    """Two that serve in turns: calls that are started ahead must not stand behind the uses of what the ones
    before them returned.
    """
    return cycle([torch.cuda.Stream(main.device) for _ in range(NUM_STREAMS)] for _ in range(2))
