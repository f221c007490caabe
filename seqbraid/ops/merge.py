"""Adding what further keys give to the sums of those seen before.

Letters: T query tokens, n rows of the block, H query heads, D head size.

Sums may be read in one place and written to another, of another precision, so that the first of several
reads 16-bit numbers and the last writes them, and only what lies between is wider.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .kernels import DEFAULT, Candidate, Kernels, Op
from .triton_status import TRITON, RowsNeed

RowIndex = slice | Tensor
"""Rows of a tensor: a slice where they lie side by side, else indices."""


def merge_rows(
    out_THD: Tensor,
    lse_HT: Tensor,
    rows: RowIndex,
    part_nHD: Tensor,
    part_lse_Hn: Tensor,
    into_THD: Tensor,
    kernels: Kernels = DEFAULT,
) -> None:
    """Write these rows' out of the old and the new keys together to `into`, which may be `out` itself; the
    LSE changes in place.
    """
    fused = _fused_kernels(out_THD, into_THD, kernels)
    if fused is not None:
        fused.merge_rows(out_THD, lse_HT, rows, part_nHD.contiguous(), part_lse_Hn.contiguous(), into_THD)
        return
    before = lse_HT[:, rows]
    after = torch.logaddexp(before, part_lse_Hn)
    # −inf before: these rows had seen no key yet, and their share of the sum is nothing.
    kept = out_THD[rows] * (before - after).exp().T[..., None]
    kept.addcmul_(part_nHD.to(kept.dtype), (part_lse_Hn - after).exp().T[..., None])
    into_THD[rows] = kept.to(into_THD.dtype)
    lse_HT[:, rows] = after


def add_rows(
    total_THD: Tensor, rows: RowIndex, part_nHD: Tensor, into_THD: Tensor, kernels: Kernels = DEFAULT
) -> None:
    """Write the sum of these rows and a part to `into`, which may be `total` itself."""
    fused = _fused_kernels(total_THD, into_THD, kernels)
    if fused is not None:
        fused.add_rows(total_THD, rows, part_nHD.contiguous(), into_THD)
        return
    wide = torch.promote_types(torch.promote_types(total_THD.dtype, into_THD.dtype), torch.float32)
    into_THD[rows] = (total_THD[rows].to(wide) + part_nHD.to(wide)).to(into_THD.dtype)


MERGE = Op("merge", (TRITON, Candidate("torch")))


def _fused_kernels(x: Tensor, into: Tensor, kernels: Kernels) -> ModuleType | None:
    fits = x.is_cuda and x.is_contiguous() and into.is_contiguous()
    if not fits or kernels.choose(MERGE, RowsNeed(x.device, x.dtype)) != TRITON.name:
        return None
    from . import merge_triton

    return merge_triton
