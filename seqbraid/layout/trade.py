"""Balancing a placement by trades between ranks: whole sequences, and tokens of cut ones.

Ranks are full of tokens, so the most expensive one gives expensive tokens for as many cheap ones: a long
sequence for shorter ones, or a stretch of a cut sequence for whole short ones. The rank that takes it may
have had no part of that sequence before.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from .placement import CUT_TOKEN, KEY, ROUND, Placement, causal_cost

TRADES, TRADERS, WORTHWHILE = 40, 3, 1e-3
"""How often ranks trade, with how many others at a time the most expensive one tries to, and what part of its
cost it must save."""

TRADED, GIVEN, TAKEN = 12, 2, 3
"""How many of its whole sequences a rank offers, and how many the more and the less expensive one give."""

STRETCHES = tuple(ROUND * count for count in (1, 2, 3, 4, 6, 8))
"""How many tokens of a cut sequence change hands at once."""


class _Offers(NamedTuple):
    """Sets of a rank's whole sequences, with their tokens and costs."""

    sets: list[tuple[int, ...]]
    tokens: np.ndarray
    costs: np.ndarray

    @staticmethod
    def of(placement: Placement, rank: int, at_once: int) -> _Offers:
        lengths = placement.lengths
        items = sorted(placement.whole[rank], key=lambda i: (-lengths[i], i))
        if len(items) > TRADED:  # long and short ones alike
            items = [items[i * len(items) // TRADED] for i in range(TRADED)]
        sets = [offer for count in range(at_once + 1) for offer in combinations(items, count)]
        tokens = np.array([sum(lengths[i] for i in offer) for offer in sets])
        costs = np.array([sum(causal_cost(lengths[i]) for i in offer) for offer in sets], dtype=np.float64)
        return _Offers(sets, tokens, costs)


class _Stretch(NamedTuple):
    """Tokens of a cut sequence that a ring rank gives to another, and what they cost each of the two."""

    sequence: int | None
    tokens: int
    saved: float
    paid: float


NOTHING = _Stretch(None, 0, 0.0, 0.0)


class _Trade(NamedTuple):
    """What two ranks would give each other, and what the more expensive of them would then cost."""

    cost: float
    other: int
    given: tuple[int, ...]
    taken: tuple[int, ...]
    stretch: _Stretch


def trade(placement: Placement) -> Placement:
    """The best placement found while the most expensive rank trades with cheaper ones.

    The cost of a stretch is an estimate, so a trade may make it worse, and later ones better again.
    """
    best = placement
    for _ in range(TRADES):
        rank = int(placement.load_RU.argmax())
        found = _worthwhile_trade(placement, rank)
        if found is None:
            break
        placement = placement.copy()
        for source, target, items in ((rank, found.other, found.given), (found.other, rank, found.taken)):
            for sequence in items:
                placement.keep(sequence, source, times=-1)
                placement.keep(sequence, target)
        _hand_over(placement, found.stretch, rank, found.other)
        if placement.load_RU.max() < best.load_RU.max():
            best = placement
    return best


def _worthwhile_trade(placement: Placement, rank: int) -> _Trade | None:
    """With the cheapest few, or with the next few if they have nothing that helps."""
    load = placement.load_RU.ravel()
    others = [int(other) for other in load.argsort(kind="stable") if other != rank]
    for first in range(0, len(others), TRADERS):
        trades = [_best_trade(placement, rank, other) for other in others[first : first + TRADERS]]
        best = min(trades, key=lambda found: found.cost)
        if best.cost <= (1 - WORTHWHILE) * load[rank]:
            return best
    return None


def _best_trade(placement: Placement, rank: int, other: int) -> _Trade:
    ulysses = placement.tokens_RU.shape[1]
    source, target = rank // ulysses, other // ulysses
    load, tokens, room_R = placement.load_RU.ravel(), placement.tokens_RU.ravel(), placement.room_R
    peers = np.delete(placement.load_RU[target], other % ulysses).max(initial=0.0)
    offered, wanted = _Offers.of(placement, rank, GIVEN), _Offers.of(placement, other, TAKEN)
    more_tokens = wanted.tokens[None] - offered.tokens[:, None]
    more_cost = wanted.costs[None] - offered.costs[:, None]
    fit_ranks = (tokens[rank] + more_tokens <= placement.capacity) & (
        tokens[other] - more_tokens <= placement.capacity
    )
    best = _Trade(np.inf, other, (), (), NOTHING)
    for stretch in [NOTHING, *_stretches(placement, source, target)]:
        fits = fit_ranks
        if source != target:
            more = more_tokens - stretch.tokens
            fits = fits & (more <= room_R[source]) & (-more <= room_R[target])
        ours = load[rank] + more_cost - stretch.saved / ulysses
        theirs = np.maximum(load[other] - more_cost, peers) + stretch.paid / ulysses
        cost = np.where(fits, np.maximum(ours, theirs), np.inf)
        place = int(cost.argmin())
        if cost.flat[place] < best.cost:
            give, take = divmod(place, len(wanted.sets))
            best = _Trade(float(cost.flat[place]), other, offered.sets[give], wanted.sets[take], stretch)
    return best


def _stretches(placement: Placement, source: int, target: int) -> list[_Stretch]:
    """What a ring rank can give another of the cut sequences: not so much that a crumb is left, and not all
    if that would leave the other rank alone with the sequence.
    """
    found: list[_Stretch] = []
    for sequence, widths in placement.shares.items():
        length = placement.lengths[sequence]
        if source == target or source not in widths or len(widths) == 1:
            continue
        # The innermost part, which a rank gets that had none, sees half of the sequence's keys.
        joining = 0.0 if target in widths else KEY * length / 2 + placement.piece_cost
        for tokens in STRETCHES:
            left = widths[source] - tokens
            if left >= ROUND or (left == 0 and len({*widths, target}) > 2):
                cost = tokens * ((length + 1) / 2 + CUT_TOKEN)
                found.append(_Stretch(sequence, tokens, cost, cost + joining))
    return found


def _hand_over(placement: Placement, stretch: _Stretch, rank: int, other: int) -> None:
    if stretch.sequence is None:
        return
    ulysses = placement.tokens_RU.shape[1]
    widths = dict(placement.shares[stretch.sequence])
    placement.share(stretch.sequence, widths, times=-1)
    widths[rank // ulysses] -= stretch.tokens
    widths[other // ulysses] = widths.get(other // ulysses, 0) + stretch.tokens
    placement.share(stretch.sequence, {r: width for r, width in widths.items() if width})
