"""What a report needs of the logs of runs: curves, thinned for drawing, and how far apart two are."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..log import LOG_FILE, read_lines

Floats = NDArray[np.float64]

METRICS = (
    "loss", "eval_loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_gib", "data_wait_s", "padding",
    "fill", "accuracy", "eval_accuracy", "tokens", "step_s",
    "mtp_loss", "eval_mtp_loss", "mtp_acceptance_1", "eval_mtp_acceptance_1",
    "expert_load_max", "pipeline_bubble",
)  # fmt: skip
"""What is kept of a log; the rest of a long one need not be in memory."""

MOST_POINTS = 2000
STRETCHES = 150
"""Of which a noisy curve's mean is drawn."""
MOST_EVENTS = 1000
LARGEST = 1e100
"""What is beyond has no place in a plot or a sum, as what is not finite."""


class Curve:
    """The values of a metric; where a log goes back to an earlier step, what followed is forgotten."""

    def __init__(self) -> None:
        self._steps = array("d")
        self._values = array("d")

    def add(self, step: int, value: float) -> None:
        """A value of a step."""
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            self._values.pop()
        self._steps.append(step)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> Floats:
        """In rising order."""
        return np.array(self._steps)

    @property
    def values(self) -> Floats:
        """As logged, NaN and infinities included."""
        return np.array(self._values)

    def finite(self) -> tuple[Floats, Floats]:
        """Steps and values of the points that can be drawn."""
        steps, values = self.steps, self.values
        shown = abs(values) < LARGEST
        return steps[shown], values[shown]


@dataclass
class RunLog:
    """A run as its folder tells it."""

    name: str
    path: Path
    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in METRICS})
    events: list[dict[str, Any]] = field(default_factory=list)
    """The last of them."""
    num_events: int = 0
    started: float = math.nan
    """Seconds, as `time.time` has them."""
    ended: float = math.nan
    config: str | None = None
    unreadable: int = 0
    """Lines of the log that are no records."""

    @property
    def last_step(self) -> int:
        """The newest step with a loss; 0 before the first."""
        loss = self.curves["loss"]
        return int(loss.steps[-1]) if len(loss) else 0


def read_run(path: Path) -> RunLog:
    """Read a run's folder, also while the run goes on."""
    path = path.parent if path.name == LOG_FILE else path
    log = path / LOG_FILE
    if not log.is_file():
        raise ValueError(f"{path} has no {LOG_FILE}; give the folder of a run (`out` in its config)")
    run = RunLog(path.resolve().name or str(path), path)
    some = False
    for record in read_lines(log):
        if record is None:
            run.unreadable += 1
        else:
            some = True
            _add(run, record)
    if run.unreadable and not some:
        raise ValueError(
            f"{log} is not the log of a run: of its {run.unreadable} lines none is JSON with a step; give "
            "the folder of a run (`out` in its config)"
        )
    config = path / "config.yaml"
    if config.is_file():
        run.config = config.read_text(encoding="utf-8", errors="replace")
    return run


def _add(run: RunLog, record: dict[str, Any]) -> None:
    when = record.get("time")
    if when is not None:
        run.started, run.ended = (when if math.isnan(run.started) else run.started), when
    if "event" in record:
        run.num_events += 1
        run.events.append(record)
        del run.events[:-MOST_EVENTS]
        return
    for name in METRICS:
        value = record.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            run.curves[name].add(record["step"], _float(value))


def _float(value: float) -> float:
    """Infinite where an integer has more digits than a float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def thinned(x: Floats, y: Floats, most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most so many points, among them the first, the last, and the extremes of every stretch between."""
    if len(x) > most:
        kept = {0, len(x) - 1}
        for stretch in np.array_split(np.arange(len(x)), (most - 2) // 2):
            kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
        rows = sorted(kept)
        x, y = x[rows], y[rows]
    return x.tolist(), y.tolist()


def averaged(x: Floats, y: Floats, stretches: int = STRETCHES) -> tuple[list[float], list[float]]:
    """Means of stretches of a curve, each at the middle of its stretch."""
    rows = [row for row in np.array_split(np.arange(len(x)), stretches) if len(row)]
    return [float(x[row].mean()) for row in rows], [float(y[row].mean()) for row in rows]


class Difference(NamedTuple):
    """How far the losses of two runs are apart, step by step."""

    steps: Floats
    """Those that both have."""
    relative: Floats
    """|a − b| over the larger of |a| and |b|; infinite where only one is finite, 0 where neither is."""

    @property
    def largest(self) -> tuple[float, int]:
        """The largest, and its step."""
        worst = int(self.relative.argmax())
        return float(self.relative[worst]), int(self.steps[worst])


def loss_difference(one: RunLog, other: RunLog) -> Difference | None:
    """None where the runs have no step in common."""
    mine, theirs = one.curves["loss"], other.curves["loss"]
    steps, own_rows, other_rows = np.intersect1d(mine.steps, theirs.steps, return_indices=True)
    if not len(steps):
        return None
    a, b = mine.values[own_rows], theirs.values[other_rows]
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.maximum(abs(a), abs(b))
        relative = np.where(a == b, 0.0, abs(a - b) / size)
    lost = ~np.isfinite(a), ~np.isfinite(b)
    relative = np.where(lost[0] & lost[1], 0.0, np.where(lost[0] | lost[1], np.inf, relative))
    return Difference(steps, relative)


def distinct_names(runs: Sequence[RunLog]) -> None:
    """Runs whose folders have the same name go by as much of their paths as tells them apart."""
    for depth in range(2, 20):
        names = [run.name for run in runs]
        if len(set(names)) == len(names):
            return
        for run in runs:
            if names.count(run.name) > 1:
                run.name = "/".join(run.path.resolve().parts[-depth:])
    for number, run in enumerate(runs):  # the same folder twice
        run.name = f"{run.name} ({number + 1})"
