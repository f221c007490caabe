"""What a step gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class LocalLoss(NamedTuple):
    """What one rank computes of a batch; a tuple, in which FSDP finds the loss."""

    loss: Tensor
    """This rank's share of the step's loss."""
    sums: Tensor
    """`[3]` in float64, of this rank: the sum of the losses, correct tokens, the routers' loss."""


@dataclass(frozen=True)
class StepOutput:
    """What one forward pass gives, or the forward and backward passes of a whole step."""

    loss: Tensor
    """This rank's share of the loss. From `model(batch)`: call backward on it. From `forward_backward`, which
    has done so: detached.
    """
    mean_loss: Tensor
    """Mean loss per label token, detached, the same on every rank: log it."""
    loss_sum: Tensor
    """Sum of the token losses, detached."""
    label_tokens: int
    """The label tokens of the optimizer step, on all ranks: what `loss_sum` was divided by, unless another
    divisor was given.
    """
    correct_tokens: Tensor
    """How often the largest logit was the target."""
    aux_loss: Tensor | None = None
    """The routers' load-balancing loss, each row's weighted by its share of `label_tokens`, as `mean_loss`
    is; detached, the same on every rank. None where the model has none switched on.
    """
    mtp_loss: Tensor | None = None
    """The loss of multi-token prediction; None where there is none."""
    batch_losses: Tensor | None = field(default=None, repr=False)
    """`[n]`, what each micro-batch adds to `mean_loss`."""
