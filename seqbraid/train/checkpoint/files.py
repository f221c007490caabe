"""Folders of checkpoints on disk: written whole, published by one rename, found again after a kill.

A published folder `step-00000030` holds `complete.json`, which names every other file with size and CRC-32.
`last` and `best` are text files with a folder's name. A killed run may leave `step-….tmp` (not published),
`step-….next` (the pointers that are to name it), `step-….old` (published, moved aside for its successor) and
`step-….gone` (being deleted). What of these cannot
be deleted (a file that is open over NFS) is named in a warning and stays; nothing waits for it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "complete.json"
FORMAT = 1
DAMAGED = "the checkpoint is damaged: "
BLOCK = 2**24
"""Bytes per read and write: large enough for the disk, small enough that the checksum runs in cache."""

_PUBLISHED = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"(step-\d{8,})(?:\.\d+)?\.(tmp|next|old|gone)")
_FILE = re.compile(r"(rank-\d{5,}\.safetensors|index\.json|state\.json)")
_log = logging.getLogger(__name__)


class FileRecord(NamedTuple):
    """What the manifest knows of a file."""

    size: int
    crc32: int


def folder_name(step: int) -> str:
    """The name of a step's published folder.

    >>> folder_name(30)
    'step-00000030'
    """
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a published folder, by its name."""
    match = _PUBLISHED.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not a checkpoint; checkpoint names look like {folder_name(30)}")
    return int(match[1])


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a file and wait until the disk has it; gives its size and checksum."""
    size = crc32 = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            while len(view):
                block = view[:BLOCK]
                written = os.write(handle, block)
                crc32 = zlib.crc32(block[:written], crc32)
                size += written
                view = view[written:]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileRecord(size, crc32)


def read_record(path: Path) -> FileRecord:
    """The size and checksum of a file as it is now."""
    size = crc32 = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            crc32 = zlib.crc32(block, crc32)
            size += len(block)
    return FileRecord(size, crc32)


def write_json(path: Path, value: Any) -> FileRecord:
    """Write a value as JSON."""
    return write_file(path, [json.dumps(value, separators=(",", ":")).encode()])


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, step: int, files: Mapping[str, FileRecord]) -> None:
    """Write `complete.json`, the last file of a folder, with a checksum of its own."""
    body = {"format": FORMAT, "step": step, "files": {name: list(record) for name, record in files.items()}}
    write_json(folder / MANIFEST, body | {"crc32": _digest(body)})


def read_manifest(folder: Path, step: int | None = None) -> dict[str, FileRecord]:
    """The files that a published folder must have; ValueError where the manifest is missing or damaged.

    The step is that of the folder's name when left out.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(body, dict) or body.pop("crc32", None) != _digest(body):
        raise ValueError(f"{path} is damaged: its checksum does not match")
    if body["format"] != FORMAT:
        raise ValueError(f"{path} has format {body['format']}; this version reads format {FORMAT}")
    if body["step"] != (step_of(folder) if step is None else step):
        raise ValueError(
            f"{path} is of step {body['step']}; the folder was renamed, or files of two "
            "checkpoints were mixed"
        )
    for name in body["files"]:
        if _FILE.fullmatch(name) is None:
            raise ValueError(f"{path} names the file {name!r}, which is not a file of a checkpoint")
    return {name: FileRecord(*record) for name, record in body["files"].items()}


def check_file(path: Path, expected: FileRecord, checksum: bool) -> None:
    """ValueError with the file's name unless it is there with its size, and if asked for its checksum."""
    try:
        size = path.stat().st_size
        found = read_record(path) if checksum and size == expected.size else FileRecord(size, expected.crc32)
    except FileNotFoundError:
        raise ValueError(f"{DAMAGED}{path} is missing") from None
    if found.size != expected.size:
        raise ValueError(f"{DAMAGED}{path} has {size} bytes instead of {expected.size}")
    if found.crc32 != expected.crc32:
        raise ValueError(f"{DAMAGED}the checksum of {path} does not match")


