"""A planned step on its way: workers encode its samples, a thread makes of them what the step is run from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .plan import Draw, PlannedStep
from .tasks import Refused, Wanted, text_sample
from .workers import Later, NoWorkers, Result, Workers

TASKS_PER_ROW = 8
SMALLEST_TASK = 2048  # tokens


class Preparation(Protocol):
    """What is made of a step's samples ahead of the step; pure."""

    def plan(self, lengths: Sequence[int]) -> Any:
        """What follows from the lengths of a row's samples alone: made in a worker, where there are some."""
        ...

    def __call__(self, rows: Sequence[Sequence[dict[str, Any]]], plans: Sequence[Any] | None = None) -> Any:
        """What the step is run from, of the samples and of what `plan` made of each row."""
        ...


class Ready(NamedTuple):
    """A step whose samples are there."""

    samples: dict[tuple[int, int], dict[str, Any] | Refused]
    """By the key of their draw."""
    prepared: Any
    """What the preparation made of them; None where a sample was refused, so that the rows are others."""


@dataclass(frozen=True)
class Encoding:
    """A step whose rows are being encoded."""

    planned: PlannedStep
    rows: list[list[Draw]]
    """Of this data rank."""
    ready: Result

    @property
    def draws(self) -> list[Draw]:
        """Those of the rows, in order."""
        return [draw for row in self.rows for draw in row]


class StepEncoder:
    """Has steps encoded by workers, and then prepared in a thread: neither keeps the training waiting."""

    def __init__(
        self, workers: Workers | NoWorkers, row_tokens: int, prepare: Preparation | None = None
    ) -> None:
        self._workers = workers
        self._row_tokens = row_tokens
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(1, "steps") if workers.num_workers else None

    def begin(
        self,
        planned: PlannedStep,
        rows: list[list[Draw]],
        texts: dict[tuple[int, int], Tensor],
        media_ranks: Sequence[Sequence[tuple[int, ...]]],
    ) -> Encoding:
        """Have rows encoded but for their texts, each in a few tasks.

        Args:
            planned: the step of the whole job.
            rows: those of this data rank.
            texts: ids and labels of the draws that were tokenized when they were measured, by key.
            media_ranks: for each sample of each row, which rank encodes each of its media.
        """
        smallest = max(SMALLEST_TASK, self._row_tokens // TASKS_PER_ROW)
        plans: list[Result] = []
        if self._prepare is not None:
            lengths = [[min(draw.length, self._row_tokens) for draw in row] for row in rows]
            plans = [self._workers.submit("plan", of_row) for of_row in lengths]
        results: list[Result] = []
        for row, ranks in zip(rows, media_ranks, strict=True):
            wanted = [Wanted(draw, of_draw) for draw, of_draw in zip(row, ranks, strict=True)]
            for task in _split([one for one in wanted if one.draw.key not in texts], smallest):
                results.append(self._workers.submit("encode", task))

        def make() -> Ready:
            return self._ready(rows, texts, results, plans)

        if self._pool is None:
            return Encoding(planned, rows, Later(make))
        return Encoding(planned, rows, _when_done([*plans, *results], make, self._pool))

    def prepared(self, rows: list[list[dict[str, Any]]]) -> Any:
        """What the preparation makes of these rows, now."""
        return None if self._prepare is None else self._prepare(rows)

    def _ready(
        self,
        rows: list[list[Draw]],
        texts: dict[tuple[int, int], Tensor],
        results: Sequence[Result],
        plans: Sequence[Result],
    ) -> Ready:
        draws = [draw for row in rows for draw in row]
        encoded = [draw.key for draw in draws if draw.key not in texts]
        answers = [sample for result in results for sample in result.result()]
        found: dict[tuple[int, int], Any] = dict(zip(encoded, answers, strict=True))
        for draw in draws:
            if draw.key in texts:
                found[draw.key] = text_sample(texts[draw.key], draw.length, self._row_tokens)
        if self._prepare is None or any(isinstance(sample, Refused) for sample in found.values()):
            return Ready(found, None)
        samples = [[found[draw.key] for draw in row] for row in rows]
        return Ready(found, self._prepare(samples, [plan.result() for plan in plans]))

    def close(self) -> None:
        """Take no more steps."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _when_done(
    results: Sequence[Result], make: Callable[[], Ready], pool: ThreadPoolExecutor
) -> Future[Ready]:
    """Call a function in the pool's thread when results are there, so that the thread waits for none."""
    ready: Future[Ready] = Future()
    lock, missing = Lock(), [len(results) + 1]

    def run() -> None:
        try:
            ready.set_result(make())
        except BaseException as error:
            ready.set_exception(error)

    def count(_: Any = None) -> None:
        with lock:
            missing[0] -= 1
            if missing[0]:
                return
        try:
            pool.submit(run)
        except RuntimeError as error:  # the pool was closed: nobody waits any more
            ready.set_exception(error)

    for result in results:
        assert isinstance(result, Future)
        result.add_done_callback(count)
    count()
    return ready


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
