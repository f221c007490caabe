"""AdamW, with float32 master weights where parameters are narrower."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ..distributed.gradients import clip_gradients, local
from .step_config import StepConfig


def make_optimizer(model: nn.Module, config: StepConfig) -> torch.optim.Optimizer:
    """AdamW over what is trained: torch's own for float32 parameters, with master weights for others.

    Matrices decay; norms, biases and other vectors do not.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("nothing is trained: every parameter is frozen")
    settings: dict[str, Any] = {
        "lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True,
    }  # fmt: skip
    if all(p.dtype == torch.float32 for p in trained):
        return torch.optim.AdamW(groups, **settings)
    return MasterAdamW(groups, **settings)


class MasterAdamW(torch.optim.AdamW):
    """AdamW that steps on float32 copies of narrower parameters and rounds them once per step.

    The gradients of accumulated batches are summed in float32 too: call `gather_gradients`
    after each backward.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._sums: dict[Tensor, Tensor] = {}

    def gather_gradients(self) -> None:
        """Add what the last backward gave to float32 sums, and let it go."""
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                if p in self._sums:
                    local(self._sums[p]).add_(local(p.grad))
                else:
                    self._sums[p] = p.grad.float()
                p.grad = None

    def gradients(self) -> dict[Tensor, Tensor]:
        """The float32 sums, by parameter."""
        return self._sums

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, gathered ones too."""
        super().zero_grad(set_to_none)
        self._sums.clear()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step from the gathered gradients."""
        assert closure is None, "closures are not supported: they would bypass the float32 gradient sums"
        self.gather_gradients()
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p in self._sums]
            states = [self._state(p) for p in stepped]
            masters = [local(state["master"]) for state in states]
            beta1, beta2 = group["betas"]
            adamw(
                masters,
                [local(self._sums.pop(p)) for p in stepped],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for p, master in zip(stepped, masters, strict=True):
                local(p).copy_(master)

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
            state["master"] = p.detach().float()
        return state


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the next step would use."""
    return list(gradients_by_parameter(optimizer).values())


def gradients_by_parameter(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """What the next step would use, by the parameters that it would change."""
    if isinstance(optimizer, MasterAdamW):
        optimizer.gather_gradients()
        return optimizer.gradients()
    trained = (p for group in optimizer.param_groups for p in group["params"])
    return {p: p.grad for p in trained if p.grad is not None}


def update(
    optimizer: torch.optim.Optimizer,
    gradients: list[Tensor],
    norm: float,
    clip_norm: float | None,
    lr: float,
) -> None:
    """Take the step, the gradient scaled down to the largest norm that is allowed."""
    clip_gradients(gradients, norm, clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
