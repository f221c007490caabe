"""`seqbraid report`: the logs of runs on one page, with nothing to load from elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..log import BACK
from .data import RunLog, averaged, distinct_names, loss_difference, read_run, thinned
from .plot import GREY, Mark, Series, line_plot
from .style import STYLE
from .summary import color_of, dash_of, run_name, summary_table

LONG = 300
"""Steps from which on a curve is drawn faintly, with its mean above it."""

GENERATOR = "<meta name='generator' content='seqbraid report'>"
SHOWN_EVENTS = 200
MARKS_PER_KIND = 60
ACROSS = BACK
"""Events that a curve may break at; others are ticks on the axis."""

OWN_STYLE = """
body { max-width: 1080px; }
.legend { background: var(--paper); border-bottom: 1px solid var(--card); display: flex; flex-wrap: wrap;
          gap: 4px 20px; margin: 0 -8px; padding: 8px; position: sticky; top: 0; }
.run { align-items: center; display: inline-flex; gap: 7px; overflow-wrap: anywhere; }
.run svg { flex: none; height: 10px; width: 24px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; width: 100%; }
th { color: var(--soft); font-weight: 500; }
th, td { border-bottom: 1px solid var(--card); padding: 6px 8px; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
td:first-child { white-space: normal; min-width: 120px; }
.left th, .left td { text-align: left; }
summary { cursor: pointer; margin: 10px 0; }
.plot { margin: 22px 0; }
pre { font-size: 13px; }
"""


class Chart(NamedTuple):
    """A plot of the page: which metrics, under which title."""

    title: str
    metric: str
    unit: str
    held_out: str | None = None
    """The metric's counterpart on held-out data, dashed."""
    scale: float = 1.0
    log: bool = False


CHARTS = (
    Chart("Loss", "loss", "nats per label token", "eval_loss"),
    Chart("Next-token accuracy", "accuracy", "%", "eval_accuracy", 100.0),
    Chart("Multi-token prediction: loss", "mtp_loss", "nats per label token", "eval_mtp_loss"),
    Chart("… accepted at depth 1", "mtp_acceptance_1", "%", "eval_mtp_acceptance_1", 100.0),
    Chart("Picks of the busiest expert", "expert_load_max", "times its fair share"),
    Chart("Gradient norm", "grad_norm", "before clipping", log=True),
    Chart("Learning rate", "lr", "rate"),
    Chart("Speed", "tokens_per_s", "tokens/s"),
    Chart("Model FLOPs utilization", "mfu", "% of the peak", scale=100.0),
    Chart("Peak memory", "memory_gib", "GiB"),
    Chart("Waiting for data", "data_wait_s", "s per step"),
    Chart("Waiting for other pipeline stages", "pipeline_bubble", "% of a step", scale=100.0),
    Chart("Padding", "padding", "% of the slots", scale=100.0),
    Chart("Rows filled", "fill", "% of row_tokens", scale=100.0),
)


def is_report(path: Path) -> bool:
    """Whether a file is one that `write_report` wrote."""
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(1024)


def write_report(runs: Sequence[Path], out: Path, force: bool = False) -> None:
    """Write the report of one or more runs, given by their folders, into a file.

    A file that is there already is replaced if it is a report, any other only with `force`.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    if out.is_dir():
        raise ValueError(f"--out={str(out)!r} is a folder; give a file, such as {str(out / 'report.html')!r}")
    if out.exists() and not (force or is_report(out)):
        raise ValueError(f"{out} exists and is not a report; give another --out, or --force to replace it")
    try:
        found = [read_run(Path(path)) for path in runs]
    except OSError as error:
        raise ValueError(f"a run cannot be read: {error}") from None
    distinct_names(found)
    page = report_page(found).encode("utf-8", errors="replace")  # JSON can name halves of characters
    # Replaced in one move: a browser that reloads while a run goes on never sees half a page.
    half = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(page)
        half.replace(out)
    except OSError as error:
        raise ValueError(f"--out={str(out)!r} cannot be written: {error}; give another file") from None


def report_page(runs: Sequence[RunLog]) -> str:
    """The whole page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} training runs"
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    sections = [
        (
            f"<h1>{escape(title)}</h1><p class='soft'>Written {escape(written)}. Ticks on the axis are "
            "events (mostly checkpoints), dashed lines are resumes; hover over one to read it. Dashed curves "
            "are evaluations; for long runs the mean is drawn over the steps.</p>"
        ),
        summary_table(runs),
        _legend(runs),
        *(_chart(chart, runs) for chart in CHARTS),
        _differences(runs),
        _events(runs),
        *(_config(run) for run in runs if run.config is not None),
    ]
    head = f"<meta charset='utf-8'>{GENERATOR}<title>{escape(title)}</title><style>{STYLE}{OWN_STYLE}</style>"
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def _legend(runs: Sequence[RunLog]) -> str:
    names = "".join(run_name(i, run) for i, run in enumerate(runs))
    return f"<div class='legend'>{names}</div>" if len(runs) > 1 else ""


