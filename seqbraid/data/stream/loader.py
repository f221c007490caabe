"""The stateful packing loader: steps of rows, the same samples in the same rows on any mesh."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...comm.consensus import agree, check_alike, gather_objects, raised_by_all
from ...comm.whereabouts import Whereabouts
from ...layout.packing import level_rows
from ...mesh import Mesh
from ...models.media import media_ranks
from ..records.contents import contents, describe_changes
from .encoding import Encoding, Preparation, Ready, StepEncoder
from .left_out import BadSamples, LeftOut, OverLongSamples
from .measure import Clock, Measuring, raise_if_stopped, stopped
from .order import MixedOrder, SampleOrder
from .plan import BadSample, Draw, PlannedStep, RowOptions, StepPlanner
from .tasks import Encoder, Refused, Tasks
from .texts import Texts
from .token_cache import TokenCache
from .workers import NoWorkers, WorkerOptions, Workers

if TYPE_CHECKING:
    from ..records.source import Source

STATE_FORMAT = 3  # 1 packed samples of several epochs together; 2 kept other things of the packer


@dataclass(frozen=True)
class StepData:
    """What one rank gets of one optimizer step."""

    rows: list[list[dict[str, Any]]]
    """This data rank's rows, one per micro-batch; empty where the step has no row for it."""
    where: list[list[str]]
    """File and line of each sample of the rows."""
    step: int
    """From 0."""
    epoch: float
    """Passes over the data up to and with this step: 1.5 in the middle of the second."""
    tokens: int
    """Of the whole job's step."""
    fill: float
    """Share of the rows of the whole job's step that holds tokens."""
    samples: int
    """Of the whole job's step."""
    wait_s: float
    """How long this call was blocked because samples were not ready."""
    prepared: Any = None
    """What the loader's `prepare` made of the rows."""


@runtime_checkable
class Mixed(Protocol):
    """A source of several that are drawn from by weights; their records follow each other."""

    sizes: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Reading:
    """What is read, and where what cannot be used is listed."""

    source: Source
    """The records; picklable if there are workers."""
    make_encoder: Callable[[], Encoder]
    """Makes the encoder, once per worker process; picklable if there are workers."""
    bad_file: Path | None = None
    """Where samples that are skipped are listed, one JSON object per line."""
    tokens: TokenCache | None = None
    """What earlier runs have tokenized."""


def order_of(source: Source, rows: RowOptions) -> SampleOrder:
    """In which order a run draws the samples of a source."""
    drawn = rows.seed, rows.shuffle, rows.epochs
    if isinstance(source, Mixed):
        return MixedOrder(source.sizes, source.weights, *drawn)
    return SampleOrder(len(source), *drawn)


