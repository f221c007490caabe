"""Cross entropy of rows of logits, whose gradient takes the logits' place.

Letters: C tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
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
    best_C: Tensor | None = None
    """The first token of the largest logits; of a shard only where it is asked for."""


class VocabularyShard(NamedTuple):
    """The part of a vocabulary whose logits are here, and how numbers of all parts are brought together."""

    start: int
    """The first token of the part."""
    widest: int
    """Tokens of the largest part: what all ranks choose the length of a chunk by."""
    maximum: Callable[[Tensor], Tensor]
    """The largest of each number over all parts."""
    total: Callable[[Tensor], Tensor]
    """The sum of each number over all parts."""


def cross_entropy_rows(
    logits_CV: Tensor,
    targets_C: Tensor,
    gradient: bool,
    kernels: Kernels = DEFAULT,
    shard: VocabularyShard | None = None,
    best: bool = False,
) -> RowLosses:
    """Loss of each row and, if asked for, its gradient; the logits are gone afterwards.

    With a `shard` the rows are that part of rows that all ranks know the targets of; the losses are those of
    the whole rows. Which token is the `best` takes one exchange more there.
    """
    fused = fused_kernels(logits_CV, kernels)
    if shard is not None:
        return _rows_of_shard(logits_CV, targets_C, gradient, shard, best, fused)
    if fused is not None:
        loss_C, best_C, dlogits_CV = fused.cross_entropy_rows(logits_CV, targets_C, gradient)
        return RowLosses(loss_C, best_C == targets_C, dlogits_CV, best_C)
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    # One buffer turns from logits to probabilities to the logits' gradient in place.
    buffer_CV, targets_C1 = logits_CV.to(wide), targets_C[:, None]
    top_C, best_C = buffer_CV.max(1)
    buffer_CV -= top_C[:, None]
    picked_C = buffer_CV.gather(1, targets_C1)[:, 0]
    total_C1 = buffer_CV.exp_().sum(1, keepdim=True)
    loss_C, correct_C = total_C1.log()[:, 0] - picked_C, best_C == targets_C
    if not gradient:
        return RowLosses(loss_C, correct_C, None, best_C)
    buffer_CV /= total_C1
    buffer_CV.scatter_add_(1, targets_C1, buffer_CV.new_full(targets_C1.shape, -1.0))
    return RowLosses(loss_C, correct_C, buffer_CV.to(logits_CV.dtype), best_C)


def _rows_of_shard(
    logits_CV: Tensor,
    targets_C: Tensor,
    gradient: bool,
    shard: VocabularyShard,
    best: bool,
    fused: ModuleType | None,
) -> RowLosses:
    """Of rows whose other columns are elsewhere: one maximum and one sum over all parts."""
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    columns_C, size_V = targets_C - shard.start, logits_CV.shape[1]
    is_here_C = (columns_C >= 0) & (columns_C < size_V)
    columns_C1 = columns_C.clamp(0, size_V - 1)[:, None]
    picked_C = logits_CV.gather(1, columns_C1)[:, 0].to(wide)  # before anything is written over it
    if fused is None:
        buffer_CV = logits_CV.to(wide)
        own_top_C, best_C = buffer_CV.max(1)
    else:
        own_top_C, own_total_C, best_C = fused.part_sums(logits_CV)
    top_C = shard.maximum(own_top_C)
    picked_C = (picked_C - top_C).masked_fill_(~is_here_C, 0)
    # The target is the first of the largest if it is one of them, and none is before it.
    is_top_C = is_here_C & (picked_C == 0)
    is_before_C = (own_top_C == top_C) & (best_C + shard.start < targets_C)
    right_C = is_top_C.to(wide) - is_before_C.to(wide)
    if fused is None:
        buffer_CV -= top_C[:, None]
        own_total_C = buffer_CV.exp_().sum(1)
    else:
        own_total_C = own_total_C * (own_top_C - top_C).exp()
    picked_C, total_C, right_C = shard.total(torch.stack([picked_C, own_total_C, right_C])).unbind()
    loss_C, correct_C = total_C.log() - picked_C, right_C == 1
    whole_best_C = None
    if best:  # the first of those that have the largest
        first_C = torch.where(own_top_C == top_C, best_C + shard.start, torch.iinfo(best_C.dtype).max)
        whole_best_C = -shard.maximum(-first_C)
    if not gradient:
        return RowLosses(loss_C, correct_C, None, whole_best_C)
    if fused is not None:
        here_C = torch.where(is_here_C, columns_C, -1)
        dlogits_CV = fused.part_gradient(logits_CV, here_C, top_C, total_C.contiguous())
        return RowLosses(loss_C, correct_C, dlogits_CV, whole_best_C)
    buffer_CV /= total_C[:, None]
    buffer_CV.scatter_add_(1, columns_C1, is_here_C.to(wide).neg_()[:, None])
    return RowLosses(loss_C, correct_C, buffer_CV.to(logits_CV.dtype), whole_best_C)


LOSS = Op("loss", (TRITON, Candidate("torch")))


def fused_kernels(logits: Tensor, kernels: Kernels, whole: bool = True) -> ModuleType | None:
    """One read and one write of the logits instead of ten passes."""
    fits = logits.is_cuda and logits.is_contiguous()
    if not fits or kernels.choose(LOSS, RowsNeed(logits.device, logits.dtype, whole)) != TRITON.name:
        return None
    from . import cross_entropy_triton

    return cross_entropy_triton
