"""How a run ended: its exit status, and `ended.json` in its folder, which says so under torchrun too.

Torchrun turns any status of its processes into its own, and starts them again where it may.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..comm.consensus import gather_objects
from ..mesh import Mesh
from .checkpoint.choose import named_last
from .process import launcher

ENDED_FILE = "ended.json"
FINISHED, FAILED, REFUSED = 0, 1, 2
UNSAVED = 74
"""All steps are done, but the last checkpoint could not be written (EX_IOERR of sysexits.h)."""
PREEMPTED = 75
"""A signal asked the run to stop: it is saved, and the same command goes on from there (EX_TEMPFAIL)."""

_log = logging.getLogger(__name__)

STATUS = {"finished": FINISHED, "failed": FAILED, "unsaved": UNSAVED, "preempted": PREEMPTED}


@dataclass(frozen=True)
class Ending:
    """Why a run is over."""

    reason: Literal["finished", "preempted", "unsaved"]
    step: int
    """Steps that are done."""
    checkpoint: str | None
    """The last one that is published."""
    signal: str | None = None

    @property
    def status(self) -> int:
        """The exit status."""
        return STATUS[self.reason]

    def sentence(self) -> str:
        """For who reads the console."""
        kept = f"the last checkpoint is {self.checkpoint}" if self.checkpoint else "there is no checkpoint"
        if self.reason == "preempted":
            asked = f" by {self.signal}" if self.signal else ""
            return f"stopped{asked} after step {self.step}; {kept}; the same command resumes from it"
        if self.reason == "unsaved":
            return f"step {self.step} is done but could not be saved; {kept}"
        return f"finished after step {self.step}; {kept}"


def write_ending(folder: Path, mesh: Mesh, ending: Ending) -> None:
    """All ranks call it; the first writes."""
    agents = sorted({agent for agent in gather_objects(mesh.cpu_group, launcher()) if agent})
    facts = {"signal": ending.signal, "agents": agents}
    if mesh.rank == 0:
        try:
            _write(folder, ending.reason, ending.step, ending.checkpoint, facts, replace=True)
        except OSError as error:  # the exit status and the console say it as well
            _log.warning("%s cannot be written: %s", folder / ENDED_FILE, error)


def write_failure(folder: Path, rank: int, step: int | None, error: BaseException) -> None:
    """The rank that fails first says why; no other is asked."""
    facts: dict[str, Any] = {"rank": rank, "error": f"{type(error).__name__}: {error}"}
    if isinstance(error, ValueError):
        facts["status"] = REFUSED
    checkpoint = named_last(folder / "checkpoints")
    try:
        _write(folder, "failed", step, checkpoint, facts, replace=False)
    except FileExistsError:
        _bring_up_to_date(folder, checkpoint)
    except OSError:  # what is raised says more
        return


def _bring_up_to_date(folder: Path, checkpoint: str | None) -> None:
    """What another rank has written first may be from before the first rank published the latest save."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads((folder / ENDED_FILE).read_bytes())
        if known["reason"] == "failed" and known["checkpoint"] != checkpoint:
            _replace(folder, {**known, "checkpoint": checkpoint})


def forget_ending(folder: Path) -> None:
    """The run goes on: how it once ended says nothing any more."""
    (folder / ENDED_FILE).unlink(missing_ok=True)


def preempted_here(folder: Path, mesh: Mesh) -> bool:
    """Whether this is a restart, by the very torchrun agent under which the run was stopped by a signal.

    Such a run is to stay stopped. A scheduler that starts the job again brings a new agent, and goes on.
    """
    found = False
    if own := launcher():
        try:
            ended = json.loads((folder / ENDED_FILE).read_bytes())
            found = ended["reason"] == "preempted" and own in ended["agents"]
        except (OSError, ValueError, KeyError, TypeError):
            found = False
    return any(gather_objects(mesh.cpu_group, found))


def _write(
    folder: Path, reason: str, step: int | None, checkpoint: str | None, facts: dict[str, Any], replace: bool
) -> None:
    known = {
        "reason": reason,
        "status": STATUS[reason],
        "step": step,
        "checkpoint": checkpoint,
        **facts,
        "host": socket.gethostname(),
        "time": time.time(),
    }
    if replace:
        _replace(folder, known)
        return
    with _fresh(folder, known) as fresh:
        _first(fresh, folder / ENDED_FILE)


def _replace(folder: Path, known: dict[str, Any]) -> None:
    with _fresh(folder, known) as fresh:
        fresh.replace(folder / ENDED_FILE)


@contextmanager
def _fresh(folder: Path, known: dict[str, Any]) -> Iterator[Path]:
    """A file of another name, which is gone afterwards."""
    fresh = folder / f"{ENDED_FILE}.{uuid.uuid4().hex[:8]}"
    try:
        fresh.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)


def _first(fresh: Path, path: Path) -> None:
    """Give a file its name; FileExistsError where another rank was first."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with path.open("x", encoding="utf-8") as file:
            file.write(fresh.read_text(encoding="utf-8"))
