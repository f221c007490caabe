"""`train.profile`: a torch.profiler trace of chosen steps, from each rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def parse_steps(text: int | str) -> range:
    """One step, or several.

    >>> parse_steps("12"), parse_steps("12-14")
    (range(12, 13), range(12, 15))
    """
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(text))
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"train.profile={text!r} is no step, such as 12, nor several, such as 12-14")
    return range(first, last + 1)


class StepProfiler:
    """Writes `profile/steps-…-rank-….json`, for https://ui.perfetto.dev or chrome://tracing."""

    def __init__(self, steps: int | str | None, folder: Path, rank: int, says: Callable[[str], None]) -> None:
        """
        Args:
            steps: as the configuration has them; None profiles nothing.
            folder: the run's.
            rank: of this process.
            says: is told of a trace that is written, or cannot be.
        """
        self.steps = range(0) if steps is None else parse_steps(steps)
        self.folder, self.rank, self.says = folder, rank, says
        self._running: profile | None = None
        self._first = 0

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """One step of the run; what a trace costs comes on top of it."""
        if step in self.steps and self._running is None:
            self._start(step)
        try:
            yield
        finally:
            if step + 1 not in self.steps:
                self.close(step)

    def close(self, step: int) -> None:
        """Write what is there; training goes on where that fails."""
        running, self._running = self._running, None
        if running is None:
            return
        path = self.folder / "profile" / f"steps-{self._first}-{step}-rank-{self.rank}.json"
        try:
            running.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
            self.says(f"wrote the profile of steps {self._first} to {step}: {path}")
        except (OSError, RuntimeError) as error:
            self.says(f"the profile of steps {self._first} to {step} could not be written: {error}")

    def _start(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._first = step
        self._running = profile(activities=activities)
        self._running.start()
