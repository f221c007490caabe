"""Sample lengths, measured by all ranks together and known to each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch.distributed as dist

from ...comm.consensus import agree, gather_objects
from ...comm.whereabouts import Stopped, Whereabouts
from .order import SampleOrder
from .plan import BAD, Measured
from .tasks import Unmeasured
from .texts import Texts
from .workers import NoWorkers, Result, Workers

LOOK_S = 0.5
"""Seconds after which who waits looks whether it should stop."""
WINDOW = 256
WINDOW_PER_RANK = 32
LARGEST_TASK = 16
UNKNOWN = 0


class Clock:
    """Adds up how long the main thread was blocked."""

    def __init__(self, where: Whereabouts | None = None) -> None:
        self.seconds = 0.0
        self.progress: Callable[[], int] = lambda: 0
        """How many samples the workers have begun."""
        self._where = Whereabouts() if where is None else where

    def wait(self, results: Sequence[Result]) -> tuple[list[Any], Exception | None]:
        """The results, up to the first error, and that error, to be agreed on; `Stopped` if the run is asked
        to stop meanwhile.
        """
        start = perf_counter()
        found, error = [], None
        try:
            for result in results:
                found.append(self._result(result))
                self._where.moves()
        except Exception as problem:
            error = problem
        self.seconds += perf_counter() - start
        return found, error

    def _result(self, result: Result) -> Any:
        begun = self.progress()
        while True:
            try:
                return result.result(LOOK_S)
            except TimeoutError:
                if isinstance(result, Future) and result.done():  # meanwhile, or it raised that itself
                    return result.result()
            before, begun = begun, self.progress()
            if begun != before:
                self._where.moves()
            if self._where.stop:
                raise Stopped("while data workers were running")


def raise_if_stopped(found: Sequence[Sequence[int]]) -> None:
    """Raise on all ranks if one of them, by the first of its values, has stopped to wait."""
    if any(row[0] for row in found):
        raise Stopped("while a rank waited for its data workers")


def stopped(error: Exception | None) -> tuple[Exception | None, int]:
    """An error to be agreed on, and whether it is none but a stop that was asked for."""
    return (None, 1) if isinstance(error, Stopped) else (error, 0)


@dataclass(frozen=True)
class _Window:
    start: int
    samples: list[int]
    unknown: list[int]
    """Samples that nobody has measured yet; k-th by rank k % world size."""
    results: list[Result]


class _Lists:
    """A list of numbers for each sample, most of them short or empty, in little memory."""

    def __init__(self, num_samples: int) -> None:
        self._first = np.zeros(num_samples, dtype=np.int64)
        self._count = np.zeros(num_samples, dtype=np.int32)
        self._numbers = array("f")

    def __getitem__(self, sample: int) -> list[float]:
        first = int(self._first[sample])
        return self._numbers[first : first + int(self._count[sample])].tolist()

    def __setitem__(self, sample: int, numbers: Sequence[float]) -> None:
        self._first[sample], self._count[sample] = len(self._numbers), len(numbers)
        self._numbers.extend(numbers)


class Measuring:
    """Measures the stream window by window, the next one while this one is used.

    A call is a collective: all ranks reach it alike, since the plan is the same on each. A sample is measured
    once in a run, so from the second epoch on nothing is done here.
    """

    def __init__(
        self,
        order: SampleOrder,
        workers: Workers | NoWorkers,
        group: dist.ProcessGroup | None,
        clock: Clock,
        texts: Texts,
    ) -> None:
        self._order = order
        self._workers = workers
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        self._clock = clock
        self._texts = texts
        self._size = max(WINDOW, WINDOW_PER_RANK * self._world_size)
        self._lengths = np.full(order.num_samples, UNKNOWN, dtype=np.int32)
        self._reasons: dict[int, str] = {}
        self._media_costs = _Lists(order.num_samples)
        self._ahead: _Window | None = None
        self.without_reasoning = 0
        """Turns of all samples measured so far that are trained without their reasoning."""

    def know_bad(self, samples: Sequence[int]) -> None:
        """Take samples for bad without a look at them, as the run before did."""
        self._lengths[np.asarray(samples, dtype=np.int64)] = BAD

    def media_costs(self, sample: int) -> list[float] | None:
        """What encoding each medium of a sample costs, where several ranks share that; None if the sample was
        not measured here, but in the run that this one goes on with.
        """
        return None if self._lengths[sample] == UNKNOWN else self._media_costs[sample]

    def __call__(self, position: int) -> list[Measured]:
        """The samples of the stream from a position on, as many as a window holds."""
        window = self._ahead
        if window is None or window.start != position:
            window = self._begin(position)
        if window.unknown:
            self._share(window)
        self._ahead = self._begin(position + len(window.samples))
        lengths = self._lengths[window.samples].tolist()
        return [
            Measured(sample, length, self._reasons.get(sample, ""))
            for sample, length in zip(window.samples, lengths, strict=True)
        ]

    def _begin(self, start: int) -> _Window:
        samples = self._order.indices(start, start + self._size)
        unknown = [sample for sample in dict.fromkeys(samples) if self._lengths[sample] == UNKNOWN]
        own = unknown[self._rank :: self._world_size]
        # Small tasks, so that all workers have some; not too small, for the way costs as well.
        size = max(1, min(LARGEST_TASK, len(own) // (2 * max(1, self._workers.num_workers))))
        tasks = [own[first : first + size] for first in range(0, len(own), size)]
        room = self._texts.room
        results = [
            self._workers.submit("measure", Unmeasured(task, room * len(task) // len(own))) for task in tasks
        ]
        return _Window(start, samples, unknown, results)

    def _share(self, window: _Window) -> None:
        answers, problem = self._clock.wait(window.results)
        error, stop = stopped(problem)
        own: list[Measured] = [measured for answer in answers for measured in answer]
        count = -(-len(window.unknown) // self._world_size)
        lengths = [measured.length for measured in own] if problem is None else []
        costs = {measured.sample: measured.media_costs for measured in own if measured.media_costs}
        padding = [UNKNOWN] * (count - len(lengths))
        kept = [int(measured.text is not None) for measured in own] if problem is None else []
        lost = sum(measured.without_reasoning for measured in own)
        found = agree(self._group, error, [stop, lost, *lengths, *padding, len(costs), *kept, *padding])
        raise_if_stopped(found)
        self.without_reasoning += sum(row[1] for row in found)
        found, kept_by = [row[2 : 3 + count] for row in found], [row[3 + count :] for row in found]
        for place, sample in enumerate(window.unknown):
            rank, number = place % self._world_size, place // self._world_size
            length = found[rank][number]
            assert length != UNKNOWN, f"rank {rank} has not sent the length of sample {sample}"
            self._lengths[sample] = length
            if kept_by[rank][number]:
                self._texts.is_kept(sample, rank, length)
        for measured in own:
            if measured.text is not None:
                self._texts.keep(measured.sample, measured.text)
        if any(row[-1] for row in found):
            for of_rank in gather_objects(self._group, costs):
                for sample, media_costs in of_rank.items():
                    self._media_costs[sample] = media_costs
        if any(BAD in row[:-1] for row in found):
            bad = {measured.sample: measured.reason for measured in own if measured.length == BAD}
            for reasons in gather_objects(self._group, bad):
                self._reasons.update(reasons)
