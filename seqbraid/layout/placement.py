"""A placement in the making: which sequences a rank keeps whole, which it shares, and what that costs.

Letters: R ring ranks, U Ulysses ranks of each. Costs are counted in query-key pairs of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

ROUND = 512
"""Long sequences are cut at multiples of this, and on a GPU the keys of dense blocks that are not
causal come in multiples of it: round shapes recur, and cuDNN prepares every new shape for about
130 ms (`benchmarks/ring_blocks.py`).
"""

CUT_TOKEN = 300.0
"""What a token of a cut sequence costs more: two kernels see it, and their outputs are merged."""

KEY = 200.0
"""What a key costs the rank that receives it, its way not counted: its gradient is made there and sent back.

These two lie between least-squares fits to the times of single ranks (`Rank` of `benchmarks/ring_blocks.py`,
rows 0 to 3 and 26, H200, forward and backward, 32 query and 8 key heads of 128): 140 to 440 and 200 to 260
with FlashAttention-4, 310 and 140 to 200 with cuDNN."""

SHARED_TOKEN = 500.0
"""What a token costs more that changes hands inside a Ulysses group; a guess."""

CUT_PIECE = 1e5
"""What a part of a cut sequence costs its rank more, however small: its own kernel calls, about 10 µs. Rows
so small that this is much of their cost are led by their tokens instead."""

LAYER_TOKEN = 26000.0
"""What a token costs outside attention, by the multiply-adds of an 8 B model's layer: the price of padding.
"""


@dataclass(frozen=True)
class Balance:
    """A placement: `whole[rank]`, `shares[sequence][ring_rank]` in tokens, from the outermost to the
    innermost part, `slices[rank]` of the shared tokens.
    """

    whole: tuple[tuple[int, ...], ...]
    shares: dict[int, dict[int, int]]
    slices: tuple[int, ...]


def causal_cost(length: int) -> int:
    """Query-key pairs of a causal sequence."""
    return length * (length + 1) // 2


def is_round(length: int, widths: dict[int, int]) -> bool:
    """Whether all parts but the outermost have multiples of ROUND tokens, so that all cuts can be there."""
    outermost, *others = widths.values()
    return all(width % ROUND == 0 for width in (length - outermost, *others))


def mirrored(length: int, widths: dict[int, int]) -> dict[int, list[tuple[int, int]]]:
    """The pieces of each ring rank: two that mirror each other around the middle of the sequence; the first
    rank has the outermost ones.

    Their mean position is the middle whatever their width, so a rank's attention cost is proportional
    to its tokens.
    """
    grain = ROUND if is_round(length, widths) else 1
    low, high, pieces = 0, length, {}
    for ring_rank, width in widths.items():
        left = width // 2 // grain * grain
        halves = [(low, low + left), (high - (width - left), high)]
        pieces[ring_rank] = [(start, stop) for start, stop in halves if start < stop]
        low, high = halves[0][1], halves[1][0]
    return pieces


class Placement:
    """Ranks that fill up with sequences, none beyond `capacity` tokens."""

    def __init__(self, lengths: Sequence[int], ring: int, ulysses: int, capacity: int) -> None:
        self.lengths = lengths
        self.capacity = capacity
        self.whole: list[list[int]] = [[] for _ in range(ring * ulysses)]
        self.shares: dict[int, dict[int, int]] = {}
        self.tokens_RU = np.zeros((ring, ulysses), dtype=np.int64)
        """Of whole sequences, as is the cost beside it."""
        self.cost_RU = np.zeros((ring, ulysses))
        self.shared_R = np.zeros(ring, dtype=np.int64)
        self.shared_cost_R = np.zeros(ring)
        mean = sum(map(causal_cost, lengths)) / (ring * ulysses)
        self.piece_cost = ulysses * min(CUT_PIECE, 0.03 * mean)

    def copy(self) -> Placement:
        """One that can be changed without changing this one."""
        other = copy(self)
        other.whole = [list(items) for items in self.whole]
        other.shares = dict(self.shares)
        for name in ("tokens_RU", "cost_RU", "shared_R", "shared_cost_R"):
            setattr(other, name, getattr(self, name).copy())
        return other

    @property
    def room_R(self) -> np.ndarray:
        """Tokens that each Ulysses group still takes."""
        taken_R: np.ndarray = self.shared_R + self.tokens_RU.sum(1)
        return self.capacity * self.tokens_RU.shape[1] - taken_R

    @property
    def load_RU(self) -> np.ndarray:
        """What each rank has to do by now."""
        return self.cost_RU + (self.shared_cost_R / self.cost_RU.shape[1])[:, None]

    @property
    def load_R(self) -> np.ndarray:
        """What each ring rank's group has to do by now."""
        load_R: np.ndarray = self.cost_RU.sum(1) + self.shared_cost_R
        return load_R

    def keep(self, sequence: int, rank: int, times: int = 1) -> None:
        """Let a sequence live whole on a rank; or, with `times=-1`, no longer."""
        place = divmod(rank, self.tokens_RU.shape[1])
        (self.whole[rank].append if times > 0 else self.whole[rank].remove)(sequence)
        self.tokens_RU[place] += times * self.lengths[sequence]
        self.cost_RU[place] += times * causal_cost(self.lengths[sequence])

    def share(self, sequence: int, widths: dict[int, int], times: int = 1) -> None:
        """Cut a sequence over ring ranks, whose Ulysses groups share their parts; or, with
        `times=-1`, no longer.
        """
        for ring_rank, pieces in mirrored(self.lengths[sequence], widths).items():
            *before, (last, _) = pieces
            keys = last - sum(stop - start for start, stop in before)
            pairs = sum(causal_cost(stop) - causal_cost(start) for start, stop in pieces)
            extra = (CUT_TOKEN if len(widths) > 1 else SHARED_TOKEN) * widths[ring_rank] + KEY * keys
            self.shared_R[ring_rank] += times * widths[ring_rank]
            self.shared_cost_R[ring_rank] += times * (pairs + extra + self.piece_cost)
        if times > 0:
            self.shares[sequence] = widths
        else:
            del self.shares[sequence]

    def places_for(self, sequence: int) -> np.ndarray:
        """Per rank, whether it has room for a whole sequence."""
        length = self.lengths[sequence]
        return (self.tokens_RU + length <= self.capacity) & (self.room_R >= length)[:, None]

    def time(self) -> float:
        """An estimate of the slowest rank's layer."""
        tokens = max(int((self.tokens_RU[r] + slices).max()) for r, slices in enumerate(self._slices()))
        return float(self.load_RU.max() + LAYER_TOKEN * tokens)

    def finished(self) -> Balance:
        """The placement as it stands."""
        slices = tuple(int(n) for slices in self._slices() for n in slices)
        return Balance(tuple(tuple(sorted(items)) for items in self.whole), self.shares, slices)

    def _slices(self) -> list[np.ndarray]:
        return [_level(tokens, int(n)) for tokens, n in zip(self.tokens_RU, self.shared_R, strict=True)]


def _level(tokens_U: np.ndarray, shared: int) -> np.ndarray:
    """Slices of the shared tokens that level the ranks of a group as far as they go."""
    low, high = int(tokens_U.min()), int(tokens_U.max()) + shared
    while low < high:  # the highest level that the shared tokens fill
        middle = (low + high + 1) // 2
        low, high = (middle, high) if (middle - tokens_U).clip(0).sum() <= shared else (low, middle - 1)
    slices: np.ndarray = (low - tokens_U).clip(0)
    rest = shared - int(slices.sum())
    slices[np.flatnonzero(tokens_U + slices == low)[:rest]] += 1
    return slices
