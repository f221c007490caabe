"""Explicit boundaries of packed segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

Boundaries = Sequence[int] | Tensor


def as_boundaries(cu_seqlens: Boundaries, num_rows: int) -> tuple[int, ...]:
    """The N+1 boundaries of N segments as plain ints, checked against the number of rows they cut."""
    if isinstance(cu_seqlens, Tensor):
        # Reading boundaries back from a device would stall it in every layer; lengths are known on the host.
        if cu_seqlens.device.type != "cpu" or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise ValueError(
                f"cu_seqlens is a {cu_seqlens.dim()}-D {cu_seqlens.dtype} tensor on {cu_seqlens.device}; "
                "pass a sequence of ints or a 1-D integer tensor on the CPU"
            )
        cu_seqlens = cu_seqlens.tolist()
    cu = tuple(int(boundary) for boundary in cu_seqlens)
    if not cu or cu[0] < 0 or cu[-1] > num_rows or any(stop < start for start, stop in pairwise(cu)):
        raise ValueError(
            f"cu_seqlens {list(cu)} does not cut {num_rows} rows; pass N+1 non-decreasing boundaries "
            f"between 0 and {num_rows}"
        )
    return cu
