"""Which samples are in which row of which step: a function of the data and the seed, never of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ...layout.packing import CostModel
from ...layout.streaming import StreamingPacker
from .order import SampleOrder

OverLong = Literal["error", "truncate", "drop", "split"]
OnBadSample = Literal["error", "skip"]
BAD = -1
"""The length of a sample that cannot be used."""


@dataclass(frozen=True)
class RowOptions:
    """What decides, with the source, which samples are in which row of which step."""

    row_tokens: int
    """The most tokens of a row."""
    rows_per_step: int
    """Rows of the whole job's step; the last step of a run may have fewer."""
    epochs: int | None = None
    """How often each sample is drawn; None: without end."""
    seed: int = 0
    shuffle: bool = True
    """Draw the samples of an epoch in random order."""
    buffer_size: int = 1024
    """Samples at hand for the packer."""
    over_long: OverLong = "error"
    """What happens to a sample longer than a row."""
    on_bad_sample: OnBadSample = "error"
    """`error` raises on all ranks for the first one, `skip` leaves it out and reports it."""
    cost: CostModel = field(default_factory=CostModel)
    """Estimates what a row costs, the same on every rank; the rows of a step are levelled by it."""

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.rows_per_step < 1:
            raise ValueError(f"rows_per_step={self.rows_per_step} must be at least 1")
        if self.over_long == "split" and self.row_tokens < 2:
            raise ValueError(f"over_long='split' needs row_tokens={self.row_tokens} to be at least 2")
        for name, choices in (("over_long", get_args(OverLong)), ("on_bad_sample", get_args(OnBadSample))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {choices}")

    @property
    def in_state(self) -> dict[str, Any]:
        """What a run that goes on must have as before."""
        names = ("seed", "shuffle", "row_tokens", "rows_per_step", "buffer_size", "over_long")
        return {name: getattr(self, name) for name in names}


class Measured(NamedTuple):
    """A sample's length, or why it has none."""

    sample: int
    """Its index in the source."""
    length: int
    """Tokens, media expanded; `BAD` if it cannot be used."""
    reason: str = ""
    media_costs: tuple[float, ...] = ()
    """What encoding each of its media costs, where several ranks share that."""
    text: NDArray[np.int32] | None = None
    """Ids and labels of a sample without media, if they are kept; see `texts`."""
    without_reasoning: int = 0
    """Turns that are trained without their reasoning, since the chat template leaves it out."""


def pieces(length: int, row_tokens: int) -> list[tuple[int, int]]:
    """Where the pieces of a document start and stop: each begins with the last token of the one before, which
    no token before it predicts there, so that every token but the first is predicted once.

    >>> pieces(8, 4)
    [(0, 4), (3, 7), (6, 8)]
    """
    starts = range(0, max(1, length - 1), row_tokens - 1)
    return [(start, min(start + row_tokens, length)) for start in starts]


class Draw(NamedTuple):
    """A sample as drawn from the stream, or a piece of one."""

    position: int
    """In the endless stream: unlike the sample, never seen twice."""
    sample: int
    """Its index in the source."""
    length: int
    """As measured, before it is truncated; of a piece, its own."""
    left_out: int = 0
    """Positions of its epoch just before this one whose samples were left out."""
    start: int = 0
    """Where a piece starts in its document."""
    whole: int = 0
    """The length of a piece's document; 0 of a sample in one piece."""

    @property
    def key(self) -> tuple[int, int]:
        """Position and start, by which it is told from all others."""
        return self.position, self.start


class BadSample(NamedTuple):
    """A sample that was left out, and why."""

    sample: int
    """Its index in the source."""
    where: str
    reason: str


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step of the whole job."""

    step: int
    epoch: float
    """Passes over the data up to and with this step: 1.5 in the middle of the second."""
    rows: list[list[Draw]]
    bad: list[BadSample]
    """Found on the way to this step, each once by a planner."""
    over_long: list[Draw]
    """Dropped or cut on the way to this step, in each epoch anew."""
    done: int
    """Positions of the stream that are in this step or an earlier one, or were left out."""
    state: dict[str, Any]
    """The planner's state after this step."""


class _Stream:
    """Draws samples that fit a row, in order, and keeps account of those that it leaves out."""

    def __init__(
        self,
        order: SampleOrder,
        measure: Callable[[int], Sequence[Measured]],
        where: Callable[[int], str],
        options: RowOptions,
    ) -> None:
        self._order = order
        self._measure = measure
        self._where = where
        self._options = options
        self._window: list[Measured] = []  # measured samples from `position` on, the next one last
        self.position = 0
        self._pieces: list[Draw] = []  # of the document that is being drawn, the next one last
        self._usable = 0  # samples of this epoch that went into rows
        self._left_out = 0  # samples of this epoch that did not, since the latest that did
        self.reported: set[int] = set()
        self.bad: list[BadSample] = []
        self.lost: list[Draw] = []

    @property
    def at_end(self) -> bool:
        return self._order.total is not None and self.position >= self._order.total

    def __iter__(self) -> Iterator[Draw]:
        return self

    def __next__(self) -> Draw:
        if self._pieces:
            return self._pieces.pop()
        while not self.at_end:
            if not self._window:
                self._window = list(reversed(self._measure(self.position)))
            draw = self._judge(
                Draw(self.position, *self._window[-1][:2], self._left_out), self._window[-1].reason
            )
            self._window.pop()
            self.position += 1
            self._usable += draw is not None
            self._left_out = self._left_out + 1 if draw is None else 0
            if self.position % self._order.num_samples == 0:
                self._end_epoch()
            if draw is not None:
                return self._first_piece(draw)
        raise StopIteration

    def _first_piece(self, draw: Draw) -> Draw:
        """A sample, or the first piece of a document whose others are drawn next."""
        row_tokens = self._options.row_tokens
        if draw.length <= row_tokens or self._options.over_long != "split":
            return draw
        for start, stop in reversed(pieces(draw.length, row_tokens)):
            self._pieces.append(draw._replace(length=stop - start, start=start, whole=draw.length))
        return self._pieces.pop()

    def _judge(self, draw: Draw, reason: str) -> Draw | None:
        if draw.length == BAD:
            where = self._where(draw.sample)
            if self._options.on_bad_sample == "error":
                raise ValueError(f"{where}: {reason}")
            if draw.sample not in self.reported:
                self.reported.add(draw.sample)
                self.bad.append(BadSample(draw.sample, where, reason))
            return None
        row_tokens, over_long = self._options.row_tokens, self._options.over_long
        if draw.length <= row_tokens or over_long == "split":  # what must not be split is bad when measured
            return draw
        if over_long == "error":
            raise ValueError(
                f"{self._where(draw.sample)}: {draw.length} tokens, but a row holds {row_tokens}; use "
                f"over_long='truncate', 'drop' or, of plain text, 'split', or row_tokens >= {draw.length}"
            )
        self.lost.append(draw)
        return draw if over_long == "truncate" else None

    def _end_epoch(self) -> None:
        if not self._usable:  # an endless stream would be searched for ever
            bad = ", ".join(f"{bad.where}: {bad.reason}" for bad in self.bad[:3])
            raise ValueError(
                f"none of the {self._order.num_samples} samples can be used: {len(self.reported)} are bad, "
                f"the others longer than row_tokens={self._options.row_tokens}"
                + (f" ({bad}, …)" if bad else "")
            )
        self._usable = self._left_out = 0

    def state_dict(self) -> dict[str, Any]:
        state = {"position": self.position, "usable": self._usable, "left_out": self._left_out}
        return state | ({"pieces": [list(draw) for draw in self._pieces]} if self._pieces else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self._usable, self._left_out = state["position"], state["usable"], state["left_out"]
        self._pieces = [Draw(*draw) for draw in state.get("pieces", ())]


class StepPlanner:
    """Draws samples, packs them into rows and takes rows together to steps.

    `measure(position)` gives what stands in the stream from that position on, one sample or more. Only the
    samples count, not how many it gives at once, so the plan does not depend on who measures when. `where`
    names a sample for messages.

    >>> lengths = [6, 3, 5, 2]
    >>> order = SampleOrder(4, shuffle=False, epochs=1)
    >>> planner = StepPlanner(
    ...     order, lambda position: [Measured(position, lengths[position])], RowOptions(8, rows_per_step=2)
    ... )
    >>> [sorted(draw.length for draw in row) for row in planner.next_step().rows]
    [[2, 6], [3, 5]]
    >>> planner.next_step() is None
    True
    """

    def __init__(
        self,
        order: SampleOrder,
        measure: Callable[[int], Sequence[Measured]],
        options: RowOptions,
        where: Callable[[int], str] = "sample {}".format,
    ) -> None:
        options.check()
        self._order = order
        self._rows_per_step = options.rows_per_step
        self._stream = _Stream(order, measure, where, options)
        # What is too long is judged by the stream, which can name it: the packer sees lengths that fit.
        self._packer = StreamingPacker[Draw](
            options.row_tokens,
            lambda draw: min(draw.length, options.row_tokens),
            options.buffer_size,
            options.seed,
            epoch=lambda draw: order.epoch(draw.position),
        )
        self._rows: Iterator[list[Draw]] | None = None
        self._step = 0

    def next_step(self) -> PlannedStep | None:
        """The next step, the last of which may have fewer rows; None after it."""
        if self._rows is None:
            self._rows = self._packer.pack(self._stream)
        rows = list(islice(self._rows, self._rows_per_step))
        if not rows:
            return None
        step, self._step = self._step, self._step + 1
        state = self.state_dict()
        bad, over_long = self.left_out()
        done = self._done()
        return PlannedStep(
            step=step,
            epoch=done / self._order.num_samples,
            rows=rows,
            bad=bad,
            over_long=over_long,
            done=done,
            state=state,
        )

    def _done(self) -> int:
        """Positions that are behind: all but those of samples at hand and of what was left out before."""
        at_hand = self._packer.at_hand()
        epoch = min((self._order.epoch(draw.position) for draw in at_hand), default=None)
        if epoch is None:
            return self._stream.position
        # By position: of a document, several pieces may wait.
        waiting = {draw.position: draw for draw in at_hand if self._order.epoch(draw.position) == epoch}
        end = min(self._stream.position, (epoch + 1) * self._order.num_samples)
        return end - sum(1 + draw.left_out for draw in waiting.values())

    def left_out(self) -> tuple[list[BadSample], list[Draw]]:
        """Bad and over-long samples that no step has reported yet; they are then reported."""
        bad, self._stream.bad = self._stream.bad, []
        over_long, self._stream.lost = self._stream.lost, []
        return bad, over_long

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state after the last step; it does not grow with the stream."""
        packer = self._packer.state_dict()
        del packer["source"]  # it is given separately, also at the end of the stream
        packer["waiting"], *packer["planned"] = [
            [{**sample, "item": list(sample["item"])} for sample in row]
            for row in (packer["waiting"], *packer["planned"])
        ]
        return {"step": self._step, "stream": self._stream.state_dict(), "packer": packer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step where `state` was taken; bad samples that are met again are reported again."""
        self._step = state["step"]
        self._stream.load_state_dict(state["stream"])
        packer = state["packer"]
        waiting, *planned = [
            [{**sample, "item": Draw(*sample["item"])} for sample in row]
            for row in (packer["waiting"], *packer["planned"])
        ]
        self._packer.load_state_dict(
            {
                **packer,
                "waiting": waiting,
                "planned": planned,
                "exhausted": False,  # the stream tells: it may have more epochs than when the state was taken
                "source": state["stream"],
            }
        )
