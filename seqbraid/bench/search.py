"""The largest length that fits, found with few trials of something that grows with the length."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

Peak = Callable[[int], float]
"""What a length takes; infinite where it could not be run."""

EDGE = 0.05
"""How close to an end of the bracket a guess may be, as a share of the bracket."""


def longest(peak: Peak, limit: float, start: int, most: int, step: int) -> int | None:
    """The largest multiple of `step` up to `most` whose peak is at most `limit`, to a hundredth of itself;
    None where not even one `step` fits.

    Memory is nearly linear in the length, so the next guess is where a line through what was seen meets the
    limit; it stays inside the bracket, so that what is not linear costs trials, not the result.

    >>> longest(lambda tokens: 100 + 3 * tokens, limit=1000, start=64, most=1024, step=4)
    300
    >>> longest(lambda tokens: inf if tokens > 300 else 0, limit=1000, start=64, most=4096, step=4)
    300
    >>> longest(lambda tokens: 2000, limit=1000, start=64, most=4096, step=4) is None
    True
    """
    most = _down(most, step)
    low, high = 0, most + step
    seen: list[tuple[int, float]] = []
    guess = _down(min(max(start, step), most), step)
    while True:
        seen.append((guess, peak(guess)))
        if seen[-1][1] <= limit:
            low = guess
        else:
            high = guess
        if high - low <= max(step, _down(low // 100, step)):
            return low or None
        guess = _guess(seen, limit, low, high, step)


def _guess(seen: list[tuple[int, float]], limit: float, low: int, high: int, step: int) -> int:
    """Where the line through the two nearest that were measured meets the limit; without a line twice the
    longest, or the middle, as also where two guesses in a row were on one side of the limit.
    """
    found: float = (low + high) / 2
    measured = sorted((tokens, taken) for tokens, taken in seen if taken < inf)
    one_sided = len(seen) > 2 and (seen[-1][1] <= limit) == (seen[-2][1] <= limit)
    if len(measured) > 1 and not one_sided:
        above = next((i for i, (_, taken) in enumerate(measured) if taken > limit), len(measured) - 1)
        (short, less), (long, more) = measured[max(0, above - 1)], measured[max(1, above)]
        found = short + (limit - less) * (long - short) / (more - less) if more > less else found
    elif len(seen) == 1 and low:
        found = 2 * low
    edge = EDGE * (high - low)
    found = min(max(found, low + edge), high - edge)
    return min(max(_down(int(found), step), low + step), high - step)


def _down(tokens: int, step: int) -> int:
    return tokens // step * step
