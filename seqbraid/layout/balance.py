"""Which sequences of a row stay whole and which are cut, to balance tokens and time over the ranks.

Cut mirrored around its middle, a sequence of length L costs a rank L/2 pairs per token it holds, however wide
the rank's share is. So only the sequences that are too expensive or too long for one rank are cut, over as
few ranks as can hold them; the others go whole, longest first, to the rank with the least work. What does not
fit in the end is cut to fill the ranks. Then ranks trade until they are balanced (`trade.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from .placement import ROUND, Balance, Placement, causal_cost
from .trade import trade

TOLERANCE = 1.01
"""Accept a placement that cuts nothing, and pads instead, up to this much over the mean of tokens."""

COST_TOLERANCE = 1.03
"""… and up to this much over the mean of attention cost."""

SLACK = 0.0025
"""Where sequences are cut, ranks may be filled this much over the mean: no crumbs are cut off, and there is
something to trade with."""

SHARES = (0.95, 0.75, 0.6, 0.5, 0.4, 0.25)
"""Tried in turn: the largest part of a rank's mean cost that one sequence may have on it."""

TRADING = 4
"""How many of these are made level by trading before the best is chosen."""


def balance(lengths: Sequence[int], ring: int, ulysses: int) -> Balance:
    """Place the sequences of a row on `ring × ulysses` ranks."""
    if ring * ulysses == 1:
        return Balance((tuple(range(len(lengths))),), {}, (0,))
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    uncut = _uncut(lengths, order, ring * ulysses)
    if uncut is not None:
        return uncut
    tried = sorted((_place(lengths, order, ring, ulysses, share) for share in SHARES), key=Placement.time)
    return min(map(trade, tried[:TRADING]), key=Placement.time).finished()


def _uncut(lengths: Sequence[int], order: list[int], num_ranks: int) -> Balance | None:
    """All sequences whole, if that levels tokens and cost: nothing would be sent at all."""
    mean_tokens = sum(lengths) / num_ranks
    if lengths[order[0]] > TOLERANCE * mean_tokens:
        return None
    whole: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0, rank) for rank in range(num_ranks)]
    for i in order:
        tokens, rank = heappop(heap)
        whole[rank].append(i)
        heappush(heap, (tokens + lengths[i], rank))
    costs = [sum(causal_cost(lengths[i]) for i in items) for items in whole]
    ratio = max(costs) * num_ranks / sum(costs)
    if max(tokens for tokens, _ in heap) > TOLERANCE * mean_tokens or ratio > COST_TOLERANCE:
        return None
    return Balance(tuple(tuple(sorted(items)) for items in whole), {}, (0,) * num_ranks)


def _place(lengths: Sequence[int], order: list[int], ring: int, ulysses: int, share: float) -> Placement:
    """Cut what costs more than a `share` of the mean, keep the others whole, fill up with what is left."""
    num_ranks = ring * ulysses
    capacity = -(-sum(lengths) // num_ranks)
    placement = Placement(lengths, ring, ulysses, capacity + int(SLACK * capacity))
    limit = share * sum(map(causal_cost, lengths)) / num_ranks
    left = []
    for i in order:
        if lengths[i] > placement.capacity or causal_cost(lengths[i]) > limit:
            parts = max(causal_cost(lengths[i]) / limit, lengths[i] / placement.capacity) / ulysses
            widths = _widths(placement, i, min(int(np.ceil(parts)), ring))
            if widths is not None:
                placement.share(i, widths)
                continue
        elif (fits_RU := placement.places_for(i)).any():
            placement.keep(i, int(np.where(fits_RU, placement.load_RU, np.inf).argmin()))
            continue
        left.append(i)
    for i in left:
        placement.share(i, _filling(placement, i))
    if ulysses == 1:  # a sequence shared with nobody is whole after all
        for i, widths in [(i, widths) for i, widths in placement.shares.items() if len(widths) == 1]:
            placement.share(i, placement.shares[i], times=-1)
            placement.keep(i, *widths)
    return placement


def _widths(placement: Placement, sequence: int, parts: int) -> dict[int, int] | None:
    """Near-equal parts of a sequence on the ring ranks that have least to do, as few as have room; cut at
    multiples of ROUND if there is room for that anywhere.
    """
    length, room_R = placement.lengths[sequence], placement.room_R
    by_load = placement.load_R.argsort(kind="stable")
    counts = range(min(parts, length), min(len(room_R), length) + 1)
    for widths in [*(_round_parts(length, n) for n in counts), *(_equal_parts(length, n) for n in counts)]:
        ranks = [int(r) for r in by_load if room_R[r] >= max(widths)][: len(widths)]
        if len(ranks) == len(widths):
            return dict(zip(sorted(ranks), widths, strict=True))
    return None


def _equal_parts(length: int, parts: int) -> list[int]:
    return [(length + part) // parts for part in range(parts)]


def _round_parts(length: int, parts: int) -> list[int]:
    """All but the outermost of multiples of ROUND, if that leaves them near equal."""
    if length < 4 * ROUND * parts or parts == 1:
        return _equal_parts(length, parts)
    units = length // ROUND
    rounded = [(units + part) // parts * ROUND for part in range(parts)]
    return [rounded[0] + length % ROUND, *rounded[1:]]


def _filling(placement: Placement, sequence: int) -> dict[int, int]:
    """Parts of a sequence where there is room, in one place if there is."""
    widths: dict[int, int] = {}
    needed, room_R = placement.lengths[sequence], placement.room_R
    while needed:
        fits_R = room_R >= needed
        places = np.where(fits_R, -placement.load_R, -np.inf) if fits_R.any() else room_R
        ring_rank = int(places.argmax())
        width = min(int(room_R[ring_rank]), needed)
        widths[ring_rank] = width
        room_R[ring_rank] -= width
        needed -= width
    return widths
