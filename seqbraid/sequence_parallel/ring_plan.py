"""Who sends which keys to whom, and which blocks are computed of them: from the layout alone.

On each ring rank the real tokens of a sequence lie side by side and in order (a *run*), though they may be of
several places of the sequence. Two facts make the plan short:

- On the rank itself, causal attention over a run is causal attention over the concatenation.
- Of another rank's run, a query segment sees a prefix: the segments that end before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..layout import SequenceLayout
from ..ops.blocks import Block, BlockPlan


class Run(NamedTuple):
    """The real tokens of a sequence on a ring rank: first local row, and the segments `(start, stop)` in
    order.
    """

    offset: int
    segments: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.segments)

    def num_before(self, position: int) -> int:
        """Tokens of the segments that end at or before a position."""
        return sum(stop - start for start, stop in self.segments if stop <= position)


@dataclass(frozen=True)
class RingStep:
    """One exchange: send rows of ours to `target`, receive `num_received` rows of `source`, compute the
    blocks.
    """

    target: int
    sent_rows: tuple[tuple[int, int], ...]
    source: int
    num_received: int
    blocks: BlockPlan

    @property
    def num_sent(self) -> int:
        return sum(stop - start for start, stop in self.sent_rows)


@dataclass(frozen=True)
class RingPlan:
    """What a ring rank computes of its own rows, and its exchanges in order."""

    local: BlockPlan
    steps: tuple[RingStep, ...] = ()

    @staticmethod
    def of(layout: SequenceLayout, ring_rank: int, window: int | None = None) -> RingPlan:
        """The plan of a ring rank for the tokens that its Ulysses group shares."""
        runs = [_runs(layout, rank) for rank in range(layout.ring)]
        mine = runs[ring_rank]
        if window is not None:
            _refuse_window(layout, runs, window)
        local = BlockPlan.causal([(run.offset, run.num_tokens) for run in mine.values()], window)
        steps = []
        for distance in range(1, layout.ring):
            target, source = (ring_rank + distance) % layout.ring, (ring_rank - distance) % layout.ring
            sent = [(mine[s].offset, mine[s].offset + n) for s, n in _needed(mine, runs[target]).items()]
            received = _needed(runs[source], mine)
            blocks: list[Block] = []
            base = 0
            for sequence, count in received.items():
                blocks += _blocks(mine[sequence], runs[source][sequence], base)
                base += count
            # A step with nothing to send or receive stays: it costs nothing, and keeps the order of messages
            # the same on all ranks.
            steps.append(RingStep(target, tuple(sent), source, base, BlockPlan(tuple(blocks))))
        return RingPlan(local, tuple(steps))


def _runs(layout: SequenceLayout, ring_rank: int) -> dict[int, Run]:
    runs: dict[int, Run] = {}
    slot = 0
    for sequence, start, stop in layout.shared_pieces(ring_rank):
        end = min(stop, layout.lengths[sequence])
        if start < end:
            run = runs.get(sequence, Run(slot, ()))
            assert run.offset + run.num_tokens == slot, "a sequence's rows on a ring rank lie side by side"
            runs[sequence] = Run(run.offset, (*run.segments, (start, end)))
        slot += stop - start
    return runs


def _needed(source: dict[int, Run], target: dict[int, Run]) -> dict[int, int]:
    """Per sequence of the source, how many of its first rows some query of the target sees."""
    needed = {}
    for sequence, run in source.items():
        if sequence in target:
            count = run.num_before(target[sequence].segments[-1][0])
            if count:
                needed[sequence] = count
    return needed


def _blocks(queries: Run, keys: Run, base: int) -> list[Block]:
    """Our segments of a sequence against the prefixes they see, neighbours that see the same one joined."""
    blocks: list[Block] = []
    row = queries.offset
    for start, stop in queries.segments:
        end, seen = row + stop - start, base + keys.num_before(start)
        if blocks and blocks[-1].q_stop == row and blocks[-1].k_stop == seen:
            blocks[-1] = blocks[-1]._replace(q_stop=end)
        elif seen > base:
            blocks.append(Block(row, end, base, seen, causal=False))
        row = end
    return blocks


def _refuse_window(layout: SequenceLayout, runs: list[dict[int, Run]], window: int) -> None:
    """A window wider than a sequence changes nothing; a narrower one cuts through the blocks of a ring."""
    for sequence, length in enumerate(layout.lengths):
        ranks = [rank for rank in range(layout.ring) if sequence in runs[rank]]
        if len(ranks) > 1 and length > window:
            raise ValueError(
                f"sequence {sequence} of {length} tokens is cut over {len(ranks)} ring ranks, but the model "
                "has layers "
                f"with a sliding window of {window}; use ulysses instead of ring, or samples of at most "
                f"{window} tokens"
            )
