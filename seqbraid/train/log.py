"""`log.jsonl` of a run, and the other places its metrics go to.

The log is only ever appended to. What a killed run logged past its last checkpoint stays in it: an event
(`resumed`, `started over`) says that the run went back, and `current_records` leaves that out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from .log_file import LogFile
from .progress import StepProgress
from .trackers import ENTRY_POINTS, TRACKERS, Tracker, open_tracker, other_sinks

LOG_FILE = "log.jsonl"
RESUMED, STARTED_OVER = BACK = ("resumed", "started over")
"""Events: the run goes on after the step of this record, whatever was logged of later ones."""

DEFAULT_SINK = "tensorboard"
"""Without its package a run goes on and says so; the others are only there where they were asked for."""
MOST_STEPS, LATEST = 2**53, 1e11
"""Of a step and of a time (in the year 5138): what is beyond was not logged by a run."""


def open_sinks(
    folder: Path,
    names: Sequence[str] | str = DEFAULT_SINK,
    config: Mapping[str, Any] | None = None,
    resume_step: int = 1,
    console: Console | None = None,
    total_steps: int | None = None,
    every: int = 1,
    keeps: bool = False,
) -> Sinks:
    """Open a run's log and the sinks of these names; for rank 0, the others take `Sinks()`.

    Args:
        folder: the run's.
        names: of `tensorboard`, `wandb`, `mlflow`, `trackio` or another package's; one, several (also with
            commas), or none.
        config: shown beside the metrics where a sink can.
        resume_step: the first step that will be logged now, 1 for a new run.
        console: where progress is shown; standard error when left out.
        total_steps: of the whole run, where it is known.
        every: steps between lines of progress where there is no terminal.
        keeps: go on where the log cannot be written, and write it when it can be.
    """
    names = sink_names(names)
    folder.mkdir(parents=True, exist_ok=True)
    sinks = Sinks(folder / LOG_FILE, StepProgress(resume_step, total_steps, every, console), keeps)
    sinks.go_on(resume_step - 1)
    try:
        for name in names:
            sinks.add(name, folder, config or {}, resume_step)
    except ValueError:
        sinks.close()
        raise
    return sinks


def sink_names(names: Sequence[str] | str) -> list[str]:
    """One, several (also with commas) or no names of sinks; an unknown one is refused."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    names = [name for name in dict.fromkeys(names) if name]
    unknown = [name for name in names if name not in TRACKERS]
    others = other_sinks() if unknown else {}
    unknown = [name for name in unknown if name not in others]
    if unknown:
        raise ValueError(
            f"unknown sink {unknown[0]!r}; use any of {', '.join([*TRACKERS, *others])}, or none; a package "
            f"can add its own under the entry point group {ENTRY_POINTS!r}"
        )
    return names


def check_sinks(names: Sequence[str] | str) -> None:
    """Refuse names of sinks that are unknown, or whose packages are missing, before anything is opened."""
    for name in sink_names(names):
        if name == DEFAULT_SINK:
            continue
        install = TRACKERS[name][2] if name in TRACKERS else "install what its package asks for"
        try:
            if name in TRACKERS:
                import_module(TRACKERS[name][1])
            else:
                other_sinks()[name].load()
        except ImportError as error:
            raise ValueError(f"the sink {name!r} needs its package ({error}): {install}") from None
        except Exception:  # one that is there but fails is left out, and named, when it is opened
            continue


