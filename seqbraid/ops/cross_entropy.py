"""Cross entropy of rows of logits, whose gradient takes the logits' place.

Letters: C tokens, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class RowLosses(NamedTuple):
    """What rows of logits say of their targets."""

    loss_C: Tensor
    """In float32 (float64 for float64 logits)."""
    correct_C: Tensor
    """Whether the target is the first of the largest logits."""
    dlogits_CV: Tensor | None
    """The gradient of the sum of the losses, in the logits' type and, where a kernel allows, in their place.
    """


def cross_entropy_rows(logits_CV: Tensor, targets_C: Tensor, gradient: bool) -> RowLosses:
    """Loss of each row and, if asked for, its gradient; the logits are gone afterwards."""
    kernels = _fused_kernels(logits_CV)
    if kernels is not None:
        return RowLosses(*kernels.cross_entropy_rows(logits_CV, targets_C, gradient))
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    # One buffer turns from logits to probabilities to the logits' gradient in place.
    buffer_CV, targets_C1 = logits_CV.to(wide), targets_C[:, None]
    top_C, best_C = buffer_CV.max(1)
    buffer_CV -= top_C[:, None]
    picked_C = buffer_CV.gather(1, targets_C1)[:, 0]
    total_C1 = buffer_CV.exp_().sum(1, keepdim=True)
    loss_C, correct_C = total_C1.log()[:, 0] - picked_C, best_C == targets_C
    if not gradient:
        return RowLosses(loss_C, correct_C, None)
    buffer_CV /= total_C1
    buffer_CV.scatter_add_(1, targets_C1, buffer_CV.new_full(targets_C1.shape, -1.0))
    return RowLosses(loss_C, correct_C, buffer_CV.to(logits_CV.dtype))


def _fused_kernels(logits: Tensor) -> ModuleType | None:
    """One read and one write of the logits instead of ten passes, on a GPU with Triton."""
    fits = logits.is_cuda and logits.dtype != torch.float64 and logits.is_contiguous()
    return _triton_kernels() if fits else None


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        from . import cross_entropy_triton
    except ImportError:
        return None
    return cross_entropy_triton
