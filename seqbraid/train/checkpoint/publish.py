"""From files that all ranks have written to a published checkpoint, whenever a kill comes.

Each rank leaves a record beside its file in `step-….tmp` when the disk has it. Once all records are there,
the save is finished, whatever becomes of the run: it is published by the run, on the run's way out, or by the
next start.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path

from . import files
from .files import FileRecord
from .index import make_index, rank_file
from .job import Job

_log = logging.getLogger(__name__)

STATE = "state.json"


def write_part(folder: Path, rank: int, parts: list[bytes | memoryview], state: str | None) -> FileRecord:
    """A rank's file (the first one's state too), and then the record that it is whole."""
    record = files.write_file(folder / rank_file(rank), parts)
    if state is not None:
        files.write_file(folder / STATE, [state.encode()])
    files.write_json(folder / _record_file(rank), record)
    return record


def name_best(root: Path, name: str) -> None:
    """That `best` is to name a folder when it is published."""
    files.write_file(root / f"{name}.next", [b"best"])


def publish_written(root: Path, name: str, written: Mapping[str, FileRecord]) -> None:
    """The files about the ranks' files, then the rename, then the pointers."""
    fresh, pending = root / f"{name}.tmp", root / f"{name}.next"
    for file, record in written.items():
        files.check_file(fresh / file, record, checksum=False)
    index = files.write_json(fresh / "index.json", make_index(fresh, written))
    state = files.read_record(fresh / STATE)
    files.write_manifest(fresh, _step(name), dict(written) | {"index.json": index, STATE: state})
    if not pending.exists():
        files.write_file(pending, [b"last"])
    _rename(root, name)


def finish_written(root: Path, name: str) -> bool:
    """Publish a save if every rank has finished its part, without asking the ranks; whether they had."""
    fresh = root / f"{name}.tmp"
    try:
        manifest = files.read_manifest(fresh, _step(name))
        for file, record in manifest.items():
            files.check_file(fresh / file, record, checksum=False)
        _rename(root, name)
        return True
    except ValueError:  # not so far yet
        written = _written(fresh)
    if written is None:
        return False
    publish_written(root, name, written)
    return True


def publish_on_leaving(root: Path, job: Job, rank: int, patience_s: float) -> None:
    """Wait for this rank's part of a save, and on the first rank for all parts, as long as they grow."""
    fresh, size, end = root / f"{job.name}.tmp", -1, time.monotonic() + patience_s
    try:
        while time.monotonic() < end:
            if job.work.done() and (rank or job.phase == "publishing" or job.work.exception()):
                return
            if job.work.done() and finish_written(root, job.name):
                return
            wait([job.work], timeout=0.05)
            time.sleep(0.02)
            now = sum(path.stat().st_size for path in fresh.iterdir()) if fresh.is_dir() else -1
            if now != size:
                size, end = now, time.monotonic() + patience_s
    except (OSError, ValueError) as error:
        _log.warning("the checkpoint of step %s was not published: %s", job.step, error)


def recover(root: Path, busy: str | None) -> None:
    """Complete or undo what a killed run left half done; `busy` is a folder that is being written now."""
    for name, paths in files.leftovers(root).items():
        fresh, old, pending = (root / f"{name}.{kind}" for kind in ("tmp", "old", "next"))
        if fresh.name == busy:
            continue
        if os.path.lexists(old) and not os.path.lexists(root / name):
            os.rename(old, root / name)
        if fresh.is_dir():
            try:
                if finish_written(root, name):
                    _log.warning("%s was complete when the last run ended and is published now", root / name)
            except (OSError, ValueError) as error:
                _log.warning("%s is complete but cannot be published: %s", root / name, error)
        elif pending.exists() and files.is_complete(root / name):
            _point(root, name)
        for path in paths:
            files.remove(path)


def _rename(root: Path, name: str) -> None:
    fresh = root / f"{name}.tmp"
    for path in fresh.iterdir():
        if path.name.startswith("rank-") and path.suffix == ".json":
            path.unlink()
    files.publish(root, name)
    _point(root, name)


def _point(root: Path, name: str) -> None:
    pending = root / f"{name}.next"
    files.point(root, "last", name)
    if pending.exists():
        if pending.read_bytes() == b"best":
            files.point(root, "best", name)
        files.remove(pending)


def _record_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _step(name: str) -> int:
    return files.step_of(Path(name))


def _written(fresh: Path) -> dict[str, FileRecord] | None:
    """The records of all ranks; None where one is missing or torn."""
    try:
        world_size = json.loads((fresh / STATE).read_bytes())["world_size"]
        return {
            rank_file(rank): FileRecord(*json.loads((fresh / _record_file(rank)).read_bytes()))
            for rank in range(world_size)
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
