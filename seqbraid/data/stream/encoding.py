"""A planned step on its way to samples: this data rank's rows, what is there of them and what workers do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .plan import Draw, PlannedStep
from .tasks import Refused, Wanted, text_sample
from .workers import NoWorkers, Result, Workers

TASKS_PER_ROW = 8
SMALLEST_TASK = 2048  # tokens


@dataclass(frozen=True)
class Encoding:
    """A step whose rows are being encoded."""

    planned: PlannedStep
    rows: list[list[Draw]]
    """Of this data rank."""
    texts: dict[int, Tensor]
    """Ids and labels of the draws that were tokenized when they were measured, by position."""
    results: list[Result]
    """The other samples of those rows, in order, task after task."""

    @property
    def draws(self) -> list[Draw]:
        """Those of the rows, in order."""
        return [draw for row in self.rows for draw in row]

    def samples(
        self, answers: Sequence[Sequence[dict[str, Any] | Refused]], row_tokens: int
    ) -> dict[int, dict[str, Any] | Refused]:
        """The samples of the draws, by position, when the results are there."""
        encoded = [draw.position for draw in self.draws if draw.position not in self.texts]
        found = dict(zip(encoded, (sample for answer in answers for sample in answer), strict=True))
        for draw in self.draws:
            if draw.position in self.texts:
                found[draw.position] = text_sample(self.texts[draw.position], draw.length, row_tokens)
        return found


def begin(
    planned: PlannedStep,
    rows: list[list[Draw]],
    texts: dict[int, Tensor],
    media_ranks: Sequence[Sequence[tuple[int, ...]]],
    workers: Workers | NoWorkers,
    row_tokens: int,
) -> Encoding:
    """Have rows encoded but for their texts, each in a few tasks.

    Args:
        media_ranks: for each sample of each row, which rank encodes each of its media.
    """
    smallest = max(SMALLEST_TASK, row_tokens // TASKS_PER_ROW)
    results = []
    for row, ranks in zip(rows, media_ranks, strict=True):
        wanted = [Wanted(draw, of_draw) for draw, of_draw in zip(row, ranks, strict=True)]
        for task in _split([one for one in wanted if one.draw.position not in texts], smallest):
            results.append(workers.submit("encode", task))
    return Encoding(planned, rows, texts, results)


def _split(row: list[Wanted], smallest: int) -> Iterator[list[Wanted]]:
    """Neighbours of a row, together until they have some tokens, so that workers share a row evenly."""
    task: list[Wanted] = []
    tokens = 0
    for wanted in row:
        task.append(wanted)
        tokens += wanted.draw.length
        if tokens >= smallest:
            yield task
            task, tokens = [], 0
    if task:
        yield task
