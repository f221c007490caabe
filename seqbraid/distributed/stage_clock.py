"""How long a rank computes in a step of its pipeline, stage by stage, and how long the step is: the
rest is waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch


class StageClock:
    """Of the latest step. On a GPU the times are its own, and are read when they are asked for."""

    def __init__(self) -> None:
        self.on_gpu = False
        self._spans: list[tuple[int, Any, Any]] = []
        self._step: tuple[Any, Any] = (0.0, 0.0)

    @contextmanager
    def step(self, device: torch.device) -> Iterator[None]:
        """Around all of a step."""
        self.on_gpu = device.type == "cuda"
        self._spans, begin = [], self._now()
        yield
        self._step = begin, self._now()

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        """Around one forward or backward of a stage."""
        begin = self._now()
        yield
        self._spans.append((stage, begin, self._now()))

    def seconds(self, num_stages: int) -> list[float]:
        """Of the whole step, and behind it computing of each stage."""
        found = [self._between(*self._step)] + [0.0] * num_stages
        for stage, *span in self._spans:
            found[1 + stage] += self._between(*span)
        return found

    def _now(self) -> Any:
        if not self.on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if not self.on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
