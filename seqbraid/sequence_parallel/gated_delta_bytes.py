"""What a gated-delta layer sends by each of its two methods, and which one a row takes.

Letters: P ranks, G key heads, H value heads, K and V their sizes, N open tokens of the group (those of
sequences that live on more than one rank), n of them on the rank itself, J open segments.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from ..layout import SequenceLayout
from .chain import Chains
from .gated_delta_heads import GatedDeltaHeads
from .gated_delta_layer import GatedDeltaLayer

Choice = Literal["auto", "states", "heads"]
CHOICES = get_args(Choice)
"""What may be asked for: one of the methods, or the cheaper one for the row at hand."""


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

    A segment's S0 (`H·K·V` numbers) and, unless it is the first of its sequence, its M (`H·K·K`) go to every
    other rank that holds a later segment, in float32 whatever 16-bit type the activations have.
    """
    chains = Chains.of(layout)
    position, owner = chains.position_J, chains.rank_J
    told_JP = position[:, None] < chains.last_held(position, layout.num_ranks)
    told_JP[np.arange(len(owner)), owner] = False
    columns = sizes.value_dim + sizes.key_dim * (position > 0)
    sent = np.zeros(layout.num_ranks, dtype=np.int64)
    np.add.at(sent, owner, told_JP.sum(1) * columns)
    row = sizes.num_value_heads * sizes.key_dim * max(itemsize, 4)
    return [int(count) * row for count in sent]


def choose_method(layout: SequenceLayout, sizes: HeadSizes, itemsize: int) -> str:
    """`states` or `heads`: whose busiest rank sends less; state passing on a tie, or where the heads
    do not divide.

    >>> heads = HeadSizes(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
    >>> rows = [SequenceLayout([length], ring=8, policy="zigzag") for length in (1024, 65536)]
    >>> [choose_method(row, heads, itemsize=2) for row in rows]
    ['heads', 'states']
    """
    if sizes.num_key_heads % layout.num_ranks:
        return "states"
    by_heads, by_states = (f(layout, sizes, itemsize) for f in (heads_bytes, states_bytes))
    return "heads" if max(by_heads) < max(by_states) else "states"