def _width(index: int, count: int) -> float:
    """Runs may lie on each other, as those of one training on two meshes do: lower ones are wider."""
    return 1.7 + min(2.6 * (count - 1 - index), 7.8)


def _chart(chart: Chart, runs: Sequence[RunLog]) -> str:
    plot = chart_plot(chart, runs)
    return plot and f"<div class='plot'>{plot}</div>"


def chart_plot(chart: Chart, runs: Sequence[RunLog], legend: bool = False) -> str:
    """A plot of all runs that have the metric, as SVG; nothing where none has."""
    noisy: list[Series] = []
    plain: list[Series] = []
    held_out: list[Series] = []
    marks: list[Mark] = []
    for i, run in enumerate(runs):
        x, y = run.curves[chart.metric].finite()
        y = chart.scale * y
        width = _width(i, len(runs))
        if len(x) >= LONG:
            noisy.append(Series(run.name, *thinned(x, y), color_of(i), 1.0, opacity=0.3))
            plain.append(Series(f"{run.name}, mean", *averaged(x, y), color_of(i), width, dash_of(i)))
        elif len(x):
            plain.append(Series(run.name, x.tolist(), y.tolist(), color_of(i), width, dash_of(i)))
        if chart.held_out is not None:
            x, y = run.curves[chart.held_out].finite()
            if len(x):
                points = thinned(x, chart.scale * y)
                held_out.append(Series(f"{run.name}, eval", *points, color_of(i), 1.8, "5 4", len(x) <= 40))
        marks += _marks(run, color_of(i) if len(runs) > 1 else GREY)
    series = [*noisy, *plain, *held_out]
    if not series:
        return ""
    positive = [value for one in series for value in one.y if value > 0]
    # A logarithmic axis is for what spans decades.
    log = chart.log and bool(positive) and max(positive) > 30 * min(positive)
    return line_plot(chart.title, series, "step", chart.unit, log=log, marks=marks, legend=legend)


def _marks(run: RunLog, color: str) -> list[Mark]:
    found: dict[str, list[Mark]] = {}
    for event in run.events:
        kind = str(event["event"])
        mark = Mark(event["step"], f"{run.name}: {kind} at step {event['step']}", color, kind in ACROSS)
        found.setdefault(kind, []).append(mark)
    return [
        mark for marks in found.values() for mark in marks[:: max(1, math.ceil(len(marks) / MARKS_PER_KIND))]
    ]


def _differences(runs: Sequence[RunLog]) -> str:
    """How far each run's losses are from the first run's."""
    if len(runs) < 2:
        return ""
    rows, series = [], []
    for i, run in enumerate(runs[1:], 1):
        difference = loss_difference(runs[0], run)
        if difference is None:
            rows.append((run, i, "0", "–", "–"))
            continue
        largest, step = difference.largest
        shown = "one is not finite" if math.isinf(largest) else f"{largest:.3g}"
        rows.append((run, i, f"{len(difference.steps):,}", shown, f"{step:,}" if largest else "–"))
        finite = np.isfinite(difference.relative)
        x, y = thinned(difference.steps[finite], difference.relative[finite])
        if x and max(y) > 0:
            series.append(Series(run.name, x, y, color_of(i), 1.4, dash_of(i)))
    body = "".join(
        f"<tr><td>{run_name(i, run)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for run, i, *cells in rows
    )
    heads = "<th>run</th><th>steps in common</th><th>largest relative difference</th><th>at step</th>"
    plot = ""
    if series:
        title = f"Relative difference of the loss to {runs[0].name}"
        plot = line_plot(title, series, "step", "difference / loss", log=True, legend=False)
        plot = f"<div class='plot'>{plot}</div>"
    return (
        f"<h2>Loss against {escape(runs[0].name)}</h2><div class='wide'><table><tr>{heads}</tr>{body}</table>"
        f"</div>{plot}"
    )


def _events(runs: Sequence[RunLog]) -> str:
    parts = []
    for i, run in enumerate(runs):
        if not run.events:
            continue
        shown = run.events[-SHOWN_EVENTS:]
        rows = []
        for event in reversed(shown):
            when, fields = (
                event.get("time"),
                {k: v for k, v in event.items() if k not in ("step", "event", "time")},
            )
            clock = "–" if when is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
            details = ", ".join(f"{name} {_short(value)}" for name, value in fields.items())
            cells = (f"{event['step']:,}", str(event["event"]), details, clock)
            rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
        heads = "<tr><th>step</th><th>event</th><th></th><th>time</th></tr>"
        count = f"{run.num_events:,} event{'s' if run.num_events > 1 else ''}"
        count += f", the last {len(shown)}" if run.num_events > len(shown) else ""
        parts.append(
            f"<details><summary>{run_name(i, run)}: {count}</summary><div class='wide'>"
            f"<table class='left'>{heads}{''.join(rows)}</table></div></details>"
        )
    return f"<h2>Events</h2>{''.join(parts)}" if parts else ""


def _config(run: RunLog) -> str:
    assert run.config is not None
    summary = f"<summary>config.yaml of {escape(run.name)}</summary>"
    return f"<details>{summary}<pre>{escape(run.config)}</pre></details>"


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:199] + "…"
