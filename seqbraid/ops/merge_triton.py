# mypy: ignore-errors
"""The sums of `merge.py` as Triton kernels, which go over the rows once and add in float32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N, LSE_BLOCK_N = 16, 1024
"""Rows of a head that a program has: of a sum, and of its LSE."""


@triton.jit
def _place(index, first, n, BLOCK_N: tl.constexpr, INDEXED: tl.constexpr):
    """Rows of the part, whether there are such, and which of the whole they are."""
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = i < n
    row = tl.load(index + i, mask=inside, other=0) if INDEXED else first + i.to(tl.int64)
    return i.to(tl.int64), inside, row


@triton.jit
def _lses(lse, part_lse, row, i, h, inside, n, num_tokens):
    """Of the keys before and of the new ones, and the larger of the two, or 0 where no key was seen."""
    old = tl.load(lse + h * num_tokens + row, mask=inside, other=float("-inf"))
    new = tl.load(part_lse + h * n + i, mask=inside, other=float("-inf"))
    top = tl.maximum(old, new)
    return old, new, tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _numbers(row, i, h, inside, num_heads, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where a head's numbers of these rows are in the whole and in the part, and whether there are such."""
    d = tl.arange(0, BLOCK_D)[None, :]
    here, there = (row[:, None] * num_heads + h) * D + d, (i[:, None] * num_heads + h) * D + d
    return here, there, inside[:, None] & (d < D)


@triton.jit
def _merge_kernel(
    out, lse, index, part, part_lse, into, first, n, num_tokens, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    # The LSE is not written here: several warps read it, and none waits for the others.
    i, inside, row = _place(index, first, n, BLOCK_N, INDEXED)
    h = tl.program_id(1).to(tl.int64)
    old, new, top = _lses(lse, part_lse, row, i, h, inside, n, num_tokens)
    total = tl.exp(old - top) + tl.exp(new - top)
    keep = tl.where(total > 0, tl.exp(old - top) / total, 0.0)
    add = tl.where(total > 0, tl.exp(new - top) / total, 0.0)
    here, there, real = _numbers(row, i, h, inside, num_heads, D, BLOCK_D)
    a = tl.load(out + here, mask=real, other=0.0).to(tl.float32)
    b = tl.load(part + there, mask=real, other=0.0).to(tl.float32)
    tl.store(into + here, a * keep[:, None] + b * add[:, None], mask=real)


@triton.jit
def _lse_kernel(
    lse, index, part_lse, first, n, num_tokens, BLOCK_N: tl.constexpr, INDEXED: tl.constexpr
):  # fmt: skip
    i, inside, row = _place(index, first, n, BLOCK_N, INDEXED)
    h = tl.program_id(1).to(tl.int64)
    old, new, top = _lses(lse, part_lse, row, i, h, inside, n, num_tokens)
    tl.store(lse + h * num_tokens + row, top + tl.log(tl.exp(old - top) + tl.exp(new - top)), mask=inside)


@triton.jit
def _add_kernel(
    total, index, part, into, first, n, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    i, inside, row = _place(index, first, n, BLOCK_N, INDEXED)
    here, there, real = _numbers(row, i, tl.program_id(1).to(tl.int64), inside, num_heads, D, BLOCK_D)
    a = tl.load(total + here, mask=real, other=0.0).to(tl.float32)
    b = tl.load(part + there, mask=real, other=0.0).to(tl.float32)
    tl.store(into + here, a + b, mask=real)


def merge_rows(
    out_THD: Tensor, lse_HT: Tensor, rows: Any, part_nHD: Tensor, part_lse_Hn: Tensor, into_THD: Tensor
) -> None:
    """As in `merge.py`; all are contiguous, and LSEs float32."""
    assert lse_HT.is_contiguous()
    index, first, grid, sizes = _launch(rows, part_nHD)
    n, num_heads, _ = part_nHD.shape
    with torch.cuda.device(out_THD.device):
        _merge_kernel[grid](
            out_THD, lse_HT, index, part_nHD, part_lse_Hn, into_THD, first, n, len(out_THD), num_heads,
            **sizes,
        )  # fmt: skip
        _lse_kernel[(triton.cdiv(n, LSE_BLOCK_N), num_heads)](
            lse_HT, index, part_lse_Hn, first, n, len(out_THD),
            BLOCK_N=LSE_BLOCK_N, INDEXED=sizes["INDEXED"],
        )  # fmt: skip


def add_rows(total_THD: Tensor, rows: Any, part_nHD: Tensor, into_THD: Tensor) -> None:
    """As in `merge.py`; all are contiguous."""
    index, first, grid, sizes = _launch(rows, part_nHD)
    with torch.cuda.device(total_THD.device):
        _add_kernel[grid](
            total_THD, index, part_nHD, into_THD, first, len(part_nHD), part_nHD.shape[1], **sizes
        )


def _launch(rows: Any, part_nHD: Tensor) -> tuple[Tensor, int, tuple[int, int], dict[str, Any]]:
    n, num_heads, size = part_nHD.shape
    indexed = isinstance(rows, Tensor)
    return (
        rows if indexed else part_nHD,
        0 if indexed else rows.start,
        (triton.cdiv(n, BLOCK_N), num_heads),
        {"D": size, "BLOCK_D": triton.next_power_of_2(size), "BLOCK_N": BLOCK_N, "INDEXED": indexed},
    )
