"""What a gated-delta layer sends by each of its two methods, and which one a row takes.

Letters: P ranks, G key heads, H value heads, K and V their sizes, N open tokens of the group (those of
sequences that live on more than one rank), n of them on the rank itself.
"""

from __future__ import annotations

from typing import NamedTuple

from ..layout import SequenceLayout
from ..layout.layout import Segment
from .gated_delta_heads import GatedDeltaHeads
from .gated_delta_layer import GatedDeltaLayer

METHODS = ("states", "heads")


class HeadSizes(NamedTuple):
    """The heads of a gated-delta layer: all that the bytes depend on beside the layout."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(layer: GatedDeltaLayer) -> HeadSizes:
        """The heads of a layer."""
        return HeadSizes(layer.num_key_heads, layer.num_value_heads, layer.key_dim, layer.value_dim)


def heads_bytes(layout: SequenceLayout, sizes: HeadSizes, itemsize: int) -> list[int]:
    """What each rank sends in a layer's forward by the head all-to-all.

    To each other rank that rank's share of our n tokens' q, k, v, b and a, and our share of its tokens'
    outputs: `n·(2·G·K + H·V + 2·H)·(P−1)/P + (N−n)·H·V/P` elements of the activations.
    """
    size = layout.num_ranks
    GatedDeltaHeads(sizes.num_key_heads, sizes.num_value_heads, size)
    keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
    there, back = (2 * keys + values + 2 * sizes.num_value_heads) // size, values // size
    own = [
        sum(s.num_tokens for s in layout.segments(rank) if layout.is_split(s.sequence))
        for rank in range(size)
    ]
    return [(n * (size - 1) * there + (sum(own) - n) * back) * itemsize for n in own]


def states_bytes(layout: SequenceLayout, sizes: HeadSizes, itemsize: int) -> list[int]:
    """What each rank sends in a layer's forward by state passing, beside the convolution's few halo rows.

    A segment's S0, and its M unless it is the first of its sequence, go to every other rank that holds a
    later segment: `H·K·(V + K)` and `H·K·V` numbers, in float32 whatever 16-bit type the activations have.
    """
    state = sizes.num_value_heads * sizes.key_dim * max(itemsize, 4)
    sent = [0] * layout.num_ranks
    for chain in _chains(layout):
        later: set[int] = set()
        for segment in reversed(chain):
            transition = sizes.key_dim if segment.start else 0
            sent[segment.rank] += len(later - {segment.rank}) * state * (sizes.value_dim + transition)
            later.add(segment.rank)
    return sent


def choose(layout: SequenceLayout, sizes: HeadSizes, itemsize: int) -> str:
    """The method of `METHODS` whose busiest rank sends less; state passing on a tie, or where the heads do
    not divide.

    >>> heads = HeadSizes(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
    >>> rows = [SequenceLayout([length], ring=8, policy="zigzag") for length in (1024, 65536)]
    >>> [choose(row, heads, itemsize=2) for row in rows]
    ['heads', 'states']
    """
    if sizes.num_key_heads % layout.num_ranks:
        return "states"
    by_heads, by_states = (f(layout, sizes, itemsize) for f in (heads_bytes, states_bytes))
    return "heads" if max(by_heads) < max(by_states) else "states"


def _chains(layout: SequenceLayout) -> list[list[Segment]]:
    """The segments of every sequence over all ranks, in sequence order."""
    chains: list[list[Segment]] = [[] for _ in layout.lengths]
    for rank in range(layout.num_ranks):
        for segment in layout.segments(rank):
            chains[segment.sequence].append(segment)
    for chain in chains:
        chain.sort(key=lambda segment: segment.start)
    return chains