def check_share(folder: Path, rank: int, world_size: int) -> str:
    """What is damaged of a folder; of its files each rank reads its share in full. Empty where nothing is."""
    try:
        for number, (name, record) in enumerate(sorted(read_manifest(folder).items())):
            check_file(folder / name, record, checksum=number % world_size == rank)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def damage(folder: Path) -> str:
    """What is missing of a folder, by its manifest and the sizes of its files; empty where nothing is."""
    try:
        for name, record in read_manifest(folder).items():
            check_file(folder / name, record, checksum=False)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{folder} cannot be read: {error}"
    return ""


def is_complete(folder: Path) -> bool:
    """Whether a folder has its manifest and every file of it at its size."""
    return not damage(folder)


def point(root: Path, pointer: str, name: str) -> None:
    """Make `last` or `best` name a folder, in one step."""
    fresh = root / f"{pointer}.tmp"
    write_file(fresh, [f"{name}\n".encode()])
    os.replace(fresh, root / pointer)
    sync_folder(root)


def pointed(root: Path, pointer: str) -> Path | None:
    """The complete folder that a pointer names; None where the pointer is missing, torn, or names none."""
    try:
        name = (root / pointer).read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return root / name if _PUBLISHED.fullmatch(name) and is_complete(root / name) else None


def publish(root: Path, name: str) -> Path:
    """Rename a written folder to its published name; one of the same step is replaced by it."""
    fresh, final, old = root / f"{name}.tmp", root / name, root / f"{name}.old"
    sync_folder(fresh)
    if os.path.lexists(final):
        # A rename cannot replace a folder that has files. Killed in between, `recover` puts the old one back.
        clear(old)
        os.rename(final, old)
    try:
        os.rename(fresh, final)
    except OSError:
        if os.path.lexists(old):
            os.rename(old, final)
        raise
    sync_folder(root)
    remove(old)
    return final


def retain(root: Path, keep: int, protected: Iterable[str]) -> None:
    """Delete all but the `keep` folders published last, `last`, `best` and the protected ones."""
    names = set(protected) | {p.name for p in (pointed(root, "last"), pointed(root, "best")) if p is not None}
    for folder in [path for path in by_age(root) if (path / MANIFEST).is_file()][keep:]:
        if folder.name in names:
            continue
        try:
            remove(set_aside(folder))  # half a folder must never pass for a checkpoint
        except OSError as error:
            _log.warning("the old checkpoint %s could not be removed: %s", folder, error)


def remove(path: Path) -> None:
    """Delete what may or may not be there; a warning says what cannot be deleted."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        _log.warning(
            "%s is left from a killed run and cannot be removed (%s); delete it by hand", path, error
        )


def clear(path: Path) -> None:
    """See that a name is free: what cannot be deleted is moved aside."""
    remove(path)
    if os.path.lexists(path):
        set_aside(path)


def set_aside(path: Path) -> Path:
    """Rename to a name under which it is taken for nothing but a leftover."""
    name = path.name.split(".")[0]
    aside = next(p for n in itertools.count() if not os.path.lexists(p := path.with_name(f"{name}.{n}.gone")))
    os.rename(path, aside)
    return aside


def discard(folder: Path) -> None:
    """Delete what can be deleted of a folder that could not be written."""
    shutil.rmtree(folder, ignore_errors=True)


def leftovers(root: Path) -> dict[str, list[Path]]:
    """What a killed run left, by the name of the published folder that it belongs to."""
    found: dict[str, list[Path]] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if match := _LEFTOVER.fullmatch(path.name):
            found.setdefault(match[1], []).append(path)
    return found


def found_in(root: Path) -> list[Path]:
    """Every folder with the name of a published one, damaged or not, by its step."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        if not _PUBLISHED.fullmatch(path.name):
            continue
        if path.is_dir():
            found.append(path)
        else:
            _log.warning("%s is neither a folder nor a checkpoint: it is kept", path)
    return sorted(found, key=step_of)


def by_age(root: Path) -> list[Path]:
    """Published folders, the youngest first: by time, for a run may have been set back to an earlier step."""

    def age(path: Path) -> tuple[int, int]:
        manifest = path / MANIFEST
        return (manifest if manifest.is_file() else path).stat().st_mtime_ns, step_of(path)

    return sorted(found_in(root), key=age, reverse=True)


def _digest(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
