"""The head of a report: who is who, and how each run did."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from html import escape

import numpy as np

from .data import LARGEST, Floats, RunLog
from .plot import BLUE, GREEN, ORANGE

COLORS = (BLUE, ORANGE, GREEN, "#b061d6", "#dd4b5e", "#17a3b5", "#9a8c1c", "#a9746e")
"""Each stands out from white and from black; from the ninth run on they come again, dashed."""


def color_of(index: int) -> str:
    """Of the run of this number."""
    return COLORS[index % len(COLORS)]


def dash_of(index: int) -> str:
    """Solid for the first runs."""
    return "" if index < len(COLORS) else "9 3"


def run_name(index: int, run: RunLog) -> str:
    """A run's name beside a piece of its curve."""
    line = (
        f"<path d='M0 5h24' stroke='{color_of(index)}' stroke-width='3' stroke-dasharray='{dash_of(index)}'/>"
    )
    return f"<span class='run'><svg viewBox='0 0 24 10'>{line}</svg>{escape(run.name)}</span>"


def summary_table(runs: Sequence[RunLog]) -> str:
    """A row for each run."""
    columns: dict[str, Callable[[RunLog], str]] = {
        "steps": lambda run: f"{run.last_step:,}",
        "last loss": lambda run: _number(_last(run, "loss"), ".4f"),
        "best eval loss": _best_eval,
        "accuracy": lambda run: _number(_last(run, "accuracy"), ".1%"),
        "tokens": lambda run: _count(_sum(run, "tokens")),
        "tokens/s": lambda run: _number(_median(run, "tokens_per_s"), ",.0f"),
        "MFU": lambda run: _number(_median(run, "mfu"), ".1%"),
        "memory": lambda run: _number(_most(run, "memory_gib"), ".2f", " GiB"),
        "time": lambda run: (
            "–" if math.isnan(run.started) else str(timedelta(seconds=round(run.ended - run.started)))
        ),
        "not finite": lambda run: str(sum(_lost(run, name) for name in ("loss", "grad_norm")) or "–"),
        "unreadable lines": lambda run: f"{run.unreadable:,}" if run.unreadable else "–",
    }
    cells = {name: [show(run) for run in runs] for name, show in columns.items()}
    # What no run has (an MFU on a device without a known peak) needs no column.
    cells = {name: column for name, column in cells.items() if set(column) != {"–"}}
    rows = []
    for i, run in enumerate(runs):
        values = "".join(f"<td>{escape(column[i])}</td>" for column in cells.values())
        rows.append(f"<tr><td>{run_name(i, run)}</td>{values}</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in ("run", *cells))
    note = "Speed and MFU are medians over the steps, memory is the maximum."
    return (
        f"<div class='wide'><table><tr>{heads}</tr>{''.join(rows)}</table></div>"
        f"<p class='soft'>{escape(note)}</p>"
    )


def _last(run: RunLog, metric: str) -> float:
    curve = run.curves[metric]
    return float(curve.values[-1]) if len(curve) else math.nan


def _finite(run: RunLog, metric: str) -> Floats:
    return run.curves[metric].finite()[1]


def _median(run: RunLog, metric: str) -> float:
    values = _finite(run, metric)
    return float(np.median(values)) if len(values) else math.nan


def _most(run: RunLog, metric: str) -> float:
    return float(_finite(run, metric).max(initial=-math.inf))


def _sum(run: RunLog, metric: str) -> float:
    return float(_finite(run, metric).sum())


def _lost(run: RunLog, metric: str) -> int:
    values = run.curves[metric].values
    return len(values) - int(np.isfinite(values).sum())


def _best_eval(run: RunLog) -> str:
    curve = run.curves["eval_loss"]
    finite = abs(curve.values) < LARGEST if len(curve) else np.zeros(0, bool)
    if not finite.any():
        return "–"
    best = int(np.where(finite, curve.values, np.inf).argmin())
    return f"{curve.values[best]:.4f} at {int(curve.steps[best]):,}"


def _number(value: float, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if abs(value) < LARGEST else "–"


def _count(value: float) -> str:
    """12.3 M; – for nothing."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.0f}" if value else "–"
