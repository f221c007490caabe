"""The account of samples that are not in the rows, or not whole: counted, listed and logged, never lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...printable import printable
from .plan import BadSample, Draw

logger = logging.getLogger(__name__)

LISTED = 10
"""So many of each kind are logged and named in the report."""


@dataclass(frozen=True)
class BadSamples:
    """Samples that were skipped, each counted once in a run."""

    count: int = 0
    first: tuple[BadSample, ...] = ()
    """The first ten."""


@dataclass(frozen=True)
class OverLongSamples:
    """Samples longer than a row that were dropped or cut, counted in every epoch."""

    count: int = 0
    tokens_lost: int = 0
    without_labels: int = 0
    """Of those that were cut: left out whole, since no label was left."""


class LeftOut:
    """Keeps the account, the same on every rank; the first rank logs it and writes the list."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        bad_file: Path | None,
        where: Callable[[int], str],
        row_tokens: int,
        drops: bool,
    ) -> None:
        self._writes = group is None or dist.get_rank(group) == 0
        self._bad_file = bad_file
        self._where = where
        self._row_tokens = row_tokens
        self._drops = drops
        self._measured: dict[int, None] = {}  # indices of bad samples, found when measured
        self._encoded: dict[int, None] = {}  # and those found only when encoded
        self._first: list[BadSample] = []
        self._goes_on = False  # with the list of a former run
        self.over_long = OverLongSamples()

    @property
    def bad(self) -> BadSamples:
        """The bad samples so far."""
        return BadSamples(len(self._measured) + len(self._encoded), tuple(self._first))

    @property
    def measured_bad(self) -> list[int]:
        """Indices of the samples that were bad when measured."""
        return list(self._measured)

    def add(
        self,
        measured: Sequence[BadSample],
        over_long: Sequence[Draw],
        encoded: Sequence[BadSample] = (),
        cut_short: Sequence[BadSample] = (),
    ) -> None:
        """Account for what was found on the way to a step.

        Bad are those found when `measured` or `encoded`; those that were `cut_short` have no label left.
        """
        self._add_over_long(over_long)
        self._add_cut_short(cut_short)
        new = [bad for bad in measured if bad.sample not in self._measured]
        self._measured.update(dict.fromkeys(bad.sample for bad in measured))
        for bad in encoded:  # bad in every epoch again, but news only once
            if bad.sample not in self._encoded:
                self._encoded[bad.sample] = None
                new.append(bad)
        if not new:
            return
        if self._writes:
            try:
                self._report(new)
            except OSError as error:  # the list is for the user; what is left out is in the checkpoint, too
                logger.warning(
                    "%s CANNOT BE WRITTEN (%s): %d bad samples are counted, but not listed, the first %s",
                    self._bad_file, error, len(new), printable(f"{new[0].where}: {new[0].reason}"),
                )  # fmt: skip
        self._first = [*self._first, *new][:LISTED]

    def _report(self, new: Sequence[BadSample]) -> None:
        listed = "counted" if self._bad_file is None else f"listed in {self._bad_file}"
        for bad in new[: LISTED - len(self._first)]:
            logger.warning("skipped a bad sample: %s", printable(f"{bad.where}: {bad.reason}"))
        if len(self._first) < LISTED <= len(self._first) + len(new):
            logger.warning("further bad samples are only %s", printable(listed))
        if self._bad_file is not None:
            self._bad_file.parent.mkdir(parents=True, exist_ok=True)
            with self._bad_file.open("a" if self._goes_on else "w", encoding="utf-8") as file:
                self._goes_on = True
                for bad in new:
                    line = {"where": bad.where, "reason": bad.reason, "index": bad.sample}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _add_over_long(self, draws: Sequence[Draw]) -> None:
        kept = 0 if self._drops else self._row_tokens
        for number, draw in enumerate(draws, start=self.over_long.count + 1):
            if self._writes and number <= LISTED:
                what = "dropped it" if self._drops else "cut it"
                more = "; further ones are only counted" if number == LISTED else ""
                logger.warning(
                    "%s: %d tokens, but a row holds %d: %s%s",
                    printable(self._where(draw.sample)),
                    draw.length,
                    self._row_tokens,
                    what,
                    more,
                )
        self.over_long = replace(
            self.over_long,
            count=self.over_long.count + len(draws),
            tokens_lost=self.over_long.tokens_lost + sum(draw.length - kept for draw in draws),
        )

    def _add_cut_short(self, samples: Sequence[BadSample]) -> None:
        found = self.over_long
        for number, sample in enumerate(samples, start=found.without_labels + 1):
            if self._writes and number <= LISTED:
                more = "; further ones are only counted" if number == LISTED else ""
                logger.warning("%s: left it out%s", printable(f"{sample.where}: {sample.reason}"), more)
        self.over_long = replace(
            found,
            tokens_lost=found.tokens_lost + self._row_tokens * len(samples),
            without_labels=found.without_labels + len(samples),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state; it grows with the bad samples only."""
        return {
            "measured_bad": list(self._measured),
            "encoded_bad": list(self._encoded),
            "first_bad": [list(bad) for bad in self._first],
            "over_long": list(astuple(self.over_long)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the account of a former run."""
        self._measured = dict.fromkeys(state["measured_bad"])
        self._encoded = dict.fromkeys(state["encoded_bad"])
        self._first = [BadSample(*bad) for bad in state["first_bad"]]
        self.over_long = OverLongSamples(*state["over_long"])
        self._goes_on = True
        if self._writes and self._bad_file is not None and self._bad_file.exists():
            try:
                self._rewind(self._bad_file)
            except OSError as error:
                logger.warning("%s CANNOT BE WRITTEN (%s): it may list samples twice", self._bad_file, error)

    def _rewind(self, path: Path) -> None:
        """Leave what the state knows of in the list; what was found after it will be found again."""
        known = self._measured | self._encoded
        with path.open("rb") as file:
            lines = [line for line in file if _index_of(line) in known]
        kept = path.with_name(path.name + ".tmp")
        kept.write_bytes(b"".join(lines))
        kept.replace(path)


def _index_of(line: bytes) -> int | None:
    """The sample of a line of the list; None of one that a kill has cut."""
    try:
        found: int = json.loads(line)["index"]
    except (ValueError, TypeError, KeyError):
        return None
    return found
