"""The losses of a step on one rank: the main one and those of multi-token prediction, in one
call of the head.

Letters: T tokens of this rank (of all its tp ranks), K depths, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout.labels import IGNORE
from ..ops.linear_cross_entropy import (
    LossPart,
    LossSums,
    TokenFactors,
    linear_cross_entropy,
    losses_of_parts,
)
from .batch import PackedBatch
from .local_tokens import HeadPart

MTP_SUMS = 4
"""Numbers of each depth in `LocalLoss.sums`: loss, labels, correct tokens, accepted tokens."""


class StepLoss(NamedTuple):
    """What the head gives on this rank."""

    loss: Tensor
    """The sum of all losses, those of multi-token prediction times their factor; differentiable."""
    main: Tensor
    """The sum of the main loss."""
    correct: Tensor
    mtp_K3: Tensor | None = None
    """Of each depth: the sum of its losses, its labels, its correct tokens."""
    best: tuple[Tensor, Sequence[Tensor]] | None = None
    """The best token at each place, of the decoder and of each depth; None with a loss of the user's own."""


def step_loss(
    hidden_XD: Tensor,
    part: HeadPart,
    batch: PackedBatch,
    mtp_factor: float,
    own: Callable[[Tensor], Tensor] | None = None,
) -> StepLoss:
    """Of the decoder's hidden states, and behind them those of each depth; `own` takes the place of cross
    entropy for the first.
    """
    depths, num_tokens = batch.mtp_depth, len(batch.targets)
    if not depths:
        found = _main(hidden_XD, part, batch, own)
        return StepLoss(found.loss, found.loss, found.correct)
    main = None if own is None else _main(hidden_XD[:num_tokens], part, batch, own)
    parts = [LossPart(num_tokens, mtp_factor / depths)] * depths
    assert batch.mtp_targets is not None
    targets, weights = [*batch.mtp_targets], [] if batch.mtp_weights is None else [*batch.mtp_weights]
    if main is None:
        parts, targets = [LossPart(num_tokens, 1.0), *parts], [batch.targets, *targets]
        weights = [batch.weights, *weights] if weights and batch.weights is not None else []
    else:
        hidden_XD, weights = hidden_XD[num_tokens:], []  # what weights mean is up to a loss of one's own
    sums = losses_of_parts(
        hidden_XD,
        part.weight,
        torch.cat(targets),
        part.bias,
        TokenFactors(torch.cat(weights) if weights else None, tuple(parts)),
        part.chunk,
        part.kernels,
        part.shard,
    )
    labels = torch.stack([(x != IGNORE).sum() for x in batch.mtp_targets])
    columns = [sums.losses_P[-depths:], labels, sums.correct_P[-depths:]]
    mtp_K3 = torch.stack([x.detach().double() for x in columns], dim=1)
    if main is not None:
        return StepLoss(main.loss + sums.loss, main.loss, main.correct, mtp_K3)
    best_T, *best_KT = sums.best_T.split(num_tokens)
    return StepLoss(sums.loss, sums.losses_P[0], sums.correct_P[0], mtp_K3, (best_T, best_KT))


def _main(
    hidden_TD: Tensor, part: HeadPart, batch: PackedBatch, own: Callable[[Tensor], Tensor] | None
) -> LossSums:
    if own is not None:
        found = own(hidden_TD)
        return LossSums(found, torch.zeros_like(found))
    return linear_cross_entropy(
        hidden_TD,
        part.weight,
        batch.targets,
        part.bias,
        part.chunk,
        kernels=part.kernels,
        shard=part.shard,
        weights_T=batch.weights,
    )
