"""Where a rank is in its run: written by the thread that trains, read by the threads that watch it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

Limit = Literal["start", "step", "loader"]
"""Which of the timeouts holds."""

LIBRARIES = Path(__file__).parents[2]
TORCH_DISTRIBUTED = "/torch/distributed/"
COMM = "/seqbraid/comm/"


class Stopped(Exception):
    """The run was asked to stop while it waited; raised by all ranks together."""


class Place(NamedTuple):
    """What a rank does, and since when."""

    step: int
    doing: str
    limit: Limit
    since: float
    """Of the monotonic clock."""


class Whereabouts:
    """What the training thread of this rank is doing, and whether the run was asked to stop.

    >>> where = Whereabouts()
    >>> where.at("forward and backward of micro-batch 1 of 2", step=7, limit="step")
    >>> where.place.step, where.place.doing
    (7, 'forward and backward of micro-batch 1 of 2')
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """
        Args:
            say: is given a line for each stage of the start; nothing is said when left out.
        """
        self.place = Place(0, "starting", "start", time.monotonic())
        self.stop = False
        """Whether this rank, or one that it has heard of, was asked to stop."""
        self.waits_for = "the others"
        """Ranks that have not joined yet, as far as is known."""
        self.thread = threading.get_ident()
        self._say = say

    def at(self, doing: str, step: int | None = None, limit: Limit | None = None) -> None:
        """Something new begins; step and limit stay as they were where they are left out."""
        before = self.place
        step = before.step if step is None else step
        self.place = Place(step, doing, limit or before.limit, time.monotonic())

    def starts(self, doing: str) -> None:
        """A stage of the start, which is said as well."""
        self.at(doing, limit="start")
        if self._say is not None:
            self._say(doing)

    def moves(self) -> None:
        """What is being done goes forward."""
        self.place = self.place._replace(since=time.monotonic())


def line_of(thread: int) -> tuple[str, bool]:
    """The line of code that a thread is at, and whether it waits there for other ranks."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "no Python code", False
    file = frame.f_code.co_filename
    waits = TORCH_DISTRIBUTED in file or COMM in file
    caller: FrameType | None = frame
    while caller is not None and TORCH_DISTRIBUTED in caller.f_code.co_filename:
        caller = caller.f_back
    text = _words(frame)
    return (text if caller in (None, frame) else f"{text}, called from {_words(caller)}"), waits


def _words(frame: FrameType | None) -> str:
    assert frame is not None
    path = Path(frame.f_code.co_filename)
    short = path.relative_to(LIBRARIES) if path.is_relative_to(LIBRARIES) else Path(*path.parts[-3:])
    return f"{frame.f_code.co_name} ({short}:{frame.f_lineno})"
