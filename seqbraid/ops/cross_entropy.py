"""Cross entropy of rows of logits, whose gradient takes the logits' place.

Letters: C tokens, V vocabulary.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import DEFAULT, Candidate, Kernels, Op
from .triton_status import TRITON, RowsNeed


class RowLosses(NamedTuple):
    """What rows of logits say of their targets."""

    loss_C: Tensor
    """In float32 (float64 for float64 logits)."""
    correct_C: Tensor
    """Whether the target is the first of the largest logits."""
    dlogits_CV: Tensor | None
    """The gradient of the sum of the losses, in the logits' type and, where a kernel allows, in their place.
    """


def cross_entropy_rows(
    logits_CV: Tensor, targets_C: Tensor, gradient: bool, kernels: Kernels = DEFAULT
) -> RowLosses:
    """Loss of each row and, if asked for, its gradient; the logits are gone afterwards."""
    fused = _fused_kernels(logits_CV, kernels)
    if fused is not None:
        return RowLosses(*fused.cross_entropy_rows(logits_CV, targets_C, gradient))
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


LOSS = Op("loss", (TRITON, Candidate("torch")))


def _fused_kernels(logits: Tensor, kernels: Kernels) -> ModuleType | None:
    """One read and one write of the logits instead of ten passes."""
    fits = logits.is_cuda and logits.is_contiguous()
    if not fits or kernels.choose(LOSS, RowsNeed(logits.device, logits.dtype)) != TRITON.name:
        return None
    from . import cross_entropy_triton

    return cross_entropy_triton
