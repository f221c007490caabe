"""The order in which samples are drawn, epoch after epoch, in one stream: a permutation per epoch, or a mix
of several sources by weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SampleOrder:
    """Which sample stands at which position of the stream; a function of the seed, the same on every rank.

    >>> order = SampleOrder(3, shuffle=False, epochs=2)
    >>> order.indices(1, 5), order.epoch(4), order.total
    ([1, 2, 0, 1], 1, 6)
    """

    def __init__(self, num_samples: int, seed: int = 0, shuffle: bool = True, epochs: int | None = None):
        if num_samples < 1:
            raise ValueError("the source is empty; it must have at least one sample")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs={epochs} must be at least 1, or None for an endless stream")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.total = None if epochs is None else epochs * num_samples
        """Positions of the stream; None: endless."""
        self._latest: tuple[int, NDArray[np.int64]] | None = None  # the stream is read forwards: one will do

    def epoch(self, position: int) -> int:
        """The epoch that a position belongs to, from 0."""
        return position // self.num_samples

    def indices(self, start: int, stop: int) -> list[int]:
        """The samples at the positions from `start` up to `stop`, or to the end of the stream."""
        if self.total is not None:
            stop = min(stop, self.total)
        found: list[int] = []
        while start < stop:
            first = self.epoch(start) * self.num_samples
            last = min(stop, first + self.num_samples)
            found.extend(self._within(self.epoch(start), start - first, last - first))
            start = last
        return found

    def _within(self, epoch: int, start: int, stop: int) -> list[int]:
        """The samples at some places of an epoch."""
        return self._permutation(epoch)[start:stop].tolist() if self.shuffle else list(range(start, stop))

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._latest is None or self._latest[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._latest = (epoch, rng.permutation(self.num_samples))
        return self._latest[1]


class MixedOrder(SampleOrder):
    """Draws from several sources by weights, however many samples they have.

    An epoch has as many samples as all sources together, of which each source gives its share, spread evenly.
    A source is drawn through in permutations of its own, one after the other and across epochs, so that none
    of its samples comes again before all others of it came.

    >>> order = MixedOrder([2, 6], [1, 1], shuffle=False)
    >>> order.indices(0, 8)
    [0, 2, 1, 3, 0, 4, 1, 5]
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        super().__init__(sum(sizes), seed, shuffle, epochs)
        self.sizes = list(sizes)
        self.shares = shares(weights, self.num_samples)
        """Samples of each source in an epoch."""

    def _within(self, epoch: int, start: int, stop: int) -> list[int]:
        if self._latest is None or self._latest[0] != epoch:
            self._latest = (epoch, self._mixed(epoch))
        return self._latest[1][start:stop].tolist()

    def _mixed(self, epoch: int) -> NDArray[np.int64]:
        places, samples = [], []
        first = 0
        for number, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True)):
            rng = np.random.default_rng((self.seed, epoch, number))
            # One in each of as many equal parts of the epoch: near its weight in any stretch of the stream.
            within = rng.random(share) if self.shuffle else np.full(share, 0.5)
            places.append((np.arange(share) + within) / share)
            samples.append(first + self._drawn(number, size, epoch * share, share))
            first += size
        return np.concatenate(samples)[np.argsort(np.concatenate(places), kind="stable")]

    def _drawn(self, number: int, size: int, start: int, count: int) -> NDArray[np.int64]:
        """What a source gives from its `start`-th draw on."""
        found = []
        while count:
            times, place = divmod(start, size)
            rng = np.random.default_rng((self.seed, times, number, 1))
            samples = rng.permutation(size) if self.shuffle else np.arange(size)
            found.append(samples[place : place + count])
            start, count = start + len(found[-1]), count - len(found[-1])
        return np.concatenate(found)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """How many of `total` samples each source gives, as near to its weight as whole numbers are.

    >>> shares([0.5, 0.3, 0.2], 101)
    [51, 30, 20]
    """
    exact = np.asarray(weights, np.float64) / np.sum(weights) * total
    found = np.floor(exact).astype(np.int64)
    rest = np.argsort(found - exact, kind="stable")[: total - int(found.sum())]
    found[rest] += 1
    if not found.all():
        place = int(np.argmin(found))
        raise ValueError(
            f"the weight {weights[place]:g} of source {place} gives it no sample of an epoch, which has "
            f"{total}; raise it, or leave the source out"
        )
    return [int(count) for count in found]