class Loader:
    """Iterates over the steps of a run; every rank makes one, and calls it, as often as the others do.

    Which samples are in which row of which step follows from the source, the `RowOptions` and
    what is left out; neither the mesh nor the workers change it. The rows
    of a step are levelled over the data ranks by their estimated cost (`layout.packing.level_rows`).

    Args:
        reading: the records, and what makes samples of them.
        mesh: the device mesh.
        rows: how rows and steps are made.
        workers: what is done ahead of a step, and by how many processes.
        prepare: makes of a step's rows what the step is run from, in a thread where there are workers;
            picklable if there are.
        where: is told of what goes forward, and says whether to stop.
    """

    def __init__(
        self,
        reading: Reading,
        mesh: Mesh,
        rows: RowOptions,
        workers: WorkerOptions | None = None,
        prepare: Preparation | None = None,
        where: Whereabouts | None = None,
    ) -> None:
        workers = WorkerOptions() if workers is None else workers
        where = Whereabouts() if where is None else where
        self._source, self._mesh, self._group = reading.source, mesh, mesh.cpu_group
        self._rows, self._prefetch_steps = rows, workers.prefetch_steps
        self._clock = Clock(where)
        source = {"source": reading.source.fingerprint, "num_samples": len(reading.source)}
        mix = {} if not isinstance(reading.source, Mixed) else {"weights": list(reading.source.weights)}
        self._settings = source | mix | rows.in_state
        alike = {"epochs": rows.epochs, "on_bad_sample": rows.on_bad_sample}
        alike |= {"prefetch_steps": workers.prefetch_steps, "cost": list(astuple(rows.cost))}
        check_alike(self._group, self._settings | alike)
        self._files = contents(reading.source)
        with raised_by_all(self._group):
            self._make(reading, workers, prepare, where)
        self._left_out = LeftOut(
            self._group, reading.bad_file, self._source.where, rows.row_tokens, rows.over_long == "drop"
        )
        self._ahead: deque[Encoding] = deque()
        self._planned_all = False
        self._begun = False
        self._failure: BaseException | None = None
        # After the last step handed out:
        self._state = self._planner.state_dict()
        self._done = 0
        self._fruitless = 0  # samples of the latest steps of which nothing was left

    def _make(
        self, reading: Reading, options: WorkerOptions, prepare: Preparation | None, where: Whereabouts
    ) -> None:
        """The order of the samples, the workers, and the planner of the steps."""
        source, rows, mesh = reading.source, self._rows, self._mesh
        options.check()
        self._order = order_of(source, rows)
        texts = self._texts = Texts(mesh, rows.row_tokens, options.text_bytes, rows.over_long == "split")
        # With pipeline stages behind the first, which decode none, ranks share the media out in any case.
        in_row = mesh.media_rank, mesh.row_size * mesh.pp
        planner = None if prepare is None else prepare.plan
        tasks = Tasks(
            source, reading.make_encoder, rows.row_tokens, *in_row, rows.over_long, planner, reading.tokens
        )
        if options.workers:
            self._workers: Workers | NoWorkers = Workers(tasks, options.workers, options.sample_limit_s)
        else:
            self._workers = NoWorkers(tasks, where.moves)
        self._clock.progress = self._workers.begun
        self._steps = StepEncoder(self._workers, rows.row_tokens, prepare)
        # Before multiprocessing waits for its children, which are deaf to its SIGTERM.
        util.Finalize(self, self._workers.close, exitpriority=1)
        self._measuring = Measuring(self._order, self._workers, self._group, self._clock, texts)
        self._planner = StepPlanner(self._order, self._measuring, rows, source.where)

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        """The next step; all ranks ask for it together. `Stopped` if one of them was asked to stop while it
        waited for its workers; the state is then that of before.
        """
        if self._failure is not None:
            raise RuntimeError(
                "this loader has stopped; make a new one and load its state"
            ) from self._failure
        self._begun = True
        try:
            return self._next()
        except StopIteration:
            raise
        except BaseException as error:
            self._failure = error
            raise

    def _next(self) -> StepData:
        self._clock.seconds = 0.0
        self._plan_ahead()
        if not self._ahead:
            self._left_out.add(*self._planner.left_out())
            self._done = self._order.total or 0
            raise StopIteration
        encoding = self._ahead.popleft()
        planned = encoding.planned
        found, problem = self._clock.wait([encoding.ready])
        ready: Ready = Ready({}, None) if problem is not None else found[0]
        samples = ready.samples
        refused = self._agree_on_refused(encoding, samples, problem)
        bad, cut_short = (
            [refused[position][0] for position in sorted(refused) if refused[position][1] is kind]
            for kind in (False, True)
        )
        if bad and self._rows.on_bad_sample == "error":
            raise ValueError(f"{bad[0].where}: {bad[0].reason}")
        self._left_out.add(planned.bad, planned.over_long, bad, cut_short)

        # What one rank could not encode is left out by all, so that a sequence group keeps the same rows.
        kept = [draw for row in planned.rows for draw in row if draw.key not in refused]
        self._check_fruitless(planned, kept)
        tokens = sum(min(draw.length, self._rows.row_tokens) for draw in kept)
        self._state, self._done = planned.state, planned.done
        encoded = {position: one for position, one in samples.items() if not isinstance(one, Refused)}
        rows = [[draw for draw in row if draw.key not in refused] for row in encoding.rows]
        rows_of_samples = [[encoded[draw.key] for draw in row] for row in rows]
        unchanged = ready.prepared is not None and rows == encoding.rows
        return StepData(
            rows=rows_of_samples,
            where=[[self._source.where(draw.sample) for draw in row] for row in rows],
            step=planned.step,
            epoch=planned.epoch,
            tokens=tokens,
            fill=tokens / (len(planned.rows) * self._rows.row_tokens),
            samples=len(kept),
            wait_s=self._clock.seconds,
            prepared=ready.prepared if unchanged else self._steps.prepared(rows_of_samples),
        )

    def _plan_ahead(self) -> None:
        # A function of the number of steps handed out, so that all ranks measure, together, in the same call.
        while not self._planned_all and len(self._ahead) <= self._prefetch_steps:
            planned = self._planner.next_step()
            if planned is None:
                self._planned_all = True
            else:
                self._ahead.append(self._begin(planned))

    def _begin(self, planned: PlannedStep) -> Encoding:
        """Have this data rank's rows encoded; their texts come from the ranks that keep them."""
        num_ranks = self._mesh.data_world_size
        # From lengths alone, which are in the state: the same on every rank and after a resume.
        cost, limit = self._rows.cost, self._rows.row_tokens
        costs = [cost.of_lengths([min(draw.length, limit) for draw in row]) for row in planned.rows]
        rows_of = [[planned.rows[number] for number in of_rank] for of_rank in level_rows(costs, num_ranks)]
        texts = self._texts.deliver([[draw for row in rows for draw in row] for rows in rows_of])
        rows = rows_of[self._mesh.data_rank]
        rows += [[]] * (-(-len(planned.rows) // num_ranks) - len(rows))
        ranks = [self._media_ranks(row) for row in rows]
        return self._steps.begin(planned, rows, texts, ranks)

    def _media_ranks(self, row: list[Draw]) -> list[tuple[int, ...]]:
        """For each sample of a row, which rank encodes each of its media, that alone decodes it; nothing
        unless what that costs is known of all.
        """
        costs = [self._measuring.media_costs(draw.sample) for draw in row]
        known = [of_sample for of_sample in costs if of_sample is not None]
        if len(known) < len(row):
            return [()] * len(row)
        return [tuple(ranks) for ranks in media_ranks(known, self._mesh.row_size)]

    def _agree_on_refused(
        self,
        encoding: Encoding,
        samples: Mapping[tuple[int, int], dict[str, Any] | Refused],
        problem: Exception | None,
    ) -> dict[tuple[int, int], tuple[BadSample, bool]]:
        """The samples of the step that some rank could not encode, by key, and whether they have but no
        label left; the same on every rank."""
        own: dict[tuple[int, int], tuple[BadSample, bool]] = {}
        for draw in encoding.draws if samples else []:
            sample = samples[draw.key]
            if isinstance(sample, Refused):
                bad = BadSample(draw.sample, self._source.where(draw.sample), sample.reason)
                own[draw.key] = bad, sample.cut_short
        error, stop = stopped(problem)
        counts = agree(self._group, error, [stop, len(own)])
        raise_if_stopped(counts)
        if not any(count for _, count in counts):
            return {}
        merged: dict[tuple[int, int], tuple[BadSample, bool]] = {}
        for of_rank in reversed(gather_objects(self._group, own)):  # in the words of the first rank
            merged.update(of_rank)
        return merged

    def _check_fruitless(self, planned: PlannedStep, kept: list[Draw]) -> None:
        self._fruitless = 0 if kept else self._fruitless + sum(map(len, planned.rows))
        if self._fruitless >= self._order.num_samples:
            cut = self.over_long.without_labels
            reasons = [f"the first bad one was {bad.where}: {bad.reason}" for bad in self.bad.first[:1]]
            reasons += [f"{cut} have no label in the part that a row holds: raise row_tokens"] if cut else []
            raise ValueError(
                f"none of the latest {self._fruitless} samples could be encoded, and the source has no more; "
                + "; ".join(reasons)
            )

    @property
    def bad(self) -> BadSamples:
        """The bad samples that were skipped, up to the last step handed out."""
        return self._left_out.bad

    @property
    def over_long(self) -> OverLongSamples:
        """The samples that were dropped or cut, up to the last step handed out."""
        return self._left_out.over_long

    @property
    def without_reasoning(self) -> int:
        """Assistant turns, of the samples that this loader has measured so far, that are trained without
        their reasoning, since the chat template leaves it out.
        """
        return self._measuring.without_reasoning

    def progress(self) -> float | None:
        """The part of the run's samples that is behind the last step handed out; None without an end."""
        return None if self._order.total is None else min(1.0, self._done / self._order.total)

    @property
    def at_end(self) -> bool:
        """Whether the step handed out last is the last of all; seen at once where steps are prefetched."""
        return self._planned_all and not self._ahead

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state after the last step handed out, the same on every rank and on any mesh."""
        return {
            "format": STATE_FORMAT,
            "settings": self._settings,
            "files": self._files,
            "planner": self._state,
            "left_out": self._left_out.state_dict(),
            "done": self._done,
            "fruitless": self._fruitless,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step where `state` was taken; all ranks do this together, before the first step."""
        with raised_by_all(self._group):
            self._load(state)
        check_alike(self._group, {"state": hashlib.sha256(json.dumps(state).encode()).hexdigest()})

    def _load(self, state: Mapping[str, Any]) -> None:
        if self._begun:
            raise RuntimeError("this loader has begun already; load the state before the first step")
        if state.get("format", 1) != STATE_FORMAT:
            raise ValueError(
                f"the loader's state has format {state.get('format', 1)}, this version of seqbraid reads "
                f"{STATE_FORMAT}; finish the run with the version that it began with, or start a new one"
            )
        for name, value in self._settings.items():
            saved = state["settings"].get(name)
            what = describe_changes(state.get("files", {}), self._files) if name == "source" else ""
            if saved != value and what:
                raise ValueError(
                    f"the training data are not those that the run began with: {what}. A run resumes on the "
                    "data and options it began with: restore them, or give another out"
                )
            if saved != value:
                raise ValueError(
                    f"the state was saved with {name}={saved!r} but this loader has {name}={value!r}; a run "
                    "goes on with the data and settings it began with"
                )
        self._left_out.load_state_dict(state["left_out"])
        # What is bad stays so in a run, even if it is mended meanwhile.
        if self._rows.on_bad_sample == "skip":
            self._measuring.know_bad(self._left_out.measured_bad)
        self._planner.load_state_dict(state["planner"])
        self._state = state["planner"]
        self._done, self._fruitless = state["done"], state["fruitless"]

    def close(self) -> None:
        """End the workers; the state can still be taken."""
        self._failure = self._failure or RuntimeError("the loader was closed")
        self._workers.close()
        self._steps.close()
