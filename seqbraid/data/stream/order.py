"""The order in which samples are drawn: a permutation per epoch, epoch after epoch, in one stream."""

from __future__ import annotations

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
            if self.shuffle:
                found.extend(self._permutation(self.epoch(start))[start - first : last - first].tolist())
            else:
                found.extend(range(start - first, last - first))
            start = last
        return found

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._latest is None or self._latest[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._latest = (epoch, rng.permutation(self.num_samples))
        return self._latest[1]
