"""The result of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor


class LocalLoss(NamedTuple):
    """One rank's part of the loss of a batch; a tuple, so that FSDP finds the loss in it."""

    loss: Tensor
    """This rank's share of the step's loss."""
    sums: Tensor
    """`[3 + 4·K]` in float64, of this rank: the sum of the losses, correct tokens, the routers' loss; of each
    depth of multi-token prediction the sum of its losses, its labels, its correct and its accepted tokens.
    """
    expert_counts: Tensor | None = None
    """What `ExpertLoad` has, of this rank: `[N, E + 1]`, what left the rank in the last column."""


@dataclass(frozen=True)
class ExpertLoad:
    """Where the tokens of a step went, in each of N layers with experts: on all ranks, and the same on each.

    A token counts as often as it has experts.
    """

    picks_NE: Tensor
    """How often tokens went to each expert."""
    left_N: Tensor
    """How often to another rank's."""

    def summary(self) -> dict[str, float]:
        """What to log: how many times its fair share the busiest expert of any layer got, the share of
        experts that got nothing, and the share of picks that went to another rank. A router that collapses
        is seen in the first two.
        """
        total_N = self.picks_NE.sum(1).clamp(min=1)
        most = (self.picks_NE.amax(1) / total_N).max() * self.picks_NE.shape[1]
        unused = (self.picks_NE == 0).double().mean()
        left = self.left_N.sum() / total_N.sum()
        names = ("expert_load_max", "experts_unused", "expert_tokens_sent")
        return dict(zip(names, torch.stack([most, unused, left]).tolist(), strict=True))


@dataclass(frozen=True)
class MtpReport:
    """What each of K depths of multi-token prediction gave in a step: on all ranks, and the same on each."""

    loss_sums_K: Tensor
    """Sum of the token losses."""
    label_tokens_K: Tensor
    """Tokens that were predicted: fewer with each depth, at the end of every sample."""
    correct_tokens_K: Tensor
    """Of these, how often the largest logit was the target."""
    accepted_tokens_K: Tensor
    """Of these, how often it was what the decoder itself finds most likely once it is there; not a number
    with a loss of your own.
    """

    def __add__(self, other: MtpReport) -> MtpReport:
        """Of two steps together."""
        return MtpReport(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def summary(self) -> dict[str, float]:
        """What to log of each depth: the plain mean of its loss, its labels, and the share of its tokens that
        an engine drafting with it would keep.
        """
        labels_K = self.label_tokens_K.clamp(min=1)
        rows = torch.stack(
            [self.loss_sums_K / labels_K, self.label_tokens_K, self.accepted_tokens_K / labels_K], dim=1
        ).tolist()
        found: dict[str, float] = {}
        for depth, (loss, labels, acceptance) in enumerate(rows, start=1):
            found |= {f"mtp_loss_{depth}": loss, f"mtp_label_tokens_{depth}": labels}
            if acceptance == acceptance:
                found[f"mtp_acceptance_{depth}"] = acceptance
        return found


@dataclass(frozen=True)
class StepOutput:
    """The result of one forward pass, or of the forward and backward passes of a whole step."""

    loss: Tensor
    """This rank's share of the loss. From `model(batch)`: call backward on it. From `forward_backward`, which
    has called backward: detached, and a `backward` of yours on it is refused.
    """
    mean_loss: Tensor
    """Mean loss per label token, or per whatever else the sum was divided by: detached, the same on every
    rank. Log it.
    """
    loss_sum: Tensor
    """Sum of the token losses, detached."""
    label_tokens: int
    """The label tokens of the optimizer step, on all ranks: what `loss_sum` was divided by, unless labels
    have weights or another divisor was given.
    """
    correct_tokens: Tensor
    """Number of tokens whose largest logit is the target, on all ranks."""
    aux_loss: Tensor | None = None
    """The routers' load-balancing loss, each row's weighted by its share of `label_tokens`, as `mean_loss`
    is; detached, the same on every rank. None where the model has none switched on.
    """
    mtp_loss: Tensor | None = None
    """The loss of multi-token prediction without its factor: the mean over its depths of their sums, divided
    as `mean_loss` is; detached, the same on every rank. None where there is none.
    """
    mtp: MtpReport | None = field(default=None, repr=False)
    """Each depth's own figures."""
    expert_load: ExpertLoad | None = field(default=None, repr=False)
    """Where tokens went; None where the model has no experts that we know."""
    batch_losses: Tensor | None = field(default=None, repr=False)
    """`[n]`, what each micro-batch adds to `mean_loss`."""
    divisor: float = 1
    """What `loss_sum` was divided by."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """What a loss of the user's own gave beside its sum: sums over all ranks, not divided."""
