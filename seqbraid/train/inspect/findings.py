"""What a survey says of a run: its steps, its time, and what a user should know before it starts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...data.pack import plan_row
from ...mesh import Mesh
from ...plan.flops import ModelFlops, peak_flops
from ..config import TrainConfig
from ..log import LOG_FILE, current_records
from ..setup import make_device
from .survey import Survey

PADDED_ROWS = 64
"""So many rows are laid out on the mesh."""
TOO_MUCH = 0.05
"""Share of padding, or of rows that nothing fills, from which on it is worth a notice."""
USUAL_MFU = 0.4
"""What a run on a GPU reaches, where nothing is known of this one."""


class Notice(NamedTuple):
    """Something to know before the run starts."""

    stops: bool
    """Whether the run would end there."""
    text: str


@dataclass(frozen=True)
class Spread:
    """How some numbers are spread."""

    name: str
    numbers: Any

    def at(self, share: float) -> int:
        """The number below which this share of them lies."""
        return int(np.quantile(self.numbers, share, method="nearest")) if len(self.numbers) else 0

    def bins(self, count: int = 24) -> list[tuple[int, int, int]]:
        """From, to (included) and how many."""
        if not len(self.numbers):
            return []
        low, high = int(self.numbers.min()), int(self.numbers.max())
        width = max(1, math.ceil((high - low + 1) / count))
        which = np.bincount((self.numbers - low) // width)
        return [(low + n * width, low + (n + 1) * width - 1, int(many)) for n, many in enumerate(which)]


@dataclass(frozen=True)
class Findings:
    """All that is shown beside the row."""

    survey: Survey
    spreads: list[Spread]
    per_source: list[tuple[str, int, int, int, float]]
    """Name, samples looked at, tokens and labels of an epoch, mean length."""
    totals: dict[str, str]
    notices: list[Notice] = field(default_factory=list)


def findings(
    config: TrainConfig, model_config: Any, mesh: Mesh, survey: Survey, flops: ModelFlops | None
) -> Findings:
    """What the samples say of the run."""
    lengths = survey.numbers("length")
    media: Counter[str] = sum((one.media for one in survey.seen), Counter())
    spreads = [Spread("tokens of a sample", lengths)]
    spreads.append(Spread("labels of a sample", survey.numbers("labels")))
    turns = survey.numbers("turns")
    if turns.any():
        spreads.append(Spread("assistant turns of a sample", turns))
    if media:
        count = np.asarray([sum(one.media.values()) for one in survey.seen], np.int64)
        spreads.append(Spread("images, videos and clips of a sample", count))
    per_source = []
    for number, name in enumerate(survey.sources):
        own, labels = survey.numbers("length", number), survey.numbers("labels", number)
        mean = float(own.mean()) if len(own) else 0.0
        per_source.append(
            (name, len(own), round(own.sum() * survey.scale), round(labels.sum() * survey.scale), mean)
        )
    padding = _padding(config, model_config, mesh, survey.rows)
    totals = _totals(config, mesh, survey, media, flops) | {"padding": f"{padding:.1%} of the slots computed"}
    spreads = [spread for spread in spreads if len(spread.numbers)]
    return Findings(survey, spreads, per_source, totals, notices(config, survey, padding))


def _totals(
    config: TrainConfig, mesh: Mesh, survey: Survey, media: Counter[str], flops: ModelFlops | None
) -> dict[str, str]:
    """The numbers of an epoch, by what they are of."""
    about = "" if survey.is_whole else "about "
    tokens = sum(map(sum, survey.rows)) * survey.scale
    labels = survey.numbers("labels_in_row").sum() * survey.scale
    steps = steps_of_epoch(config, survey)
    found = {
        "samples": f"{survey.total:,}"
        + ("" if survey.is_whole else f", of which {survey.looked_at:,} were looked at, spread evenly"),
        "tokens of an epoch": f"{about}{tokens:,.0f}",
        "labels": f"{labels / max(tokens, 1):.1%} of the tokens",
        "rows filled": f"{fill(config, survey):.2%}",
        "steps of an epoch": f"{about}{steps:,} of {config.train.batch_tokens:,} tokens",
    }
    if media:
        found["media"] = ", ".join(
            f"{about}{round(n * survey.scale):,} {kind}{'s' if kind != 'audio' else ' clips'}"
            for kind, n in media.items()
        )
    if config.train.steps is not None and steps:
        found["epochs of the run"] = (
            f"{about}{config.train.steps / steps:.3g} in {config.train.steps:,} steps"
        )
    found["time of an epoch"] = _time(config, mesh, survey, tokens, flops)
    return found


def fill(config: TrainConfig, survey: Survey) -> float:
    """Share of the rows that samples take."""
    # The last rows of a few samples are filled worse than those in the middle of many.
    rows = survey.rows if survey.is_whole else survey.rows[: max(1, len(survey.rows) // 2)]
    return sum(map(sum, rows)) / max(1, len(rows) * config.data.row_tokens)


def steps_of_epoch(config: TrainConfig, survey: Survey) -> int:
    """Exact where every sample was looked at."""
    rows: float = len(survey.rows)
    if not survey.is_whole:
        tokens = sum(map(sum, survey.rows)) * survey.scale
        rows = tokens / max(fill(config, survey) * config.data.row_tokens, 1)
    return math.ceil(rows / (config.train.batch_tokens // config.data.row_tokens))


def _time(config: TrainConfig, mesh: Mesh, survey: Survey, tokens: float, flops: ModelFlops | None) -> str:
    speed = _speed_before(config)
    if speed:
        seconds = timedelta(seconds=round(tokens / speed))
        return f"about {seconds} at the {speed:,.0f} tokens/s of the run in {config.out}"
    dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
    peak = peak_flops(make_device(), dtype)
    if flops is None or not survey.rows:
        return f"unknown until a run in {config.out} has logged its speed"
    work = flops.step(survey.rows, int(survey.numbers("labels_in_row").sum())) * survey.scale
    if peak is None:
        return f"unknown until a run in {config.out} has logged its speed: {work:.3g} FLOPs"
    seconds = timedelta(seconds=round(work / (USUAL_MFU * peak * mesh.world_size)))
    return f"about {seconds} on {mesh.world_size} such devices, at {USUAL_MFU:.0%} of their peak"


def _speed_before(config: TrainConfig) -> float | None:
    """Tokens per second of the latest steps in the run's folder."""
    path = Path(config.out) / LOG_FILE
    if not path.is_file():
        return None
    speeds = [record["tokens_per_s"] for record in current_records(path) if "tokens_per_s" in record][-20:]
    return float(np.median(speeds)) if speeds else None


