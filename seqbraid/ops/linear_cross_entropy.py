"""Linear layer and cross entropy in one, over chunks of tokens: no tokens × vocabulary tensor ever exists.

Letters: T tokens, L labelled tokens, C tokens of a chunk, D hidden size, V vocabulary.

The gradients of hidden states and weight are made in the forward pass, while a chunk's probabilities are at
hand, and only scaled in the backward. Tokens without a label are left out of every product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout.labels import IGNORE
from .cross_entropy import VocabularyShard, cross_entropy_rows
from .kernels import DEFAULT, Kernels

CHUNK_BYTES = 64 << 20
"""What the logits of one chunk may take in any case, in float32."""


class LossSums(NamedTuple):
    """Sums over the labelled tokens: the loss, differentiable, and how often the largest logit was right."""

    loss: Tensor
    correct: Tensor


class LossPart(NamedTuple):
    """Tokens that follow each other, and what their losses are multiplied with."""

    num_tokens: int
    factor: float


class LossesOfParts(NamedTuple):
    """What parts of the tokens have for losses."""

    loss: Tensor
    """The sum of all, each times its part's factor; differentiable."""
    losses_P: Tensor
    """The sum of each part, without its factor."""
    correct_P: Tensor
    best_T: Tensor
    """The token with the largest logit, where there is a label; elsewhere −1."""


class TokenFactors(NamedTuple):
    """What losses are multiplied by."""

    weights_T: Tensor | None = None
    """Of each token."""
    parts: tuple[LossPart, ...] | None = None
    """Of each part; where there are any, the best tokens are wanted."""


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None = None,
    chunk_tokens: int | None = None,
    weight_sums: torch.dtype | None = None,
    kernels: Kernels = DEFAULT,
    shard: VocabularyShard | None = None,
    weights_T: Tensor | None = None,
) -> LossSums:
    """Sum of `cross_entropy(hidden @ weight.T + bias, target)` over tokens whose target is not −100.

    The sum is in float32 (float64 for float64 inputs), and so are those over chunks in the weight's gradient,
    unless `weight_sums` is the weight's own type: that takes half the memory, and rounds once a chunk.

    With a `shard`, weight and bias are those of a part of the vocabulary, and hidden states and targets the
    same on all ranks that have a part. The sums are those of the whole vocabulary; the gradient of the hidden
    states is this part's, to be summed over the ranks.

    With weights the loss of each token is multiplied by its own.
    """
    if hidden_TD.ndim != 2 or targets_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            f"hidden must be [T, D] and targets [T]; got {tuple(hidden_TD.shape)} and "
            f"{tuple(targets_T.shape)}"
        )
    if chunk_tokens is None:
        size_V = len(weight_VD) if shard is None else shard.widest
        chunk_tokens = default_chunk(size_V, weight_VD.shape[1])
    loss, _, correct_P, _ = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TD,
        weight_VD,
        bias_V,
        targets_T,
        chunk_tokens,
        weight_sums or sum_dtype(hidden_TD),
        kernels,
        shard,
        TokenFactors(weights_T),
    )
    return LossSums(loss, correct_P[0])


def losses_of_parts(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None,
    factors: TokenFactors,
    chunk_tokens: int | None = None,
    kernels: Kernels = DEFAULT,
    shard: VocabularyShard | None = None,
) -> LossesOfParts:
    """`linear_cross_entropy` of tokens that count differently, with one gradient of the weight for all."""
    assert factors.parts is not None
    if sum(part.num_tokens for part in factors.parts) != len(targets_T):
        raise ValueError(f"the parts {factors.parts} are not {len(targets_T)} tokens")
    if chunk_tokens is None:
        size_V = len(weight_VD) if shard is None else shard.widest
        chunk_tokens = default_chunk(size_V, weight_VD.shape[1])
    sums = sum_dtype(hidden_TD)
    return LossesOfParts(
        *_LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_TD, weight_VD, bias_V, targets_T, chunk_tokens, sums, kernels, shard, factors
        )
    )


