"""Which checkpoint a run resumes from: nothing is guessed, and damage is reported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from . import files
from .files import DAMAGED

RESUME = re.compile(r"auto|never|must|latest-intact|step:\d+")
WAY_OUT = (
    "restore the missing files, or resume from another checkpoint: resume=latest-intact falls back to "
    "the newest intact one, resume=step:N to that of a step; later steps are then trained again"
)
_SET_BACK = "set_back"


def check_resume(resume: str) -> None:
    """Refuse what is no way to resume."""
    if RESUME.fullmatch(resume) is None:
        raise ValueError(f"resume={resume!r} is unknown; use auto, never, must, latest-intact or step:N")


def choose_checkpoint(root: Path, resume: str, way_out: str = WAY_OUT) -> Path | None:
    """The folder to resume from, by sizes; None to start over. Not for `latest-intact`, which
    reads it all.
    """
    found = files.found_in(root)
    if resume == "never" and found:
        raise ValueError(f"{root} has checkpoints ({_names(found)}) and resume is 'never'; give another out")
    if resume == "must" and not found:
        raise ValueError(f"{root} has no checkpoint and resume is 'must'")
    if resume.startswith("step:") and not _is_set_back(root, resume):
        chosen: Path | None = root / files.folder_name(int(resume.removeprefix("step:")))
        problem = files.damage(chosen) if chosen in found else f"{chosen} is missing"
    else:
        chosen, problem = _newest(root, found)
    if problem:
        whole = [path for path in found if files.is_complete(path)]
        others = f"these look complete: {_names(whole)}" if whole else "none of the others is complete"
        what = problem.removeprefix(DAMAGED)
        raise ValueError(f"the checkpoint to resume from is damaged: {what}. Of {root}, {others}; {way_out}")
    return chosen


def candidates(root: Path) -> Iterator[Path]:
    """All published folders, in the order in which `latest-intact` tries them."""
    named = named_last(root)
    found = files.by_age(root)
    first = [path for path in found if path.name == named]
    yield from first
    yield from (path for path in found if path not in first)


def set_back(root: Path, path: Path, resume: str) -> None:
    """Let `last` name the folder that was chosen by hand: a restart goes on from there."""
    files.point(root, "last", path.name)
    if resume.startswith("step:"):
        files.write_file(root / _SET_BACK, [_mark(resume).encode()])


def named_last(root: Path) -> str | None:
    """What `last` says; None where there is none."""
    try:
        return (root / "last").read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def _newest(root: Path, found: list[Path]) -> tuple[Path | None, str]:
    """What `last` names, or without it the youngest; and what is wrong with it."""
    named = named_last(root)
    if named is None:
        youngest = next(iter(files.by_age(root)), None)
        return youngest, "" if youngest is None else files.damage(youngest)
    path = next((path for path in found if path.name == named), None)
    if path is None:
        return None, f"{root / 'last'} names {named!r}, which does not exist"
    return path, files.damage(path)


def _is_set_back(root: Path, resume: str) -> bool:
    """Whether this is torchrun's restart of a run that has gone back to the step already."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < 1:
        return False
    try:
        return (root / _SET_BACK).read_text() == _mark(resume)
    except (OSError, ValueError):
        return False


def _mark(resume: str) -> str:
    return f"{resume} in {os.environ.get('TORCHELASTIC_RUN_ID', 'no torchrun')}"


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)
