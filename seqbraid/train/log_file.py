"""A file that lines are appended to, also where its disk is full for a while."""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 2**26
"""Kept while the file cannot be written; a step is logged in some hundred bytes."""


class LogError(RuntimeError):
    """The log cannot be written."""


class LogFile:
    """Each line is handed to the system at once. What it does not take is kept, if asked for, and tried again
    with the next line.
    """

    def __init__(self, path: Path, keeps: bool = False) -> None:
        """
        Args:
            keeps: keep lines that cannot be written; otherwise that is an error.
        """
        self.path, self.keeps = path, keeps
        self.waiting = b""
        """Bytes that could not be written yet."""
        self._file = path.open("ab", buffering=0)
        if self._file.tell():
            with path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":  # of a process that was killed in the middle of a line
                    self.waiting = b"\n"

    @property
    def is_new(self) -> bool:
        """Whether there is nothing in it."""
        return self._file.tell() == 0

    def append(self, line: str) -> str:
        """Write a line; why it could not be written, where it is kept, and otherwise nothing."""
        self.waiting += line.encode() + b"\n"
        reason = self._write()
        if reason and not (self.keeps and len(self.waiting) < MOST_BYTES):
            raise LogError(f"{self.path} cannot be written: {reason}")
        return reason

    def close(self) -> int:
        """Write what is kept, and let the file go; how many lines are lost."""
        if self.waiting.strip():
            self._write()
        self._file.close()
        return self.waiting.count(b"\n")

    def _write(self) -> str:
        try:
            while self.waiting:
                self.waiting = self.waiting[self._file.write(self.waiting) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""
