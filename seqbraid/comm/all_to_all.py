"""The all-to-all whose gradient goes back the way its input came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .group import Group


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, name: str
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.name = send, receive, group, name
        return group.all_to_all(x, send, receive, name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.group.all_to_all(dy, ctx.receive, ctx.send, ctx.name + " gradient")
        return dx, None, None, None, None


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, name: str) -> Tensor:
    """Send `send[i]` elements of the flat `x` to rank i; get `receive[i]` from it, in rank order.

    The bytes are counted under `name`, those of the backward under `name + " gradient"`.
    """
    out: Tensor = _AllToAll.apply(x, send, receive, group, name)  # type: ignore[no-untyped-call]
    return out
