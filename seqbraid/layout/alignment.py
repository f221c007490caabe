"""The one alignment rule: which lengths get padded, to what, and why."""

from __future__ import annotations

from math import lcm

FP8_TOKENS = 16
"""FP8 matrix products want their token dimension in multiples of this."""


def align(length: int, multiple: int) -> int:
    """Round `length` up to a multiple of `multiple`."""
    return -(-length // multiple) * multiple


def sequence_multiple(ring: int) -> int:
    """What a zigzag-cut sequence is padded to: two equal chunks for every ring rank."""
    return 2 * ring if ring > 1 else 1


def local_tokens(
    needed: int, num_ranks: int, *, multiple_of: int = 1, fp8: bool = False, pad_to: int | None = None
) -> int:
    """The physical tokens of every rank, given that the fullest one needs `needed`.

    `multiple_of` is what the caller's axes ask of a rank's token count (the tensor-parallel size, say); FP8
    rounding is added only when asked for; `pad_to` is the token count of the whole row, for fixed shapes.
    """
    multiple = lcm(multiple_of, FP8_TOKENS) if fp8 else multiple_of
    tokens = align(needed, multiple)
    if pad_to is None:
        return tokens
    unit = multiple * num_ranks
    if pad_to % unit:
        lower, upper = pad_to // unit * unit, align(pad_to, unit)
        raise ValueError(
            (
                f"pad_to={pad_to} cannot be divided equally: {num_ranks} ranks with a multiple of {multiple} "
                f"tokens each need a multiple of {unit}; use {upper}"
            )
            + (f" or {lower}" if lower >= tokens * num_ranks else "")
        )
    if pad_to < tokens * num_ranks:
        raise ValueError(
            f"pad_to={pad_to} is too small: the row needs {tokens * num_ranks} tokens ({tokens} on each of "
            f"{num_ranks} ranks); raise pad_to to at least that, pack fewer samples, or truncate them"
        )
    return pad_to // num_ranks