def _padding(config: TrainConfig, model_config: Any, mesh: Mesh, rows: Sequence[Sequence[int]]) -> float:
    """Share of the slots that hold no token on this mesh, of some rows."""
    real = computed = 0
    for row in rows[:PADDED_ROWS]:
        layout = plan_row(row, model_config, mesh, config.data.policy).layout
        real += sum(row)
        computed += layout.num_local_tokens * mesh.sequence_size
    return 1 - real / computed if computed else 0.0


def notices(config: TrainConfig, survey: Survey, padding: float) -> list[Notice]:
    """What to know before the run starts, the worst first."""
    found = []
    part = "" if survey.is_whole else f" of the {survey.looked_at:,} looked at"
    if survey.num_bad:
        stops = config.data.on_bad_sample == "error"
        first = "; ".join(f"{bad.where}: {bad.reason}" for bad in survey.bad[:1])
        what = "the run stops at the first (data.on_bad_sample=error)" if stops else "left out"
        found.append(Notice(stops, f"{_samples(survey.num_bad)}{part} cannot be used: {what}. {first}"))
    if survey.num_over_long:
        found.append(_over_long(config, survey, part))
    no_label = sum(not one.labels_in_row for one in survey.seen)
    if config.data.over_long == "truncate" and no_label:
        text = f"{_samples(no_label)}{part} without a label after the cut: left out"
        found.append(Notice(False, text))
    turns = sum(one.without_reasoning for one in survey.seen)
    if turns:
        share = turns / max(1, int(survey.numbers("turns").sum()))
        found.append(
            Notice(
                False,
                f"the chat template leaves out the reasoning of {turns:,} assistant turns{part} "
                f"({share:.0%}), so the loss covers these turns without it; give a sample per "
                "question, or a template that keeps all of it",
            )
        )
    if padding > TOO_MUCH:
        found.append(
            Notice(
                False,
                f"{padding:.1%} of the slots are padding on this mesh: samples are short for ring × ulysses; "
                "use fewer ranks for a row, or longer rows",
            )
        )
    unfilled = 1 - fill(config, survey)
    if survey.rows and unfilled > TOO_MUCH:
        found.append(
            Notice(
                False,
                f"samples take {1 - unfilled:.1%} of the rows: with longer rows (data.row_tokens), or a "
                "larger data.buffer_size, fewer steps have all of them",
            )
        )
    return sorted(found, key=lambda notice: not notice.stops)


def _over_long(config: TrainConfig, survey: Survey, part: str) -> Notice:
    long = [one for one in survey.seen if one.length > config.data.row_tokens]
    lost = sum(one.labels - one.labels_in_row for one in long)
    what = {
        "error": "the run stops at the first (data.over_long=error)",
        "drop": "left out",
        "truncate": f"cut, which loses {lost:,} labels",
        "split": "split",
    }[config.data.over_long]
    text = (
        f"{_samples(survey.num_over_long)}{part} longer than a row of {config.data.row_tokens:,}: "
        f"{what}. The longest has {max(one.length for one in long):,} tokens; the first: "
        f"{survey.over_long[0]}"
    )
    return Notice(config.data.over_long == "error", text)


def _samples(count: int) -> str:
    return f"{count:,} sample{'s' if count != 1 else ''}"
