"""A bounded folder of files that were unpacked to JSON lines, so that they can be read at random.

A file is unpacked once for all processes of a machine and all runs; who reads one holds a lock on it. Where
the folder would become too large, what was not used for longest is deleted first. The file of the lock says
what was written, so that what was damaged since is unpacked again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import IO

from .jsonl import JsonlSource, digest, file_fingerprint
from .unpack import LINES, json_lines, suffixes

VERSION = "2"
"""Of what is written."""
GIB = 2**30
WAIT_S = 0.05
"""Between two looks at whether another process has written the file."""

_locks: dict[Path, IO[bytes]] = {}
"""Held until the process ends."""

_log = logging.getLogger(__name__)


def default_folder() -> str:
    """`seqbraid/records` in the user's folder for caches."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "seqbraid", "records")


@dataclass(frozen=True)
class Lines:
    """JSON lines that can be read from their beginning only, until the cache has them."""

    name: str
    """Of what they are read from, for messages."""
    seen: Sequence[str]
    """By which it is told whether they are those of before."""
    blocks: Callable[[], Iterable[bytes]]
    """The lines, in blocks of bytes."""
    instead: str = "unpack the file yourself"
    """What a user may do where there is no room for them."""


@dataclass(frozen=True)
class RecordCache:
    """Where files are unpacked to."""

    folder: str | None = None
    """The user's folder for caches when left out."""
    limit: float = 100 * GIB
    """Most bytes of all files in it."""

    def unpacked(self, path: str) -> Path:
        """The JSON lines of a file, made now unless they are there."""
        seen = [os.path.realpath(path), str(os.stat(path).st_mtime_ns), file_fingerprint(Path(path))]
        return self.lines(Lines(path, seen, lambda: json_lines(path)))

    def lines(self, lines: Lines) -> Path:
        """The file of some JSON lines, written now unless it is there."""
        folder = Path(self.folder or default_folder())
        found = folder / f"{digest([VERSION, *lines.seen])}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if found not in _locks or not found.exists():
                _locks[found] = self._held(found, lines)
            with suppress(PermissionError):
                os.utime(found)
            return found
        except OSError as error:
            raise ValueError(
                f"{lines.name} cannot be unpacked to {folder}: {error.strerror or error}; give another "
                f"folder as data.cache, or {lines.instead}"
            ) from error

    def _held(self, found: Path, lines: Lines) -> IO[bytes]:
        """A lock that all readers share; the first of them writes the file, while the others wait."""
        while True:
            if found.exists() and not _is_intact(found):
                _log.warning("%s, unpacked from %s, is damaged: it is unpacked again", found, lines.name)
                for path in (found, _lock_file(found)):
                    path.unlink(missing_ok=True)
            lock = _lock_file(found).open("a+b")
            if not found.exists():
                try:  # without waiting: who has written it keeps its lock as long as it reads
                    _flock(lock, "LOCK_EX", "LOCK_NB")
                except BlockingIOError:
                    lock.close()
                    sleep(WAIT_S)
                    continue
                except OSError:  # a file system without locks: each process unpacks it, to the same bytes
                    pass
                if not found.exists():
                    self._write(found, lines, lock)
            _flock(lock, "LOCK_SH")
            with suppress(OSError):  # both may have been deleted between two of these lines
                if found.exists() and os.fstat(lock.fileno()).st_ino == _lock_file(found).stat().st_ino:
                    return lock
            lock.close()

    def _write(self, found: Path, lines: Lines, lock: IO[bytes]) -> None:
        fresh = found.with_suffix(f".{os.getpid()}.tmp")
        try:
            with fresh.open("wb") as file:
                self._copy(file, found, lines)
                file.flush()
                os.fsync(file.fileno())
            lock.truncate(0)
            lock.write(file_fingerprint(fresh).encode())
            lock.flush()
            fresh.replace(found)
        finally:
            fresh.unlink(missing_ok=True)

    def _copy(self, file: IO[bytes], found: Path, lines: Lines) -> None:
        written, room = 0, self.limit - _size(found.parent)
        for block in lines.blocks():
            written += len(block)
            while written > room:
                freed = _free_oldest(found)
                if not freed:
                    raise ValueError(
                        f"{lines.name} unpacks to more than is left of data.cache_gib={self.limit / GIB:g} "
                        f"in {found.parent}; raise it, or {lines.instead}"
                    )
                room += freed
            file.write(block)


class UnpackedSource(JsonlSource):
    """A file that was unpacked; its fingerprint and name are the file's own."""

    def __init__(self, path: str, name: str, cache: RecordCache) -> None:
        super().__init__(cache.unpacked(path), name)
        self.has_lines = suffixes(path)[0] in LINES
        self._fingerprint = file_fingerprint(Path(path))

    def where(self, index: int) -> str:
        """The line of what has lines, else the number of the record, counted from zero."""
        return super().where(index) if self.has_lines else f"{self.name}[{index}]"


def _size(folder: Path) -> int:
    sizes = 0
    for path in folder.iterdir():
        with suppress(OSError):
            sizes += path.stat().st_size
    return sizes


def _free_oldest(but: Path) -> int:
    """Delete the file that was not used for longest and that nobody reads, or writes any more; how many bytes
    that frees.
    """
    times = []
    for path in but.parent.iterdir():
        with suppress(OSError):
            if path.suffix in (".jsonl", ".tmp"):
                times.append((path.stat().st_mtime, path))
    for _, path in sorted(times):
        if _lock_file(path) == _lock_file(but) or path in _locks:
            continue
        with _lock_file(path).open("ab") as lock, suppress(OSError):
            _flock(lock, "LOCK_EX", "LOCK_NB")
            size = path.stat().st_size
            path.unlink()
            _lock_file(path).unlink()
            return size
    return 0


def _lock_file(found: Path) -> Path:
    return found.with_name(found.name.split(".")[0] + ".lock")


def _is_intact(found: Path) -> bool:
    """Whether a file is what was written, by its size and by samples of its bytes."""
    try:
        return _lock_file(found).read_text(errors="replace") == file_fingerprint(found)
    except FileNotFoundError:
        return False


def _flock(lock: IO[bytes], *names: str) -> None:
    """Lock a file; BlockingIOError where another has it and we do not wait."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    flags = 0
    for name in names:
        flags |= getattr(fcntl, name)
    try:
        fcntl.flock(lock, flags)
    except BlockingIOError:
        raise
    except OSError:
        # A file system without locks: each process may unpack the file, to the same bytes.
        if "LOCK_NB" in names:
            raise
