"""Optimizers of training arguments, on parameters that lie on a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..train.optimizers.partwise import PartwiseOptimizer


def partwise(kind: type[torch.optim.Optimizer]) -> type[PartwiseOptimizer]:
    """One of torch's optimizers that work number by number, for sharded parameters of any type."""

    class Partwise(PartwiseOptimizer):
        """Made from groups, of which some may be empty, and settings, as the stock Trainer makes them."""

        def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
            filled = [group for group in groups if group["params"]]
            if not filled:
                raise ValueError("nothing is trained: every parameter is frozen")
            super().__init__(filled, lambda inner: [kind(inner, **settings)])

    return Partwise


def stock_optimizer(optimizer: Any) -> Any:
    """The optimizer itself, where accelerate has wrapped it."""
    return getattr(optimizer, "optimizer", optimizer)


def gradients_by_parameter(optimizer: Any) -> dict[Tensor, Tensor]:
    """What the next step would use, by the parameters that it would change."""
    found = stock_optimizer(optimizer)
    if isinstance(found, PartwiseOptimizer):
        return found.gradients()
    trained = (p for group in found.param_groups for p in group["params"])
    return {p: p.grad for p in trained if p.grad is not None}
