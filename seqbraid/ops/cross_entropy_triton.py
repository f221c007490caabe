# mypy: ignore-errors
"""`cross_entropy.py` as a Triton kernel: a program reads its row from memory, then from the cache, and writes
the gradient over it.
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
    tl.store(losses + row, tl.log(total) - (tl.load(picked + row).to(tl.float32) - top))
    tl.store(bests + row, best)
    if GRADIENT:
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
