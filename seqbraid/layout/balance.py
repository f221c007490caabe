"""Which sequences of a row stay whole and which are cut, so that ranks get equal tokens and take equally
long.

Cut mirrored around its middle, a sequence of length L costs a rank L/2 pairs per token it holds, however wide
the rank's share is. So only the sequences that are too dear or too long for one rank are cut, over as few
ranks as will carry them; the others go whole, longest first, to the rank that has least to do. What fits
nowhere in the end is cut to fill the ranks up. Then ranks trade whole sequences until they are level. Rows of
so few sequences that this does not level them are shared out by density instead (`density.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import combinations
from typing import NamedTuple

import numpy as np

from .density import share_by_density
from .placement import ROUND, Balance, Placement, causal_cost

TOLERANCE = 1.01
"""Accept a placement that cuts nothing, and pads instead, up to this much over the mean of tokens."""

COST_TOLERANCE = 1.03
"""… and up to this much over the mean of attention cost."""

SLACK = 0.0025
"""Where sequences are cut, ranks may be filled this much over the mean, so that no crumbs are cut off."""

SHARES = (0.95, 0.6, 0.4, 0.25)
"""Tried in turn: the largest part of a rank's mean cost that one sequence may have on it."""

TRADES, TRADERS, TRADED, WORTHWHILE = 40, 3, 12, 1e-3
"""How often ranks trade, with how many others the dearest one tries to, how many of its sequences it offers,
and what part of its cost it must save."""


def balance(lengths: Sequence[int], ring: int, ulysses: int) -> Balance:
    """Place the sequences of a row on `ring × ulysses` ranks."""
    if ring * ulysses == 1:
        return Balance((tuple(range(len(lengths))),), {}, (0,))
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    uncut = _uncut(lengths, order, ring * ulysses)
    if uncut is not None:
        return uncut
    tried = [
        _place(lengths, order, ring, ulysses, share, slack) for share in SHARES for slack in (0.0, SLACK)
    ]
    tried.sort(key=Placement.time)
    for placement in tried[:2]:
        _trade(placement)
    best = min(tried[:2], key=Placement.time)
    return best.finished() if best.is_level() else share_by_density(lengths, order, ring, ulysses)


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


def _place(
    lengths: Sequence[int], order: list[int], ring: int, ulysses: int, share: float, slack: float
) -> Placement:
    """Cut what costs more than a `share` of the mean, keep the others whole, fill up with what is left."""
    num_ranks = ring * ulysses
    capacity = -(-sum(lengths) // num_ranks)
    placement = Placement(lengths, ring, ulysses, capacity + int(slack * capacity))
    limit = share * sum(map(causal_cost, lengths)) / num_ranks
    left = []
    for i in order:
        if lengths[i] > placement.capacity or causal_cost(lengths[i]) > limit:
            parts = max(causal_cost(lengths[i]) / limit, lengths[i] / placement.capacity) / ulysses
            widths = _widths(placement, i, max(1, int(np.ceil(parts))))
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
        for i in [i for i, widths in placement.shares.items() if len(widths) == 1]:
            _take_home(placement, i)
    return placement


def _widths(placement: Placement, sequence: int, parts: int) -> dict[int, int] | None:
    """Near-equal parts of a sequence on the ring ranks that have least to do, as few as have room."""
    length, room_R = placement.lengths[sequence], placement.room_R
    by_load = placement.load_R.argsort(kind="stable")
    for count in range(parts, len(room_R) + 1):
        widths = _near_equal(length, count)
        ranks = [int(r) for r in by_load if room_R[r] >= max(widths)][:count]
        if len(ranks) == count:
            return dict(zip(sorted(ranks), widths, strict=True))
    return None


def _near_equal(length: int, parts: int) -> list[int]:
    """Parts that can be cut at multiples of ROUND, all but the outermost, if that leaves them near equal."""
    if length < 4 * ROUND * parts or parts == 1:
        return [(length + part) // parts for part in range(parts)]
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


def _take_home(placement: Placement, sequence: int) -> None:
    (rank,) = placement.shares.pop(sequence)
    length = placement.lengths[sequence]
    placement.shared_R[rank] -= length
    placement.shared_cost_R[rank] -= causal_cost(length)
    placement.keep(sequence, rank)


class _Offers(NamedTuple):
    """Sets of up to two of a rank's whole sequences, with their tokens and costs."""

    sets: list[tuple[int, ...]]
    tokens: np.ndarray
    costs: np.ndarray

    @staticmethod
    def of(placement: Placement, rank: int) -> _Offers:
        lengths = placement.lengths
        items = sorted(placement.whole[rank], key=lambda i: (-lengths[i], i))
        if len(items) > TRADED:  # long and short ones alike
            items = [items[i * len(items) // TRADED] for i in range(TRADED)]
        sets = [offer for count in range(3) for offer in combinations(items, count)]
        tokens = np.array([sum(lengths[i] for i in offer) for offer in sets])
        costs = np.array([sum(causal_cost(lengths[i]) for i in offer) for offer in sets])
        return _Offers(sets, tokens, costs)


class _Trade(NamedTuple):
    """What two ranks would give each other, and what the dearer of them would then cost."""

    cost: float
    other: int
    given: tuple[int, ...]
    taken: tuple[int, ...]


def _trade(placement: Placement) -> None:
    """Let the dearest rank trade up to two whole sequences for up to two of a cheaper one, while it helps."""
    for _ in range(TRADES):
        load = placement.load_RU.ravel()
        rank = int(load.argmax())
        trades = [_best_trade(placement, rank, int(other)) for other in load.argsort(kind="stable")[:TRADERS]]
        best = min(trades)
        if best.cost > (1 - WORTHWHILE) * load[rank]:
            return
        for source, target, items in ((rank, best.other, best.given), (best.other, rank, best.taken)):
            for sequence in items:
                placement.keep(sequence, source, times=-1)
                placement.keep(sequence, target)


def _best_trade(placement: Placement, rank: int, other: int) -> _Trade:
    load, tokens = placement.load_RU.ravel(), placement.tokens_RU.ravel()
    offered, wanted = _Offers.of(placement, rank), _Offers.of(placement, other)
    more_tokens = wanted.tokens[None] - offered.tokens[:, None]
    more_cost = wanted.costs[None] - offered.costs[:, None]
    fits = (tokens[rank] + more_tokens <= placement.capacity) & (
        tokens[other] - more_tokens <= placement.capacity
    )
    ulysses = placement.tokens_RU.shape[1]
    if rank // ulysses != other // ulysses:
        room_R = placement.room_R
        fits &= (more_tokens <= room_R[rank // ulysses]) & (-more_tokens <= room_R[other // ulysses])
    cost = np.where(fits, np.maximum(load[rank] + more_cost, load[other] - more_cost), np.inf)
    give, take = divmod(int(cost.argmin()), len(wanted.sets))
    return _Trade(float(cost[give, take]), other, offered.sets[give], wanted.sets[take])
