"""Rows of a tensor on their way to the ranks that need them, and their gradients on the way back.

Letters: T local rows, R rows that arrive, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .group import Group


@dataclass(frozen=True)
class RowPlan:
    """Which of its rows each rank of a group sends to which; what a rank sends to itself stays there."""

    rows: Tensor
    """The local rows that are sent, rank after rank; a row may go to many."""
    send: Sequence[int]
    """How many of them each rank of the group gets."""
    receive: Sequence[int]
    """How many rows come from each rank of the group."""
    is_local: bool
    """Whether no rank of the whole group sends a row to another, so that no collective is needed. It must be
    the same on every rank.
    """


def exchange_rows(x_TC: Tensor, plan: RowPlan, group: Group, name: str) -> Tensor:
    """The rows `[R, C]` that the ranks of a group send us, in rank order, our own among them; differentiable.

    Every rank of the group takes part, also one that neither sends nor receives.
    """
    arrived_RC: Tensor = _ExchangeRows.apply(x_TC, plan, group, name)  # type: ignore[no-untyped-call]
    return arrived_RC


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, plan: RowPlan, group: Group, name: str) -> Tensor:
        ctx.plan, ctx.group, ctx.name, ctx.num_rows = plan, group, name, len(x_TC)
        sent = x_TC.index_select(0, plan.rows.to(x_TC.device))
        return sent if plan.is_local else _travel(sent, plan.send, plan.receive, group, name)

    @staticmethod
    def backward(ctx: Any, darrived_RC: Tensor) -> tuple[Tensor | None, ...]:
        plan, group = ctx.plan, ctx.group
        dsent = darrived_RC
        if not plan.is_local:
            dsent = _travel(dsent, plan.receive, plan.send, group, ctx.name + " gradient")
        # A row that went to several ranks gets a gradient from each: summed wide, rounded once.
        wide = torch.promote_types(dsent.dtype, torch.float32)
        dx = dsent.new_zeros(ctx.num_rows, *dsent.shape[1:], dtype=wide)
        dx.index_add_(0, plan.rows.to(dsent.device), dsent.to(wide))
        return dx.to(dsent.dtype), None, None, None


def _travel(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, name: str) -> Tensor:
    width = rows.shape[1:].numel()
    arrived = group.all_to_all(rows.flatten(), [n * width for n in send], [n * width for n in receive], name)
    return arrived.view(sum(receive), *rows.shape[1:])
