"""`SequenceLayout`: which rank holds which tokens of a packed row; arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

from .alignment import local_tokens
from .pieces import POLICIES, Piece
from .placement import causal_cost

PADDING = -1
"""The index of a slot that holds no token."""


class Segment(NamedTuple):
    """A run of real tokens of one sequence on one rank: `[start, stop)` of the sequence at local `offset`."""

    sequence: int
    start: int
    stop: int
    rank: int
    offset: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class SequenceLayout:
    """The placement of the sequences of one packed row on `ring × ulysses` ranks.

    Rank `ring_rank · ulysses + ulysses_rank` holds, in this order: its slice of the tokens that its Ulysses
    group shares, the sequences that live whole on it, and padding up to `num_local_tokens`, which is the same
    for every rank.

    Args:
        lengths: real tokens of each sequence, in row order.
        ring: ranks along which keys and values travel.
        ulysses: ranks along which heads are exchanged for tokens; neighbours of each other.
        policy: `balanced`, `zigzag` or `contiguous`.
        multiple_of: what the tokens of a rank are rounded up to.
        pad_to: physical tokens of the whole row, for fixed shapes; raises if the row does not fit.
        fp8: round a rank's tokens to 16 as well.

    >>> layout = SequenceLayout([5, 3], ring=2, policy="zigzag")
    >>> layout.padded_lengths, layout.num_local_tokens
    ((8, 4), 6)
    >>> layout.index(0).tolist()
    [0, 1, -1, -1, 5, -1]
    >>> [tuple(s) for s in layout.segments(1)]
    [(0, 2, 5, 1, 0), (1, 1, 3, 1, 4)]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        ring: int = 1,
        ulysses: int = 1,
        policy: str = "balanced",
        multiple_of: int = 1,
        pad_to: int | None = None,
        fp8: bool = False,
    ) -> None:
        self.lengths = _checked_lengths(lengths)
        for name, value in (("ring", ring), ("ulysses", ulysses), ("multiple_of", multiple_of)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r} is unknown; use one of {', '.join(sorted(POLICIES))}")
        self.ring = ring
        self.ulysses = ulysses
        self.policy = policy
        self._cut = POLICIES[policy](self.lengths, ring, ulysses)
        needed = max(
            self.num_shared_tokens(rank) + sum(self.lengths[i] for i in self.whole_sequences(rank))
            for rank in range(self.num_ranks)
        )
        self.num_local_tokens = local_tokens(
            needed, self.num_ranks, multiple_of=multiple_of, fp8=fp8, pad_to=pad_to
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the sequence group."""
        return self.ring * self.ulysses

    @property
    def num_tokens(self) -> int:
        """Real tokens of the row."""
        return self.cu_seqlens[-1]

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Physical tokens of each sequence: more than its length only under `zigzag`."""
        return self._cut.padded_lengths

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Logical boundaries: sequence i is `[cu_seqlens[i], cu_seqlens[i+1])` of the row."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def cu_seqlens_padded(self) -> tuple[int, ...]:
        """Physical boundaries, the padding of each sequence included."""
        return tuple(accumulate(self.padded_lengths, initial=0))

    @property
    def max_seqlen(self) -> int:
        """The longest sequence of the row."""
        return max(self.lengths)

    def shared_pieces(self, ring_rank: int) -> tuple[Piece, ...]:
        """The pieces that the Ulysses group of a ring rank shares, in the order it holds them."""
        return self._cut.shared[ring_rank]

    def num_shared_tokens(self, rank: int) -> int:
        """Slots at the head of a rank's shard that belong to its Ulysses group's shared tokens."""
        ring_rank, ulysses_rank = divmod(rank, self.ulysses)
        return self._cut.slices[ring_rank][ulysses_rank]

    def whole_sequences(self, rank: int) -> tuple[int, ...]:
        """The sequences that live whole on a rank, behind its shared tokens."""
        return self._cut.whole[rank]

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The runs of real tokens on a rank, in local order, as long as they go."""
        return self._segments[self._checked_rank(rank)]

    def index(self, rank: int) -> Tensor:
        """For every slot of a rank, the token of the row that it holds, or −1 for padding."""
        import torch  # late: a layout is shown without it

        return torch.from_numpy(self._index(self._checked_rank(rank)).copy())

    def shard(self, x: Tensor, rank: int, dim: int = 0, fill: float | int | bool = 0) -> Tensor:
        """Select a rank's tokens of a row-long tensor; padding slots are set to `fill`."""
        if x.shape[dim] != self.num_tokens:
            raise ValueError(
                f"cannot shard a tensor with {x.shape[dim]} entries in dim {dim} of shape {tuple(x.shape)}: "
                f"the row has {self.num_tokens} tokens (is it sharded already?)"
            )
        index = self.index(rank).to(x.device)
        padding = index == PADDING
        part = x.index_select(dim, index.clamp(min=0)) if self.num_tokens else x
        if padding.any():
            shape = [1] * x.ndim
            shape[dim] = -1
            part = part.masked_fill(padding.view(shape), fill)
        return part

    def unshard(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Undo `shard`: put the parts of all ranks, in rank order, back into the row."""
        if len(parts) != self.num_ranks:
            raise ValueError(
                f"unshard takes one part per rank: got {len(parts)}, the layout has {self.num_ranks}"
            )
        for rank, part in enumerate(parts):
            if part.shape[dim] != self.num_local_tokens:
                raise ValueError(
                    f"part {rank} has {part.shape[dim]} entries in dim {dim}; every rank holds "
                    f"{self.num_local_tokens}"
                )
        import torch

        stacked = torch.cat(list(parts), dim=dim)
        return stacked.index_select(dim, torch.from_numpy(self.slot_of_token).to(stacked.device))

    def attention_cost(self, rank: int) -> float:
        """Query-key pairs that a rank computes in a causal softmax layer, in pairs over all heads."""
        ring_rank = rank // self.ulysses
        shared = sum(
            causal_cost(stop) - causal_cost(start)
            for sequence, start, stop in _clipped(self.shared_pieces(ring_rank), self.lengths)
        )
        return shared / self.ulysses + sum(causal_cost(self.lengths[i]) for i in self.whole_sequences(rank))

    def is_split(self, sequence: int) -> bool:
        """Whether a sequence lives on more than one rank."""
        return self._ranks_of_sequence[sequence] > 1

    @property
    def num_split_tokens(self) -> int:
        """Tokens of sequences that are split over ranks, about which softmax and
        gated-delta layers communicate.
        """
        return sum(length for i, length in enumerate(self.lengths) if self.is_split(i))

    def __repr__(self) -> str:
        return (
            f"SequenceLayout({len(self.lengths)} sequences, {self.num_tokens} tokens, ring={self.ring}, "
            f"ulysses={self.ulysses}, policy={self.policy!r}, {self.num_local_tokens} tokens a rank)"
        )

    def _checked_rank(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank={rank} is outside this layout; valid ranks are 0 to {self.num_ranks - 1}")
        return rank

    @cached_property
    def _segments(self) -> tuple[tuple[Segment, ...], ...]:
        return tuple(tuple(self._segments_of(rank)) for rank in range(self.num_ranks))

    def _segments_of(self, rank: int) -> list[Segment]:
        ring_rank, ulysses_rank = divmod(rank, self.ulysses)
        # This rank's slice of the shared list is [first, last) of the list's slots.
        first = sum(self._cut.slices[ring_rank][:ulysses_rank])
        last = first + self.num_shared_tokens(rank)
        found: list[Segment] = []
        slot = 0
        for sequence, start, stop in self.shared_pieces(ring_rank):
            begin, end = max(slot, first), min(slot + stop - start, last)
            if begin < end:
                found.append(Segment(sequence, start + begin - slot, start + end - slot, rank, begin - first))
            slot += stop - start
        offset = self.num_shared_tokens(rank)
        for sequence in self.whole_sequences(rank):
            found.append(Segment(sequence, 0, self.lengths[sequence], rank, offset))
            offset += self.lengths[sequence]
        return _merged(found, self.lengths)

    def _index(self, rank: int) -> np.ndarray:
        index = np.full(self.num_local_tokens, PADDING, dtype=np.int64)
        for segment in self._segments[rank]:
            begin = self.cu_seqlens[segment.sequence] + segment.start
            index[segment.offset : segment.offset + segment.num_tokens] = np.arange(
                begin, begin + segment.num_tokens
            )
        return index

    @cached_property
    def slot_of_token(self) -> np.ndarray:
        """Where each token of the row is: its slot, counted over the shards of all ranks."""
        index = np.concatenate([self._index(rank) for rank in range(self.num_ranks)])
        slots = np.flatnonzero(index != PADDING)
        slot_of_token = np.empty(self.num_tokens, dtype=np.int64)
        slot_of_token[index[slots]] = slots
        return slot_of_token

    @cached_property
    def _ranks_of_sequence(self) -> list[int]:
        ranks: list[set[int]] = [set() for _ in self.lengths]
        for rank in range(self.num_ranks):
            for segment in self._segments[rank]:
                ranks[segment.sequence].add(rank)
        return [len(r) for r in ranks]


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    values = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if not values:
        raise ValueError("lengths is empty: a row needs at least one sequence")
    for i, value in enumerate(values):
        if isinstance(value, bool) or value != int(value):
            raise ValueError(f"lengths[{i}]={value!r} is not a whole number of tokens")
        if value < 1:
            raise ValueError(f"lengths[{i}]={value}: a sequence has at least one token; leave empty ones out")
    return tuple(int(value) for value in values)


def _clipped(pieces: Sequence[Piece], lengths: Sequence[int]) -> list[Piece]:
    """The real tokens of the pieces, their padding left out."""
    clipped = [Piece(s, start, min(stop, lengths[s])) for s, start, stop in pieces]
    return [piece for piece in clipped if piece.start < piece.stop]


def _merged(segments: list[Segment], lengths: Sequence[int]) -> list[Segment]:
    """Clip segments to real tokens and join those that continue each other both in the sequence and
    on the rank.
    """
    merged: list[Segment] = []
    for segment in segments:
        segment = segment._replace(stop=min(segment.stop, lengths[segment.sequence]))
        if segment.num_tokens <= 0:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.sequence, last.stop) == (segment.sequence, segment.start)
            and last.offset + last.num_tokens == segment.offset
        ):
            merged[-1] = last._replace(stop=segment.stop)
        else:
            merged.append(segment)
    return merged
