"""JSONL files, read at random by byte offset."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .plain_json import parse_json

MAX_LINE_BYTES = 64 * 2**20
SCAN_BYTES = 16 * 2**20
PROBES, PROBE_BYTES = 18, 2**18
"""How many places of a file its fingerprint reads, and how much at each."""

BOM = b"\xef\xbb\xbf"
NEWLINE = ord("\n")


class JsonlSource:
    """A file with one JSON value a line; blank lines are skipped."""

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = self.path.name if name is None else name
        try:
            self.size = self.path.stat().st_size
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from None
        if not self.path.is_file():
            raise ValueError(f"{self.path} is not a file")
        self._file: BinaryIO | None = None
        self._index: tuple[NDArray[np.int64], NDArray[np.int64] | None] | None = None
        self._fingerprint: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The index is as long as the file has lines and quickly made again.
        return {**self.__dict__, "_file": None, "_index": None}

    def __len__(self) -> int:
        bounds, lines = self._indexed()
        return len(bounds) - 1 if lines is None else len(lines)

    def __getitem__(self, index: int) -> Any:
        line, start, stop = self._span(index)
        if stop - start > MAX_LINE_BYTES:
            raise ValueError(f"the line has {stop - start} bytes; at most {MAX_LINE_BYTES} are read")
        # A read at an offset shares no position, neither with threads nor with forked workers.
        data = os.pread(self._open().fileno(), stop - start, start)
        if len(data) != stop - start:
            raise ValueError(f"{self.path} became shorter while it was read")
        return parse_json(data.removeprefix(BOM) if line == 0 else data)

    def where(self, index: int) -> str:
        """The file's name and the line's number, counted from one and with the blank ones."""
        return f"{self.name}:{self._span(index)[0] + 1}"

    @property
    def fingerprint(self) -> str:
        """Of the file's size and of what stands at its start, end and places between."""
        if self._fingerprint is None:
            self._fingerprint = file_fingerprint(self.path)
        return self._fingerprint

    def _span(self, index: int) -> tuple[int, int, int]:
        """The line's number, counted from zero, and its first byte and the one after its last."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        bounds, lines = self._indexed()
        line = index if lines is None else int(lines[index])
        return line, int(bounds[line]), int(bounds[line + 1])

    def _open(self) -> BinaryIO:
        if self._file is None:
            try:
                self._file = self.path.open("rb", buffering=0)
            except OSError as error:
                raise ValueError(f"{self.path} cannot be read: {error.strerror}") from None
        return self._file

    def _indexed(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Where each line starts, and which lines are not blank (None: all)."""
        if self._index is None:
            file = self._open()
            if os.fstat(file.fileno()).st_size != self.size:
                raise ValueError(f"{self.path} changed while it was read; start again")
            self._index = _index_lines(file, self.size)
        return self._index


def file_fingerprint(path: Path) -> str:
    """A fingerprint of a file's content that reads a few MiB of it, however long it is.

    A change that leaves the size as it is and lies between the places read is not seen.
    """
    size = path.stat().st_size
    found = [size]
    with open(path, "rb") as file:
        for probe in range(PROBES):
            file.seek(max(0, size - PROBE_BYTES) * probe // (PROBES - 1))
            found.append(zlib.crc32(file.read(PROBE_BYTES)))
    return digest(map(str, found))


def digest(texts: Iterable[str]) -> str:
    """A short fingerprint of some texts in order."""
    return sha256("\n".join(texts).encode()).hexdigest()[:32]


def _index_lines(file: BinaryIO, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    starts, doubtful = [], []
    at_line_start = True
    for offset in range(0, size, SCAN_BYTES):
        block = os.pread(file.fileno(), SCAN_BYTES, offset)
        chunk = np.frombuffer(block, np.uint8)
        found = np.flatnonzero(chunk == NEWLINE) + 1
        if at_line_start:
            found = np.concatenate([np.zeros(1, found.dtype), found])
        at_line_start = bool(len(found)) and found[-1] == len(chunk)
        found = found[:-1] if at_line_start else found
        starts.append(found + offset)
        # What starts with a bracket is not blank; few lines start otherwise, and each of those is read.
        doubtful.append(chunk[found] <= ord(" "))
    bounds = np.concatenate([*starts, np.array([size])]).astype(np.int64)
    keep = np.ones(len(bounds) - 1, bool)
    for line in np.flatnonzero(np.concatenate(doubtful)) if doubtful else ():
        start, stop = int(bounds[line]), int(bounds[line + 1])
        # A line too long to be read is kept, so that reading it says so.
        keep[line] = stop - start > MAX_LINE_BYTES or bool(
            os.pread(file.fileno(), stop - start, start).strip()
        )
    return bounds, None if keep.all() else np.flatnonzero(keep)
