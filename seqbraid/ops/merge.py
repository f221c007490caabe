"""Adding a block's out and LSE to those of the keys seen before, in place.

Letters: T query tokens, n rows of the block, H query heads, D head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

Rows = slice | Tensor
"""Rows of a tensor: a slice where they lie side by side, else indices."""


def merge_rows(out_THD: Tensor, lse_HT: Tensor, rows: Rows, part_nHD: Tensor, part_lse_Hn: Tensor) -> None:
    """Make `out` and `lse` of these rows those of the old and the new keys together."""
    fused = out_THD.is_cuda and out_THD.dtype != torch.float64 and out_THD.is_contiguous()
    kernel = _fused_kernel() if fused else None
    if kernel is not None:
        kernel(out_THD, lse_HT, rows, part_nHD.contiguous(), part_lse_Hn.contiguous())
        return
    before = lse_HT[:, rows]
    after = torch.logaddexp(before, part_lse_Hn)
    # −inf before: these rows had seen no key yet, and their share of the sum is nothing.
    kept = out_THD[rows] * (before - after).exp().T[..., None]
    kept.addcmul_(part_nHD.to(kept.dtype), (part_lse_Hn - after).exp().T[..., None])
    out_THD[rows] = kept.to(out_THD.dtype)
    lse_HT[:, rows] = after


@cache
def _fused_kernel() -> Any:
    """One pass over memory instead of seven; None where Triton is not installed."""
    try:
        from .merge_triton import merge_rows_triton
    except ImportError:
        return None
    return merge_rows_triton
