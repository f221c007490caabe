"""Change the sampling rate of a sound."""

from __future__ import annotations

from math import ceil, gcd

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

ZERO_CROSSINGS = 32
"""Of the sinc on each side of its middle: how sharp the low-pass is."""

ROLLOFF = 0.95
"""The low-pass's edge as a part of the lower of the two Nyquist frequencies."""

WINDOW = (0.355768, 0.487396, 0.144232, 0.012604)
"""Nuttall's window as a sum of cosines: what leaks beyond the edge is below −90 dB."""

BLOCK = 4096


def resampled_length(num_samples: int, from_rate: int, to_rate: int) -> int:
    """How many samples `resample` makes of this many: those at times before the sound's end."""
    return -(-num_samples * to_rate // from_rate)


def resample(x: NDArray[np.float32], from_rate: int, to_rate: int) -> NDArray[np.float32]:
    """Resample a mono sound with a windowed sinc, as if silence were before and after it.

    The output's n-th sample lies at the input's time n·down/up. Its distance to the input's samples takes
    `up` values only, so the filter is a table of `up` rows.
    """
    if from_rate == to_rate:
        return x
    common = gcd(from_rate, to_rate)
    up, down = to_rate // common, from_rate // common
    # Where the rate falls the low-pass falls with it, and the filter is that much longer.
    cutoff = ROLLOFF * min(1.0, up / down)
    half = ceil(ZERO_CROSSINGS / cutoff)
    offsets = np.arange(-half + 1, half + 1)
    distance = offsets[None, :] - (np.arange(up) / up)[:, None]
    window = sum(weight * np.cos(np.pi * order * distance / half) for order, weight in enumerate(WINDOW))
    table = (cutoff * np.sinc(cutoff * distance) * window).astype(np.float32)
    windows = sliding_window_view(np.pad(x, (half - 1, half + 1)), len(offsets))
    y = np.empty(resampled_length(len(x), from_rate, to_rate), np.float32)
    for start in range(0, len(y), BLOCK):
        ticks = np.arange(start, min(start + BLOCK, len(y))) * down
        # Not a matrix product: its sums would depend on the number of threads.
        y[start : start + BLOCK] = np.einsum("nk,nk->n", windows[ticks // up], table[ticks % up])
    return y
