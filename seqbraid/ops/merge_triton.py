# mypy: ignore-errors
"""The merge of `merge.py` as one Triton kernel: it reads and writes every number once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_kernel(
    out, lse, index, part, part_lse, first, n, num_tokens, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, INDEXED: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.program_id(1)
    inside = i < n
    row = tl.load(index + i, mask=inside, other=0) if INDEXED else first + i.to(tl.int64)
    old = tl.load(lse + h * num_tokens + row, mask=inside, other=float("-inf"))
    new = tl.load(part_lse + h * n + i, mask=inside, other=float("-inf"))
    top = tl.maximum(old, new)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(old - top) + tl.exp(new - top)
    keep = tl.where(total > 0, tl.exp(old - top) / total, 0.0)
    add = tl.where(total > 0, tl.exp(new - top) / total, 0.0)
    d = tl.arange(0, BLOCK_D)
    both = inside[:, None] & (d < D)[None, :]
    here = out + (row[:, None] * num_heads + h) * D + d[None, :]
    there = part + (i.to(tl.int64)[:, None] * num_heads + h) * D + d[None, :]
    a = tl.load(here, mask=both, other=0.0).to(tl.float32)
    b = tl.load(there, mask=both, other=0.0).to(tl.float32)
    tl.store(here, a * keep[:, None] + b * add[:, None], mask=both)
    tl.store(lse + h * num_tokens + row, top + tl.log(total), mask=inside)


def merge_rows_triton(
    out_THD: Tensor, lse_HT: Tensor, rows: Any, part_nHD: Tensor, part_lse_Hn: Tensor
) -> None:
    """`merge_rows` on CUDA; `out` and `lse` are contiguous, `lse` is float32, and so is the sum before it
    is stored."""
    assert out_THD.is_contiguous() and lse_HT.is_contiguous()
    n, num_heads, size = part_nHD.shape
    indexed = isinstance(rows, Tensor)
    block_n = 16
    with torch.cuda.device(out_THD.device):
        _merge_kernel[(triton.cdiv(n, block_n), num_heads)](
            out_THD, lse_HT, rows if indexed else out_THD, part_nHD, part_lse_Hn,
            0 if indexed else rows.start, n, out_THD.shape[0], num_heads,
            D=size, BLOCK_D=triton.next_power_of_2(size), BLOCK_N=block_n, INDEXED=indexed,
        )  # fmt: skip
