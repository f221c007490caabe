"""How each policy cuts the sequences of a row over the ranks of a ring: lists of pieces, before any padding.

A piece is a run of one sequence that lies on one ring rank, in physical coordinates of that sequence (zigzag
chunks may reach into its padding). Every rank of a ring position's Ulysses group later takes one slice of
that position's list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from .alignment import align, sequence_multiple
from .balance import balance
from .placement import Balance, mirrored


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a sequence."""

    sequence: int
    start: int
    stop: int


class Partition(NamedTuple):
    """What a policy decides: who shares which sequence, and who keeps which whole."""

    padded_lengths: tuple[int, ...]
    shared: tuple[tuple[Piece, ...], ...]
    """Per ring rank: the pieces that its Ulysses group shares, in local order."""
    slices: tuple[tuple[int, ...], ...]
    """Per ring rank: how many of those tokens each of its Ulysses ranks holds."""
    whole: tuple[tuple[int, ...], ...]
    """Per rank: the sequences that live there whole, after its slice."""


def cut_contiguous(lengths: Sequence[int], ring: int, ulysses: int) -> Partition:
    """The row cut into equal pieces, in row order."""
    num_ranks = ring * ulysses
    per_rank = align(sum(lengths), num_ranks) // num_ranks
    per_ring_rank = per_rank * ulysses
    shared: list[list[Piece]] = [[] for _ in range(ring)]
    position = 0
    for sequence, length in enumerate(lengths):
        start = 0
        while start < length:
            ring_rank = position // per_ring_rank
            take = min(length - start, (ring_rank + 1) * per_ring_rank - position)
            shared[ring_rank].append(Piece(sequence, start, start + take))
            start, position = start + take, position + take
    return _all_shared(tuple(lengths), shared, [per_ring_rank] * ring, ulysses)


def cut_zigzag(lengths: Sequence[int], ring: int, ulysses: int) -> Partition:
    """Each sequence cut into `2·ring` equal chunks; ring rank r takes chunks r and `2·ring−1−r`."""
    padded = tuple(align(length, sequence_multiple(ring)) for length in lengths)
    shared: list[list[Piece]] = [[] for _ in range(ring)]
    for sequence, length in enumerate(padded):
        if ring == 1:
            shared[0].append(Piece(sequence, 0, length))
            continue
        chunk = length // (2 * ring)
        for ring_rank in range(ring):
            for index in (ring_rank, 2 * ring - 1 - ring_rank):
                shared[ring_rank].append(Piece(sequence, index * chunk, (index + 1) * chunk))
    sizes = [align(sum(padded) // ring, ulysses)] * ring
    return _all_shared(padded, shared, sizes, ulysses)


def cut_balanced(lengths: Sequence[int], ring: int, ulysses: int) -> Partition:
    """Short sequences whole on one rank, long ones cut zigzag over as few ring ranks as level
    tokens and cost.
    """
    plan: Balance = balance(lengths, ring, ulysses)
    shared: list[list[Piece]] = [[] for _ in range(ring)]
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for sequence in (i for i in longest_first if i in plan.shares):
        for ring_rank, pieces in mirrored(lengths[sequence], plan.shares[sequence]).items():
            shared[ring_rank] += [Piece(sequence, start, stop) for start, stop in pieces]
    slices = tuple(tuple(plan.slices[r * ulysses : (r + 1) * ulysses]) for r in range(ring))
    # Long ones first on every rank: those that get a kernel call of their own lie apart from those that share
    # one.
    whole = tuple(tuple(i for i in longest_first if i in items) for items in map(set, plan.whole))
    return Partition(tuple(lengths), tuple(map(tuple, shared)), slices, whole)


def _all_shared(
    padded: tuple[int, ...], shared: list[list[Piece]], sizes: Sequence[int], ulysses: int
) -> Partition:
    slices = tuple((size // ulysses,) * ulysses for size in sizes)
    return Partition(padded, tuple(map(tuple, shared)), slices, ((),) * (len(shared) * ulysses))


Policy = Literal["balanced", "zigzag", "contiguous"]
POLICIES: dict[str, Callable[[Sequence[int], int, int], Partition]] = dict(
    zip(get_args(Policy), (cut_balanced, cut_zigzag, cut_contiguous), strict=True)
)
