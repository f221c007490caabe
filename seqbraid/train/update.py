"""What a step does to the weights: the learning rates of its place in the run, and whether it is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ..distributed.gradients import clip_gradients
from .guard import SpikeGuard
from .optimizers.partwise import PartwiseOptimizer
from .schedule import learning_rate
from .step_config import StepConfig


class Updated(NamedTuple):
    """What came of a step's gradient."""

    metrics: dict[str, float]
    skipped: str | None = None
    """Why the update was left out."""


def update(
    optimizer: PartwiseOptimizer,
    guard: SpikeGuard,
    config: StepConfig,
    gradients: Sequence[Tensor],
    norm: float,
    progress: tuple[float, float],
) -> Updated:
    """Take the step, or leave it out; all ranks together, with a norm that they agree on.

    Args:
        optimizer: of the run.
        guard: knows the norms of the steps before.
        config: learning rates, and the largest norm that is allowed.
        gradients: what the optimizer would use.
        norm: of all of them together.
        progress: of the run, before the step and after it.
    """
    rates = [
        learning_rate(replace(config, lr=group.get("peak_lr", config.lr)), *progress)
        for group in optimizer.param_groups
    ]
    metrics = {"lr": learning_rate(config, *progress)}
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if "peak_lr" in group:
            metrics[f"lr_group{group['spec']}"] = rate
    usual, skipped = guard.usual, None
    if guard.is_spike(norm):
        skipped = f"its gradient norm of {norm:.4g} is a spike: the median of the steps before is {usual:.4g}"
    else:
        clip_gradients(gradients, norm, config.clip_norm)
        optimizer.step()
    optimizer.zero_grad()
    if guard.factor is not None:
        metrics["spikes"] = guard.skipped
    return Updated(metrics, skipped)
