"""A weight that the first and the last pipeline stage have both: the embedding, and the head tied to it.

Each of the two has a copy, cut over its ranks in the same way, and finds its own part of the gradient. Once a
step the parts are exchanged and added: the sum is the same to the bit on both, and so is what an optimizer
makes of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..comm.group import Group
from ..models.tensor_parts import own_part

NAME = "tied gradient"
"""Under which `Group.sent` counts the bytes."""


class TiedCopy:
    """This rank's copy; `begin`, `take` after each backward, and `finish` are called once a step."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self.module, self.group = module, group
        self.peer = 0 if group.rank else group.size - 1
        self._before: Tensor | None = None
        self._sum: Tensor | None = None

    @property
    def parameter(self) -> Tensor:
        """As an optimizer sees it."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        found: Tensor = self.module._parameters["weight"]  # type: ignore[assignment]
        return found

    def begin(self) -> None:
        """Put aside what earlier steps have left, which is a sum already."""
        self._before, self._sum = self.parameter.grad, None
        self.parameter.grad = None

    def take(self) -> None:
        """Add what a backward has left, in float32."""
        parameter = self.parameter
        if parameter.grad is None:
            return
        wide = torch.promote_types(parameter.dtype, torch.float32)
        own = own_part(parameter.grad).to(wide)
        self._sum = own if self._sum is None else self._sum.add_(own)
        parameter.grad = None

    def finish(self) -> None:
        """Leave the sum of both copies as the gradient."""
        parameter = self.parameter
        if not parameter.requires_grad:
            return
        wide = torch.promote_types(parameter.dtype, torch.float32)
        own = torch.zeros_like(own_part(parameter), dtype=wide) if self._sum is None else self._sum
        other = torch.empty_like(own)
        self.group.exchange([(self.peer, own)], [(self.peer, other)], NAME).wait()
        gradient = torch.zeros_like(parameter) if self._before is None else self._before
        own_part(gradient).add_((own + other).to(parameter.dtype))
        parameter.grad, self._before, self._sum = gradient, None, None
