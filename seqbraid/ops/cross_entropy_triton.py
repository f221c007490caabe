# mypy: ignore-errors
"""`cross_entropy.py` as Triton kernels: a program reads its row from memory, then from the cache, and writes
the gradient over it; of rows that are cut over ranks it reads them once, and once more for the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8
"""Columns that a program has at a time, and its warps; the fastest on an H200 (`loss_kernels.py --tune`)."""


@triton.jit
def _rows_kernel(
    logits, targets, picked, losses, bests, num_columns, stride,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    # The target's logit was read beforehand: here another warp may have written the gradient there already.
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * stride
    target = tl.load(targets + row)
    top, total, best = _sums(start_of_row, num_columns, BLOCK)
    tl.store(losses + row, tl.log(total) - (tl.load(picked + row).to(tl.float32) - top))
    tl.store(bests + row, best)
    if GRADIENT:
        _write_gradient(start_of_row, num_columns, target, top, total, BLOCK)


@triton.jit
def _part_kernel(logits, tops, totals, bests, num_columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, total, best = _sums(logits + row * stride, num_columns, BLOCK)
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(bests + row, best)


@triton.jit
def _part_gradient_kernel(logits, targets, tops, totals, num_columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target, top, total = tl.load(targets + row), tl.load(tops + row), tl.load(totals + row)
    _write_gradient(logits + row * stride, num_columns, target, top, total, BLOCK)


@triton.jit
def _sums(start_of_row, num_columns, BLOCK: tl.constexpr):
    """The largest logit, the sum of the exponentials of what the others are below it, and where it is."""
    top, total, best = float("-inf"), 0.0, 0
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        block_top, block_best = tl.max(x, axis=0, return_indices=True)
        best = tl.where(block_top > top, start + block_best, best)
        new_top = tl.maximum(top, block_top)
        # Logits of −inf alone so far: nothing to add, and no difference of infinities.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), axis=0)
        top = new_top
    return top, total, best


@triton.jit
def _write_gradient(start_of_row, num_columns, target, top, total, BLOCK: tl.constexpr):
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - top) / total
        tl.store(start_of_row + column, tl.where(column == target, p - 1.0, p), mask=column < num_columns)


def cross_entropy_rows(
    logits_CV: Tensor, targets_C: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss of each row, the first of its largest columns, and the gradient, in place."""
    num_rows, num_columns = logits_CV.shape
    picked_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
    losses_C = torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device)
    best_C = torch.empty(num_rows, dtype=torch.int64, device=logits_CV.device)
    if num_rows:
        with torch.cuda.device(logits_CV.device):
            _rows_kernel[(num_rows,)](
                logits_CV, targets_C, picked_C, losses_C, best_C, num_columns, logits_CV.stride(0),
                BLOCK=BLOCK, GRADIENT=gradient, num_warps=WARPS,
            )  # fmt: skip
    return losses_C, best_C, logits_CV if gradient else None


def part_sums(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the columns of each row that are here: the largest, the sum of the exponentials of what they are
    below it, and the first that is the largest.
    """
    num_rows, num_columns = logits_CV.shape
    sums_2C = torch.empty(2, num_rows, dtype=torch.float32, device=logits_CV.device)
    best_C = torch.empty(num_rows, dtype=torch.int64, device=logits_CV.device)
    if num_rows:
        with torch.cuda.device(logits_CV.device):
            _part_kernel[(num_rows,)](
                logits_CV, *sums_2C, best_C, num_columns, logits_CV.stride(0), BLOCK=BLOCK, num_warps=WARPS
            )
    return *sums_2C.unbind(), best_C


def part_gradient(logits_CV: Tensor, columns_C: Tensor, top_C: Tensor, total_C: Tensor) -> Tensor:
    """The gradient of the loss of whole rows, in place of those columns that are here; `columns_C` is below 0
    where the target is elsewhere.
    """
    num_rows, num_columns = logits_CV.shape
    if num_rows:
        with torch.cuda.device(logits_CV.device):
            _part_gradient_kernel[(num_rows,)](
                logits_CV, columns_C, top_C, total_C, num_columns, logits_CV.stride(0),
                BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return logits_CV