def default_chunk(size_V: int, size_D: int) -> int:
    """Tokens of a chunk whose logits take as much memory as the weight.

    A chunk reads the weight and adds to its gradient; in chunks of fewer tokens that takes much of the time.
    """
    return max(16, size_D, CHUNK_BYTES // (size_V * torch.float32.itemsize))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        chunk_tokens: int,
        weight_sums: torch.dtype,
        kernels: Kernels,
        shard: VocabularyShard | None,
        factors: TokenFactors,
    ) -> tuple[Tensor, ...]:
        acc, best, weights_T = sum_dtype(hidden_TD), factors.parts is not None, factors.weights_T
        parts = factors.parts or (LossPart(len(targets_T), 1.0),)
        rows_L = (targets_T != IGNORE).nonzero().squeeze(1)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dhidden_LD = hidden_TD.new_empty(len(rows_L), hidden_TD.shape[1]) if needs_hidden else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=weight_sums) if needs_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=acc) if needs_bias and bias_V is not None else None
        losses_P = hidden_TD.new_zeros(len(parts), dtype=acc)
        correct_P = torch.zeros(len(parts), dtype=torch.int64, device=hidden_TD.device)
        best_T = targets_T.new_full(targets_T.shape if best else (0,), -1)
        for part, begin, end in _chunks(rows_L, parts, chunk_tokens):
            rows_C, factor = rows_L[begin:end], parts[part].factor
            hidden_CD = hidden_TD[rows_C]
            logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
            gradient = needs_hidden or needs_weight or needs_bias
            rows = cross_entropy_rows(logits_CV, targets_T[rows_C], gradient, kernels, shard, best)
            del logits_CV
            weights_C = None if weights_T is None else weights_T[rows_C]
            losses_P[part] += (rows.loss_C if weights_C is None else rows.loss_C * weights_C).sum()
            correct_P[part] += rows.correct_C.sum()
            if best and rows.best_C is not None:
                best_T[rows_C] = rows.best_C
            if rows.dlogits_CV is None:
                continue
            if weights_C is not None:
                rows.dlogits_CV.mul_(weights_C[:, None])
            if dbias_V is not None:
                dbias_V.add_(rows.dlogits_CV.sum(0, dtype=acc), alpha=factor)
            # A part's factor goes into what is as wide as hidden states, never through the logits.
            if dhidden_LD is not None:
                torch.mm(rows.dlogits_CV, weight_VD, out=dhidden_LD[begin:end])
                if factor != 1:
                    dhidden_LD[begin:end] *= factor
            if dweight_VD is not None:
                add_product(dweight_VD, rows.dlogits_CV.T, hidden_CD if factor == 1 else factor * hidden_CD)
        ctx.save_for_backward(rows_L, dhidden_LD, dweight_VD, dbias_V)
        ctx.num_tokens, ctx.weight_dtype = len(hidden_TD), weight_VD.dtype
        loss = sum((part.factor * x for part, x in zip(parts, losses_P, strict=True)), losses_P.new_zeros(()))
        ctx.mark_non_differentiable(losses_P, correct_P, best_T)
        return loss, losses_P, correct_P, best_T

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        rows_L, dhidden_LD, dweight_VD, dbias_V = ctx.saved_tensors
        # Scaled in place: a second copy of hidden and weight would be the largest tensors of the loss.
        dhidden_TD = dhidden_LD if dhidden_LD is None else dhidden_LD.mul_(dloss)
        if dhidden_TD is not None and len(rows_L) != ctx.num_tokens:
            dhidden_TD = dhidden_LD.new_zeros(ctx.num_tokens, dhidden_LD.shape[1])
            dhidden_TD[rows_L] = dhidden_LD
        if dweight_VD is not None:
            dweight_VD = _scaled(dweight_VD, dloss, ctx.weight_dtype)
        if dbias_V is not None:
            dbias_V = _scaled(dbias_V, dloss, ctx.weight_dtype)
        return dhidden_TD, dweight_VD, dbias_V, *[None] * 6


def _chunks(rows_L: Tensor, parts: Sequence[LossPart], chunk_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Number of a part, first and behind last of some of its labelled tokens, counted among all of them."""
    ends = torch.tensor([part.num_tokens for part in parts]).cumsum(0)
    ends_P = [len(rows_L)]
    if len(parts) > 1:
        ends_P = torch.searchsorted(rows_L, ends.to(rows_L.device)).tolist()
    start = 0
    for part, end in enumerate(ends_P):
        for begin in range(start, end, chunk_tokens):
            yield part, begin, min(begin + chunk_tokens, end)
        start = end


def add_product(total_VD: Tensor, a_VC: Tensor, b_CD: Tensor) -> None:
    """total += a @ b, summed in the type of the total."""
    if total_VD.dtype == a_VC.dtype:
        total_VD.addmm_(a_VC, b_CD)
    elif total_VD.is_cuda:  # the product is added as it is summed up, in float32
        torch.addmm(total_VD, a_VC, b_CD, out_dtype=total_VD.dtype, out=total_VD)
    else:
        total_VD += a_VC @ b_CD


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor, in place where the type stays the same, else in one pass."""
    return torch.mul(x, factor, out=x if x.dtype == dtype else torch.empty_like(x, dtype=dtype))


def sum_dtype(x: Tensor) -> torch.dtype:
    """What sums over tokens are formed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
