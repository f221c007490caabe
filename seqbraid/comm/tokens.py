"""Tokens that tensor parallel ranks share: all of them for a matrix product, each rank's own in between.

What a product gives on a rank is a partial sum: it is added up on its way to the rank that holds the token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .group import Group


def gather_tokens(x: Tensor, group: Group, name: str = "tp") -> Tensor:
    """The rows `[…, T, D]` of all ranks of a group, given each one's own `[…, T / size, D]` (`…` is 1). The
    gradient of a row is the sum of what the ranks found for it.
    """
    return x if group.size == 1 else _Gather.apply(x, group, name)  # type: ignore[no-untyped-call]


def scatter_tokens(x: Tensor, group: Group, name: str = "tp") -> Tensor:
    """This rank's own rows `[…, T / size, D]` of the sum over a group of partial sums `[…, T, D]`."""
    return x if group.size == 1 else _Scatter.apply(x, group, name)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, name: str) -> Tensor:
        ctx.group, ctx.name = group, name
        return group.all_gather_rows(x, name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.reduce_scatter_rows(dy, ctx.name + " gradient"), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, name: str) -> Tensor:
        ctx.group, ctx.name = group, name
        return group.reduce_scatter_rows(x, name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather_rows(dy, ctx.name + " gradient"), None, None
