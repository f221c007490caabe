"""The loss of a step: one backward, of first order, begun by all ranks or by none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.consensus import agree


class _BackwardOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.done = False
        ctx.group = group
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        error = None
        if torch.is_grad_enabled():
            error = ValueError(
                "backward(create_graph=True) needs second-order gradients, which are not supported; call "
                "backward() without it"
            )
        elif ctx.done:
            error = ValueError(
                "backward was called a second time on the loss of one step, whose gradients were "
                "computed in the forward and scaled in place by the first call; call model(batch) again"
            )
        # What one rank refuses, the others would wait for in the first exchange of their backward.
        with torch.no_grad():
            agree(ctx.group, error, alike={"the call": "backward"})
        ctx.done = True
        return dloss, None


def backward_once(loss: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The loss, whose backward refuses to be run twice or to be differentiated, on every rank of a (CPU)
    group, before anything is sent.
    """
    out: Tensor = _BackwardOnce.apply(loss, group)  # type: ignore[no-untyped-call]
    return out
