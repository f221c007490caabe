"""Who sends which keys to whom, and which blocks are computed of them: from the layout alone.

On each ring rank the real tokens of a sequence lie side by side and in order (a *run*), though they may be of
several places of the sequence. Two facts make the plan short:

- On the rank itself, causal attention over a run is causal attention over the concatenation.
- Of other ranks' keys, sorted by position, a query segment sees a prefix: the segments that end before it
starts.

Keys travel straight from the rank that has them to those that need them, distance by distance around the
ring. Distances at which little is sent share a round, so that rows of many small cuts do not fall apart into
tiny blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import SequenceLayout
from ..ops.blocks import Block, BlockPlan


class RingTokens(NamedTuple):
    """The real tokens of a sequence on a ring rank: first local row, and its segments `(start, stop)`."""

    offset: int
    segments: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return _count(self.segments)

    def before(self, position: int) -> tuple[tuple[int, int], ...]:
        """The segments that end at or before a position."""
        return tuple((start, stop) for start, stop in self.segments if stop <= position)


class RingMessage(NamedTuple):
    """Rows of ours for another ring rank, as ranges; or, coming in, how many rows it sends us."""

    rank: int
    rows: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        return _count(self.rows)


@dataclass(frozen=True)
class RingRound:
    """Messages that are under way together, and our queries' blocks against the keys that came in."""

    sent: tuple[RingMessage, ...]
    received: tuple[RingMessage, ...]
    sorting: Tensor | None
    """Index that puts the received rows in the order of sequence and position; None where they arrive so."""
    blocks: BlockPlan
    _indices: dict[tuple[torch.device, bool], Tensor] = field(default_factory=dict, compare=False, repr=False)
    """`sorting` and its inverse on the devices where they were used: the layers of a step share them."""

    @property
    def num_received(self) -> int:
        return sum(message.num_rows for message in self.received)

    def sorted(self, received: Tensor) -> Tensor:
        """The received rows in the order of sequence and position."""
        return self._taken(received, back=False)

    def unsorted(self, rows: Tensor) -> Tensor:
        """Rows in that order as they were received."""
        return self._taken(rows, back=True)

    def _taken(self, rows: Tensor, back: bool) -> Tensor:
        if self.sorting is None:
            return rows
        key = (rows.device, back)
        if key not in self._indices:
            order = self.sorting.argsort() if back else self.sorting
            self._indices[key] = order.to(rows.device)
        return rows[self._indices[key]]


@dataclass(frozen=True)
class RingPlan:
    """What a ring rank computes of its own rows, and its rounds in order."""

    local: BlockPlan
    rounds: tuple[RingRound, ...] = ()
    num_shared: int = 0
    """Rows, from the first on, that take part in rounds; sequences that live whole on the rank follow them.
    """

    @staticmethod
    def of(
        layout: SequenceLayout,
        ring_rank: int,
        query_heads: float,
        window: int | None = None,
        whole: Sequence[int] = (),
    ) -> RingPlan:
        """The plan of a ring rank for the tokens that its Ulysses group shares, and whole sequences behind
        them; with so many query heads to a key head.
        """
        runs = [_runs(layout, rank) for rank in range(layout.ring)]
        mine = runs[ring_rank]
        if window is not None:
            refuse_window(layout, window, runs)
        num_shared = sum(
            layout.num_shared_tokens(ring_rank * layout.ulysses + u) for u in range(layout.ulysses)
        )
        starts = accumulate((layout.lengths[i] for i in whole), initial=num_shared)
        local = [(run.offset, run.num_tokens) for run in mine.values()]
        local += [(start, layout.lengths[i]) for i, start in zip(whole, starts, strict=False)]
        rounds = [_round(runs, ring_rank, distances) for distances in _rounds(layout, runs, query_heads)]
        if not any(round_.sent or round_.received for round_ in rounds):
            rounds = []  # nobody has anything for this rank: no order to keep, no merging to prepare
        return RingPlan(BlockPlan.causal(local, window), tuple(rounds), num_shared)


def _runs(layout: SequenceLayout, ring_rank: int) -> dict[int, RingTokens]:
    runs: dict[int, RingTokens] = {}
    slot = 0
    for sequence, start, stop in layout.shared_pieces(ring_rank):
        end = min(stop, layout.lengths[sequence])
        if start < end:
            run = runs.get(sequence, RingTokens(slot, ()))
            assert run.offset + run.num_tokens == slot, "a sequence's rows on a ring rank lie side by side"
            runs[sequence] = RingTokens(run.offset, (*run.segments, (start, end)))
        slot += stop - start
    return runs


