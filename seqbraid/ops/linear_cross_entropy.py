"""Linear layer and cross entropy in one, over chunks of tokens: no tokens × vocabulary tensor ever exists.

Letters: T tokens, L labelled tokens, C tokens of a chunk, D hidden size, V vocabulary.

The gradients of hidden states and weight are made in the forward pass, while a chunk's probabilities are at
hand, and only scaled in the backward. Tokens without a label are left out of every product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""The target of a token that has none."""

CHUNK_BYTES = 64 << 20
"""What the probabilities of one chunk may take, if that is more than a quarter of the weight's gradient."""


class LossSums(NamedTuple):
    """Sums over the labelled tokens: the loss, differentiable, and how often the largest logit was right."""

    loss: Tensor
    correct: Tensor


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> LossSums:
    """Sum of `cross_entropy(hidden @ weight.T + bias, target)` over tokens whose target is not −100.

    The sum is in float32 (float64 for float64 inputs).
    """
    if hidden_TD.ndim != 2 or targets_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            f"hidden must be [T, D] and targets [T]; got {tuple(hidden_TD.shape)} and "
            f"{tuple(targets_T.shape)}"
        )
    if chunk_tokens is None:
        # A chunk reads the weight and adds to its gradient. In chunks of few tokens that takes most of the
        # time.
        size_V, size_D = weight_VD.shape
        chunk_tokens = max(16, size_D // 4, CHUNK_BYTES // (size_V * _sum_dtype(hidden_TD).itemsize))
    loss, correct = _LinearCrossEntropy.apply(hidden_TD, weight_VD, bias_V, targets_T, chunk_tokens)  # type: ignore[no-untyped-call]
    return LossSums(loss, correct)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        acc = _sum_dtype(hidden_TD)
        rows_L = (targets_T != IGNORE).nonzero().squeeze(1)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dhidden_LD = hidden_TD.new_empty(len(rows_L), hidden_TD.shape[1]) if needs_hidden else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=acc) if needs_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=acc) if needs_bias and bias_V is not None else None
        loss = hidden_TD.new_zeros((), dtype=acc)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_TD.device)
        for begin in range(0, len(rows_L), chunk_tokens):
            rows_C = rows_L[begin : begin + chunk_tokens]
            hidden_CD, targets_C1 = hidden_TD[rows_C], targets_T[rows_C, None]
            # One buffer of [C, V] turns from logits to probabilities to the logits' gradient in place.
            buffer_CV = F.linear(hidden_CD, weight_VD, bias_V).to(acc)
            top_C, best_C = buffer_CV.max(1)
            correct += (best_C == targets_C1[:, 0]).sum()
            buffer_CV -= top_C[:, None]
            picked_C = buffer_CV.gather(1, targets_C1)[:, 0]
            total_C1 = buffer_CV.exp_().sum(1, keepdim=True)
            loss += (total_C1.log()[:, 0] - picked_C).sum()
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            buffer_CV /= total_C1
            buffer_CV.scatter_add_(1, targets_C1, buffer_CV.new_full(targets_C1.shape, -1.0))
            if dbias_V is not None:
                dbias_V += buffer_CV.sum(0)
            dlogits_CV = buffer_CV.to(hidden_TD.dtype)
            if dhidden_LD is not None:
                torch.mm(dlogits_CV, weight_VD, out=dhidden_LD[begin : begin + len(rows_C)])
            if dweight_VD is not None:
                if dweight_VD.dtype == dlogits_CV.dtype:
                    dweight_VD.addmm_(dlogits_CV.T, hidden_CD)
                else:  # float32 sums of 16-bit products
                    dweight_VD += dlogits_CV.T @ hidden_CD
        ctx.save_for_backward(rows_L, dhidden_LD, dweight_VD, dbias_V)
        ctx.num_tokens, ctx.weight_dtype = len(hidden_TD), weight_VD.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        rows_L, dhidden_LD, dweight_VD, dbias_V = ctx.saved_tensors
        # Scaled in place: a second copy of hidden and weight would be the largest tensors of the loss.
        dhidden_TD = dhidden_LD if dhidden_LD is None else dhidden_LD.mul_(dloss)
        if dhidden_TD is not None and len(rows_L) != ctx.num_tokens:
            dhidden_TD = dhidden_LD.new_zeros(ctx.num_tokens, dhidden_LD.shape[1])
            dhidden_TD[rows_L] = dhidden_LD
        if dweight_VD is not None:
            dweight_VD = dweight_VD.mul_(dloss).to(ctx.weight_dtype)
        if dbias_V is not None:
            dbias_V = dbias_V.mul_(dloss).to(ctx.weight_dtype)
        return dhidden_TD, dweight_VD, dbias_V, None, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
