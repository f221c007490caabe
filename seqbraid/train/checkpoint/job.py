"""A save under way, and what becomes of it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import files
from .files import FileRecord


class CheckpointError(OSError):
    """A checkpoint could not be written; raised by every rank."""


@dataclass(frozen=True)
class Published:
    """A checkpoint that is complete and that a resume finds."""

    step: int
    path: Path
    seconds: float
    """From the call of `save` until it was found published."""


@dataclass(frozen=True)
class Failed:
    """A checkpoint that could not be written; the one before it is untouched."""

    step: int
    reason: str


@dataclass
class Job:
    """A save under way: first every rank writes its file, then rank 0 publishes."""

    step: int
    work: Future[FileRecord]
    start: float
    phase: Literal["writing", "publishing"] = "writing"

    @property
    def name(self) -> str:
        return files.folder_name(self.step)
