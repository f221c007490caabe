"""Cut sequences shared out by density, for rows of few long sequences.

Mirrored around its middle, a cut sequence costs a rank L/2 pairs per token (its *density*), however wide the
rank's share is. Whole sequences are placed first, as level as they go; the cut ones then fill each rank up to
the same token count: mixing a dense (long) with a sparse (shorter) one sets the rank's cost as well. We cut
the longest, as few of them as bring the cost within tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .placement import Balance, causal_cost

COST_TOLERANCE = 1.03
"""Accept a placement whose dearest rank costs at most this much more than the mean."""

SLACK = 0.02
"""A rank whose cost is this near to its share of the mean, when it draws on one sequence alone, does so."""


def share_by_density(lengths: Sequence[int], order: list[int], ring: int, ulysses: int) -> Balance:
    """Place the sequences of a row, cutting as few of the longest as will do; `order` is longest first."""
    num_ranks = ring * ulysses
    target = sum(map(causal_cost, lengths)) / num_ranks
    # What cannot stay whole on any rank, by its tokens or by its cost, is cut in every placement.
    room = sum(lengths) // num_ranks
    first = sum(1 for i in order if lengths[i] > room or causal_cost(lengths[i]) > COST_TOLERANCE * target)
    best: tuple[Balance, float] | None = None
    for num_cut in _growing(max(first, 1), len(order)):
        found = _place(lengths, order, num_cut, ring, ulysses)
        if best is None or found[1] < best[1]:
            best = found
        if found[1] <= COST_TOLERANCE:
            break
    assert best is not None
    return best[0]


def _growing(first: int, last: int) -> list[int]:
    """Every count at first, then in growing steps, so that a row of thousands takes a few tries."""
    counts, step = [first], 1
    while counts[-1] < last:
        counts.append(min(last, counts[-1] + step))
        step = max(1, len(counts) // 4)
    return counts


def _place(
    lengths: Sequence[int], order: list[int], num_cut: int, ring: int, ulysses: int
) -> tuple[Balance, float]:
    """Cut the `num_cut` longest, place the others whole, share the cut ones out; and the cost of the dearest
    rank over the mean.
    """
    num_ranks = ring * ulysses
    total = sum(lengths)
    capacity = np.array([total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)])
    cut = order[:num_cut]
    density = sum(causal_cost(lengths[i]) for i in cut) / sum(lengths[i] for i in cut)
    tokens = np.zeros(num_ranks, dtype=np.int64)
    costs = np.zeros(num_ranks)
    whole: list[list[int]] = [[] for _ in range(num_ranks)]
    groups = _Groups(ring, ulysses)
    for i in order[num_cut:]:
        rank = groups.pick(tokens + lengths[i] <= capacity)
        if rank is None:
            cut.append(i)
            continue
        whole[rank].append(i)
        tokens[rank] += lengths[i]
        costs[rank] += causal_cost(lengths[i])
        # A whole sequence takes the place of as many cut tokens: what it saves the rank is what must be
        # level.
        groups.add(rank, saved=lengths[i] * density - causal_cost(lengths[i]), cost=causal_cost(lengths[i]))
    slices = capacity - tokens
    target = sum(map(causal_cost, lengths)) / num_ranks
    shares, shared_cost = _share_out(
        lengths,
        cut,
        needed=slices.reshape(ring, ulysses).sum(1),
        budget=target * ulysses - costs.reshape(ring, ulysses).sum(1),
        slack=SLACK * target * ulysses,
    )
    costs += np.repeat(shared_cost / ulysses, ulysses)
    if ulysses == 1:  # a sequence shared with nobody is whole after all
        for i in [i for i, widths in shares.items() if len(widths) == 1]:
            (rank,) = shares.pop(i)
            whole[rank].append(i)
            slices[rank] -= lengths[i]
    placed = Balance(tuple(tuple(sorted(items)) for items in whole), shares, tuple(int(n) for n in slices))
    return placed, float(costs.max() / target)


class _Groups:
    """Picks the rank for a whole sequence: the ring rank that saved least, and in its group the cheapest
    rank.
    """

    def __init__(self, ring: int, ulysses: int) -> None:
        self.saved = np.zeros(ring)
        self.cost = np.zeros((ring, ulysses))

    def pick(self, fits: np.ndarray) -> int | None:
        fits_RU = fits.reshape(self.cost.shape)
        ring_fits = fits_RU.any(1)
        if not ring_fits.any():
            return None
        ring_rank = int(np.where(ring_fits, self.saved, np.inf).argmin())
        ulysses_rank = int(np.where(fits_RU[ring_rank], self.cost[ring_rank], np.inf).argmin())
        return ring_rank * self.cost.shape[1] + ulysses_rank

    def add(self, rank: int, saved: float, cost: int) -> None:
        ring_rank, ulysses_rank = divmod(rank, self.cost.shape[1])
        self.saved[ring_rank] += saved
        self.cost[ring_rank, ulysses_rank] += cost


def _share_out(
    lengths: Sequence[int], cut: list[int], needed: np.ndarray, budget: np.ndarray, slack: float
) -> tuple[dict[int, dict[int, int]], np.ndarray]:
    """Give ring rank r `needed[r]` tokens of the cut sequences at a cost as near to `budget[r]` as mixing
    allows.

    Each rank draws from the densest and the sparsest sequence left, in the proportion that meets both its
    numbers; the middling ones remain for the ranks after it, and most sequences end up on one or two ranks.
    """
    remaining = {i: lengths[i] for i in sorted(cut, key=lambda i: (-lengths[i], i))}
    shares: dict[int, dict[int, int]] = {i: {} for i in cut}
    costs = np.zeros(len(needed))

    def take(ring_rank: int, i: int, count: int) -> None:
        if count:
            shares[i][ring_rank] = shares[i].get(ring_rank, 0) + count
            remaining[i] -= count
            costs[ring_rank] += count * (lengths[i] + 1) / 2
        if not remaining[i]:
            del remaining[i]

    appetite = [b / n if n else 0.0 for b, n in zip(budget, needed, strict=True)]
    for ring_rank in sorted(range(len(needed)), key=lambda r: (-appetite[r], r)):
        tokens, cost = int(needed[ring_rank]), float(budget[ring_rank])
        alone = [
            i
            for i, left in remaining.items()
            if left >= tokens and abs(tokens * (lengths[i] + 1) / 2 - cost) <= slack
        ]
        if tokens and alone:
            # One sequence will do: the fewer ranks share it, the larger its blocks and the fewer its
            # messages.
            take(ring_rank, min(alone, key=lambda i: (remaining[i], i)), tokens)
            continue
        while tokens > 0:
            dense, sparse = next(iter(remaining)), next(reversed(remaining))
            high, low = (lengths[dense] + 1) / 2, (lengths[sparse] + 1) / 2
            wanted = tokens * (cost / tokens >= high) if high == low else (cost - low * tokens) / (high - low)
            from_dense = min(max(round(wanted), 0), tokens)
            from_sparse = tokens - from_dense
            if dense == sparse:
                from_dense, from_sparse = tokens, 0
            elif from_dense > remaining[dense]:
                from_dense, from_sparse = remaining[dense], 0
            elif from_sparse > remaining[sparse]:
                from_dense, from_sparse = 0, remaining[sparse]
            take(ring_rank, dense, from_dense)
            if from_sparse:
                take(ring_rank, sparse, from_sparse)
            tokens -= from_dense + from_sparse
            cost -= from_dense * high + from_sparse * low
    assert not remaining
    return {i: dict(sorted(widths.items())) for i, widths in shares.items() if widths}, costs
