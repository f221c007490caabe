"""The loss of a step: one backward, of first order, begun by all ranks or by none, and none after it."""

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


class DifferentiatedLoss(Tensor):
    """A loss whose gradients are in `.grad` already; what is computed from it is a plain tensor."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refused: torch would say that there is no graph, not why."""
        raise ValueError(
            "backward was called on the loss of forward_backward, which has run the backward already (or, "
            "under torch.no_grad(), has none to run): the gradients are in .grad. Call the optimizer's "
            "step; for a backward of your own, take the loss of model(batch)"
        )

    def __format__(self, spec: str) -> str:
        """A number's, as of a plain tensor."""
        return format(self.as_subclass(Tensor), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and copied as a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """A plain tensor."""
        return self.as_subclass(Tensor).clone()


def backward_once(loss: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The loss, whose backward refuses to be run twice or to be differentiated, on every rank of a (CPU)
    group, before anything is sent.
    """
    out: Tensor = _BackwardOnce.apply(loss, group)  # type: ignore[no-untyped-call]
    return out