def _needed(
    source: dict[int, RingTokens], target: dict[int, RingTokens]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Per sequence of the source, the segments that some query of the target sees: the first ones."""
    shared = ((s, run.before(target[s].segments[-1][0])) for s, run in source.items() if s in target)
    return {sequence: segments for sequence, segments in shared if segments}


ROUND_TOKENS, ROUND_MEMORY = 3, 1.5
"""A rank receives at most so many times the tokens that it has itself in a round, and keys and values of at
most so many times the memory of its queries; but always those of one rank. More in a round is fewer merges
and larger blocks; two rounds are in memory at a time."""


def _rounds(layout: SequenceLayout, runs: list[dict[int, RingTokens]], query_heads: float) -> list[list[int]]:
    """The distances 1, 2, … around the ring, joined while no rank receives too much at a time.

    It is the same on every rank, and no distance is left out, so that messages meet in the
    same order everywhere.
    """
    times = min(ROUND_TOKENS, max(1.0, ROUND_MEMORY * query_heads / 2))
    budget = times * layout.num_local_tokens * layout.ulysses
    rounds: list[list[int]] = []
    load = [0] * layout.ring
    for distance in range(1, layout.ring):
        comes = [_coming(runs, rank, distance) for rank in range(layout.ring)]
        joined = [a + b for a, b in zip(load, comes, strict=True)]
        if rounds and max(joined) <= budget:
            rounds[-1].append(distance)
            load = joined
        else:
            rounds.append([distance])
            load = comes
    return rounds


def _coming(runs: list[dict[int, RingTokens]], rank: int, distance: int) -> int:
    source = runs[(rank - distance) % len(runs)]
    return sum(_count(segments) for segments in _needed(source, runs[rank]).values())


def _round(runs: list[dict[int, RingTokens]], ring_rank: int, distances: list[int]) -> RingRound:
    size, mine = len(runs), runs[ring_rank]
    sent, received, arrived = [], [], []
    for distance in distances:
        target, source = (ring_rank + distance) % size, (ring_rank - distance) % size
        going = _needed(mine, runs[target])
        if going:
            starts = {s: mine[s].offset for s in going}
            sent.append(
                RingMessage(target, tuple((starts[s], starts[s] + _count(n)) for s, n in going.items()))
            )
        coming = _needed(runs[source], mine)
        if coming:
            received.append(RingMessage(source, ((0, sum(map(_count, coming.values()))),)))
            arrived += [(s, *segment) for s, segments in coming.items() for segment in segments]
    blocks: list[Block] = []
    base = 0
    for sequence in sorted({s for s, _, _ in arrived}):
        keys = sorted((start, stop) for s, start, stop in arrived if s == sequence)
        blocks += _blocks(mine[sequence], RingTokens(base, tuple(keys)))
        base += _count(keys)
    return RingRound(tuple(sent), tuple(received), _sorting(arrived), BlockPlan(tuple(blocks)))


def _sorting(arrived: list[tuple[int, int, int]]) -> Tensor | None:
    """The rows of segments `(sequence, start, stop)` in the order of sequence and position."""
    if arrived == sorted(arrived):
        return None
    rows = torch.arange(sum(stop - start for _, start, stop in arrived))
    parts = rows.split([stop - start for _, start, stop in arrived])
    return torch.cat([parts[i] for i in sorted(range(len(arrived)), key=lambda i: arrived[i])])


def _blocks(queries: RingTokens, keys: RingTokens) -> list[Block]:
    """Our segments of a sequence against the prefixes they see, neighbours that see the same one joined."""
    blocks: list[Block] = []
    row = queries.offset
    for start, stop in queries.segments:
        end, seen = row + stop - start, keys.offset + _count(keys.before(start))
        if blocks and blocks[-1].q_stop == row and blocks[-1].k_stop == seen:
            blocks[-1] = blocks[-1]._replace(q_stop=end)
        elif seen > keys.offset:
            blocks.append(Block(row, end, keys.offset, seen, causal=False))
        row = end
    return blocks


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def refuse_window(
    layout: SequenceLayout, window: int, runs: list[dict[int, RingTokens]] | None = None
) -> None:
    """A window wider than a sequence changes nothing; a narrower one cuts through the blocks of a ring."""
    runs = [_runs(layout, rank) for rank in range(layout.ring)] if runs is None else runs
    for sequence, length in enumerate(layout.lengths):
        ranks = [rank for rank in range(layout.ring) if sequence in runs[rank]]
        if len(ranks) > 1 and length > window:
            raise ValueError(
                f"sequence {sequence} of {length} tokens is cut over {len(ranks)} ring ranks, but the model "
                f"has layers with a sliding window of {window}; use ulysses instead of ring, or samples of "
                f"at most {window} tokens"
            )
