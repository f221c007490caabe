"""The loss of a step: one backward, of first order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _BackwardOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        ctx.done = False
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError(
                "backward(create_graph=True) asks for gradients of gradients, which the kernels of a braided "
                "step do not have; call backward() without it"
            )
        if ctx.done:
            raise ValueError(
                "backward was called a second time on the loss of one step; its gradients were made in the "
                "forward and scaled in place by the first: call model(batch) again for another"
            )
        ctx.done = True
        return dloss


def backward_once(loss: Tensor) -> Tensor:
    """The loss, whose backward refuses to be run twice or to be differentiated, before anything is sent."""
    out: Tensor = _BackwardOnce.apply(loss)  # type: ignore[no-untyped-call]
    return out
