"""What earlier runs have tokenized, on disk, so that a second start need not do it again.

A folder for each source and encoder, by their fingerprints; in it, for each process that tokenized, a file of
texts and one of where they are. An entry is of one sample, and holds a digest of its record: a record that
changed unseen by the source's fingerprint is tokenized again. What is damaged, or was deleted by another run,
is tokenized again too.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...layout.labels import IGNORE
from ..records.cache import GIB, default_folder
from ..records.jsonl import digest

LOOK_BYTES = 2**24
"""After so many bytes a process looks how large the folder has become."""
LOOK_AGAIN_S = 30.0
"""After so long a process looks for what others, or itself in an epoch before, have added."""
ENTRY = np.dtype(
    [
        ("sample", "<i8"),
        ("start", "<i8"),
        ("record", "<u8"),
        ("tokens", "<i4"),
        ("flags", "<i4"),
        ("crc", "<u4"),
    ]
)
TEXTS, PLACES = ".texts", ".places"


class Tokenized(NamedTuple):
    """A sample without media."""

    ids_T: NDArray[np.int64]
    labels_T: NDArray[np.int64]
    without_reasoning: int = 0
    all_labelled: bool = False


class TokenCache:
    """Finds what was tokenized, and keeps what is tokenized now; bounded, for all runs of a machine.

    Args:
        folder: beside the cache of records when left out.
        limit: most bytes of all that it holds; what no run used for longest is deleted first.
    """

    def __init__(self, folder: str | None = None, limit: float = 8 * GIB) -> None:
        self.root = Path(folder or default_folder()) / "tokens"
        self.limit = limit
        self._folder: Path | None = None
        self._writes: tuple[IO[bytes], IO[bytes]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "limit": self.limit, "_folder": None, "_writes": None}

    def open(self, source: str, encoder: str, num_samples: int) -> None:
        """Read where the texts of a source are that an encoder made, by their fingerprints; a folder that
        cannot be used is none.
        """
        folder = self.root / digest([source, encoder])
        self._files: dict[str, IO[bytes]] = {}
        self._texts: list[IO[bytes]] = []
        """Each with some of the entries; a file that grew is there again."""
        self._ends: list[int] = []
        """How many entries it and those before have."""
        self._known: dict[str, int] = {}
        self._entries = np.empty(0, ENTRY)
        self._place_of = np.full(num_samples, -1, np.int64)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
            self._make_room(folder)
            self._read(folder)
            self._folder = folder
            self._room = self.limit - _size(self.root)

    def get(self, sample: int, record: Any) -> Tokenized | None:
        """What was made of a sample, if it is there and of this record."""
        if self._folder is None:
            return None
        if self._place_of[sample] < 0 and monotonic() - self._read_at >= LOOK_AGAIN_S:
            self._read(self._folder)
        place = int(self._place_of[sample])
        if place < 0:
            return None
        entry = self._entries[place]
        if entry["record"] != _digest(record):
            return None
        tokens, start, flags = (int(entry[name]) for name in ("tokens", "start", "flags"))
        size = 4 * tokens + -(-tokens // 8)
        file = self._texts[bisect_right(self._ends, place)].fileno()
        try:
            data = os.pread(file, size, start) if start + size <= os.fstat(file).st_size else b""
        except OSError:
            return None
        if len(data) != size or _checksum(data, tokens, flags) != entry["crc"]:
            return None
        ids_T = np.frombuffer(data, "<i4", tokens).astype(np.int64)
        labelled_T = np.unpackbits(np.frombuffer(data, np.uint8, offset=4 * tokens), count=tokens)
        return Tokenized(ids_T, np.where(labelled_T == 1, ids_T, IGNORE), flags >> 1, bool(flags & 1))

    def put(self, sample: int, record: Any, made: Tokenized) -> None:
        """Keep what was made of a sample, where there is room."""
        labelled_T = made.labels_T != IGNORE
        if self._folder is None or not np.array_equal(made.labels_T[labelled_T], made.ids_T[labelled_T]):
            return
        data = made.ids_T.astype("<i4").tobytes() + np.packbits(labelled_T).tobytes()
        flags = 2 * made.without_reasoning + made.all_labelled
        try:
            self._write(sample, _digest(record), data, len(labelled_T), flags)
        except OSError:  # a full disk stops no run
            self._folder = None

    def _write(self, sample: int, record: int, data: bytes, tokens: int, flags: int) -> None:
        assert self._folder is not None
        if self._room < len(data) + ENTRY.itemsize:
            return
        if self._writes is None:
            name = self._folder / uuid.uuid4().hex
            self._writes = open(f"{name}{TEXTS}", "xb"), open(f"{name}{PLACES}", "xb")  # noqa: SIM115
            self._looked_at = 0
        texts, places = self._writes
        start = texts.tell()
        texts.write(data)
        entry = np.array([(sample, start, record, tokens, flags, _checksum(data, tokens, flags))], ENTRY)
        places.write(entry.tobytes())
        self._room -= len(data) + ENTRY.itemsize
        if start - self._looked_at > LOOK_BYTES:
            self._looked_at = start
            self._room = self.limit - _size(self.root)

    def flush(self) -> None:
        """Let other processes see what was kept: the texts before their places."""
        for file in self._writes or ():
            with suppress(OSError):
                file.flush()

    def _read(self, folder: Path) -> None:
        """Read which texts were added since the last look."""
        self._read_at = monotonic()
        for path in sorted(folder.glob(f"*{PLACES}")):
            with suppress(OSError):
                known = self._known.get(path.name, 0)
                added = np.fromfile(path, ENTRY, offset=known * ENTRY.itemsize)
                if not len(added):
                    continue
                if path.name not in self._files:
                    self._files[path.name] = path.with_suffix(TEXTS).open("rb")
                self._texts.append(self._files[path.name])
                self._known[path.name] = known + len(added)
                first = len(self._entries)
                self._entries = np.concatenate([self._entries, added])
                self._ends.append(len(self._entries))
                own = np.flatnonzero((added["sample"] >= 0) & (added["sample"] < len(self._place_of)))
                self._place_of[added["sample"][own]] = first + own

    def _make_room(self, own: Path) -> None:
        """Delete what no run used for longest while there is more than the limit."""
        size = _size(self.root)
        for _, folder in sorted(_times(self.root)):
            if size <= self.limit:
                return
            if folder != own:
                size -= _size(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _checksum(data: bytes, tokens: int, flags: int) -> int:
    """Of a text, and of what its entry says of it."""
    return zlib.crc32(data, zlib.crc32(np.array([tokens, flags], "<i4").tobytes()))


def _times(root: Path) -> Iterator[tuple[float, Path]]:
    for folder in root.iterdir():
        with suppress(OSError):
            yield folder.stat().st_mtime, folder


def _size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size
    return size


def _digest(record: Any) -> int:
    text = json.dumps(getattr(record, "record", record), ensure_ascii=False, default=repr)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