class Sinks:
    """All places that metrics and events go to; without a file it is nowhere, as ranks but the first have it.

    The log is the record of a run, so an error in writing it is raised, unless its lines are to be kept until
    they can be written. The other sinks are a convenience:
    one that fails is named once, and left out from then on.
    """

    def __init__(
        self, path: Path | None = None, progress: StepProgress | None = None, keeps: bool = False
    ) -> None:
        self.file = None if path is None else LogFile(path, keeps)
        self._keeping = False
        self.progress = progress
        self.trackers: dict[str, Tracker] = {}
        self.step = 0

    def add(self, name: str, folder: Path, config: Mapping[str, Any], resume_step: int) -> None:
        """Open a sink; one whose package is missing is refused, one that cannot be reached is left out."""
        install = TRACKERS[name][2] if name in TRACKERS else "install what its package asks for"
        try:
            self.trackers[name] = open_tracker(name, folder, config, resume_step)
        except ImportError as error:
            if name != DEFAULT_SINK:
                raise ValueError(f"the sink {name!r} needs its package ({error}): {install}") from None
            # The default sink must not keep a run from starting.
            self.say(f"no TensorBoard files are written, since the package is missing: {install}")
        except Exception as error:
            self._gave_up(name, error)

    def go_on(self, step: int) -> None:
        """Say in a log that has something already that the run goes on after this step."""
        if self.file is None or self.file.is_new:
            return
        self.event(RESUMED if step else STARTED_OVER, step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, to every sink."""
        self.step = step
        if self.file is None:
            return
        self._write({"step": step, **metrics})
        for name, tracker in list(self.trackers.items()):
            try:
                tracker.log(step, metrics)
            except Exception as error:  # whatever a service raises, training goes on
                del self.trackers[name]
                self._gave_up(name, error)
        if self.progress is not None:
            self.progress.show(step, metrics)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        """Something that happened (a checkpoint, a resume, a bad sample), in the log only; at the last logged
        step unless another is given."""
        if self.file is not None:
            self._write({"step": self.step if step is None else step, "event": kind, **fields})

    def close(self) -> None:
        """Write what is left, and take the progress bar away."""
        for name, tracker in self.trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self._gave_up(name, error)
        self.trackers = {}
        if self.file is not None:
            if lost := self.file.close():
                self.say(f"{lost} lines of {self.file.path} COULD NOT BE WRITTEN, and are lost")
            self.file = None
        if self.progress is not None:
            self.progress.close()
            self.progress = None

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self.file is not None
        # Python writes floats with all their digits, so that runs can be compared bit for bit.
        line = json.dumps({**_valid(record), "time": time.time()}, allow_nan=False, default=str)
        reason = self.file.append(line)
        if reason and not self._keeping:
            self.say(f"{self.file.path} CANNOT BE WRITTEN ({reason}); its lines are kept until it can be")
        self._keeping = bool(reason)

    def _gave_up(self, name: str, error: Exception) -> None:
        self.say(f"{name} failed and is not used any more: {type(error).__name__}: {error}")

    def say(self, text: str) -> None:
        """A line on the console, of the first rank."""
        if self.progress is not None:
            self.progress.say(text)


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log, each with a step; other lines, as the last one of a process that was killed or is
    writing just now, are left out."""
    return (record for record in read_lines(path) if record is not None)


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The records of a log, and None for each other line that has its end."""
    with path.open("rb") as file:
        for line in file:
            record = _parsed(line)
            if record is not None or line.endswith(b"\n"):
                yield record


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MOST_STEPS:
        return None
    when = record.get("time", 0.0)
    if not isinstance(when, float) or not 0 <= when <= LATEST:
        del record["time"]
    return {
        key: SPECIAL.get(value, value) if isinstance(value, str) else value for key, value in record.items()
    }


SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Floats that JSON does not have, as the log has them."""


def current_records(path: Path) -> list[dict[str, Any]]:
    """The records of a log, but for those of steps that the run went back on and did again."""
    kept: list[dict[str, Any]] = []
    for record in read_log(path):
        if record.get("event") in BACK:
            kept = [r for r in kept if r["step"] <= record["step"]]
        kept.append(record)
    return kept


def _valid(record: Mapping[str, Any]) -> dict[str, Any]:
    """With the floats that JSON does not have as words."""
    return {
        key: ("NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity")
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in record.items()
    }
