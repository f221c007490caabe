"""Statistics of a data set: of all samples of an epoch, or of some that are spread evenly over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ...data.encode import SampleEncoder
from ...data.records.mix import DescribedSource
from ...data.records.source import JoinedSource, Source
from ...data.stream.loader import order_of
from ...data.stream.order import SampleOrder
from ...data.stream.plan import BAD, BadSample, Draw, Measured, RowOptions, StepPlanner
from ...data.stream.tasks import check_split
from ...layout.labels import num_targets

LISTED = 5
"""So many samples of each kind of trouble are named."""


class SampleStats(NamedTuple):
    """A sample that was looked at."""

    source: int
    length: int
    labels: int
    """Tokens that the loss covers, in the whole sample."""
    labels_in_row: int
    """And in the part of it that a row holds."""
    turns: int
    media: Counter[str]
    without_reasoning: int


@dataclass
class Survey:
    """What was found."""

    sources: list[str]
    """Names, in order."""
    total: int
    """Samples of an epoch."""
    looked_at: int
    """Of them."""
    seen: list[SampleStats] = field(default_factory=list)
    """Those that can be used."""
    bad: list[BadSample] = field(default_factory=list)
    num_bad: int = 0
    over_long: list[str] = field(default_factory=list)
    """Where the first samples that are longer than a row are."""
    num_over_long: int = 0
    rows: list[list[int]] = field(default_factory=list)
    """Lengths of the samples in each row that those looked at fill."""

    @property
    def is_whole(self) -> bool:
        """Whether every sample of an epoch was looked at."""
        return self.looked_at == self.total

    @property
    def scale(self) -> float:
        """Samples of an epoch for each that was looked at."""
        return self.total / max(self.looked_at, 1)

    def numbers(self, name: str, source: int | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
        """A field of the samples, of one source or of all."""
        found = [getattr(one, name) for one in self.seen if source in (None, one.source)]
        return np.asarray(found, np.int64)


class Reader:
    """Reads samples of a source as a run does; each once."""

    def __init__(self, source: Source, encoder: SampleEncoder, rows: RowOptions) -> None:
        # What would stop the run is counted here, so that all of it is seen.
        over_long = "drop" if rows.over_long == "error" else rows.over_long
        self.source, self.encoder, self.asked = source, encoder, rows
        self.rows = replace(rows, epochs=1, rows_per_step=1, over_long=over_long, on_bad_sample="skip")
        self.order = order_of(source, self.rows)
        self._measured: dict[int, tuple[Measured, SampleStats | None]] = {}
        parts = source.sources if isinstance(source, JoinedSource) else [source]
        self.names = [_name(part) for part in parts]
        self._ends = np.cumsum([len(part) for part in parts])

    def measured(self, sample: int) -> tuple[Measured, SampleStats | None]:
        """A sample's length and more; no more of one that is bad."""
        if sample not in self._measured:
            try:
                seen = self._look(sample)
                found = Measured(sample, seen.length)
            except ValueError as error:
                seen, found = None, Measured(sample, BAD, str(error))
            self._measured[sample] = found, seen
        return self._measured[sample]

    def planner(self, order: SampleOrder, samples: Sequence[int] | None = None) -> StepPlanner:
        """Plans rows as a run does: of the stream, or of some samples of it in their order."""

        def measure(position: int) -> list[Measured]:
            drawn = order.indices(position, position + 64)
            return [self.measured(one if samples is None else samples[one])[0] for one in drawn]

        return StepPlanner(order, measure, self.rows, self.source.where)

    def _look(self, sample: int) -> SampleStats:
        look = self.encoder.look(self.source[sample])
        length, row_tokens = len(look.ids_T), self.rows.row_tokens
        if self.rows.over_long == "split":
            check_split(length, row_tokens, self.encoder.all_labelled)
        cuts = self.rows.over_long == "truncate"
        return SampleStats(
            int(np.searchsorted(self._ends, sample, side="right")),
            length,
            num_targets(look.labels_T),
            num_targets(look.labels_T[:row_tokens] if cuts else look.labels_T),
            look.turns,
            Counter(ref.kind for ref in look.media),
            self.encoder.without_reasoning,
        )


def survey(reader: Reader, limit: int, moves: Callable[[], None] | None = None) -> Survey:
    """Look at the samples of an epoch: at all, or at so many that are spread evenly over it."""
    order, rows = reader.order, reader.rows
    total = order.num_samples
    count = min(total, limit)
    positions = np.arange(count) * total // count
    drawn = [order.indices(int(at), int(at) + 1)[0] for at in positions]
    found = Survey(reader.names, total, count)
    for sample in drawn:
        measured, seen = reader.measured(sample)
        if moves is not None:
            moves()
        if seen is None:
            found.num_bad += 1
            if len(found.bad) < LISTED:
                found.bad.append(BadSample(sample, reader.source.where(sample), measured.reason))
            continue
        found.seen.append(seen)
        if seen.length > rows.row_tokens:
            found.num_over_long += 1
            if len(found.over_long) < LISTED:
                found.over_long.append(f"{reader.source.where(sample)} ({seen.length:,} tokens)")
    if any(rows.over_long in ("truncate", "split") or one.length <= rows.row_tokens for one in found.seen):
        planner = reader.planner(SampleOrder(count, rows.seed, shuffle=False, epochs=1), drawn)
        while (step := planner.next_step()) is not None:
            found.rows += [[_in_row(draw, rows.row_tokens) for draw in row] for row in step.rows]
    return found


def _in_row(draw: Draw, row_tokens: int) -> int:
    return min(draw.length, row_tokens)


def _name(source: Any) -> str:
    """A short name of a source, of the first of its files where it has several."""
    if isinstance(source, DescribedSource):
        return _name(source.source)
    if isinstance(source, JoinedSource):
        return f"{_name(source.sources[0])} and {len(source.sources) - 1} more"
    return str(getattr(source, "name", type(source).__name__))
