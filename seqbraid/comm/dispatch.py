"""Tokens on their way to the ranks that hold their experts, and what these make of them on the way back.

Letters: T tokens of this rank, K experts that each of them goes to, S = T·K picks, P picks that arrive here,
E experts, G ranks of the group, L = E/G experts of a rank, D channels.

A pick travels once, whatever else its token was picked for: experts of one rank may get the same token
several times. Everything that comes back has its place by then, so that sums are made in one order and a run
can be repeated to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .all_to_all import all_to_all
from .group import Group

NAME = "expert tokens"
"""Under which `Group.sent` counts the bytes: there and back again, each with its gradient."""


@dataclass(frozen=True)
class ExpertRows:
    """How rows sorted by expert are shared out: those of the first expert first."""

    counts_L: Tensor
    """Rows of each expert, on the device of the rows."""
    num_rows: int
    known: tuple[int, ...] | None = None
    """The same on the host, where they are known there."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """On the host; waits for the device where they are not known there yet."""
        return self.known if self.known is not None else tuple(self.counts_L.tolist())

    @property
    def ends_L(self) -> Tensor:
        """Where the rows of each expert end, in int32."""
        return self.counts_L.cumsum(0).int()

    @property
    def expert_P(self) -> Tensor:
        """The expert of each row."""
        experts = torch.arange(len(self.counts_L), device=self.counts_L.device)
        return experts.repeat_interleave(self.counts_L, output_size=self.num_rows)


@dataclass(frozen=True)
class Dispatch:
    """Who of a group of ranks gets which tokens of this rank, and where the tokens that arrive belong."""

    group: Group
    counts_E: Tensor
    """Picks of this rank for each of all experts."""
    order_S: Tensor
    """Picks of this rank, by expert."""
    back_S: Tensor
    """Where each pick is in that order."""
    send: tuple[int, ...]
    receive: tuple[int, ...]
    rows: ExpertRows
    """The picks that arrive, by expert of this rank."""
    order_P: Tensor | None = None
    """Picks as they arrive, by expert; None where they arrive so."""
    back_P: Tensor | None = None

    @staticmethod
    def of(index_TK: Tensor, num_experts: int, group: Group) -> Dispatch:
        """Of the experts that each token goes to; ranks tell each other how many, and wait for
        the device once.
        """
        picks_S = index_TK.reshape(-1)
        sorted_S, order_S = picks_S.sort(stable=True)
        experts = torch.arange(num_experts + 1, device=picks_S.device, dtype=picks_S.dtype)
        # Not bincount, which waits for a GPU.
        counts_E = torch.searchsorted(sorted_S, experts).diff()
        back_S = _inverse(order_S)
        if group.size == 1:
            rows = ExpertRows(counts_E, len(picks_S))
            return Dispatch(group, counts_E, order_S, back_S, (len(picks_S),), (len(picks_S),), rows)
        local = num_experts // group.size
        equal = [local] * group.size
        arriving_GL = group.all_to_all(counts_E, equal, equal, "expert counts").view(group.size, local)
        send_GL, receive_GL = torch.stack([counts_E.view_as(arriving_GL), arriving_GL]).tolist()
        receive = tuple(map(sum, receive_GL))
        sizes = tuple(map(sum, zip(*receive_GL, strict=True)))
        rows = ExpertRows(arriving_GL.sum(0), sum(receive), sizes)
        expert_P = torch.arange(local, device=picks_S.device).repeat(group.size)
        expert_P = expert_P.repeat_interleave(arriving_GL.flatten(), output_size=rows.num_rows)
        order_P = expert_P.argsort(stable=True)
        return Dispatch(
            group,
            counts_E,
            order_S,
            back_S,
            tuple(map(sum, send_GL)),
            receive,
            rows,
            order_P,
            _inverse(order_P),
        )

    def to_experts(self, x_TD: Tensor) -> Tensor:
        """The rows `[P, D]` of this rank's experts, the first expert's first; differentiable."""
        x_SD: Tensor = _Spread.apply(x_TD, self.order_S, self.back_S)  # type: ignore[no-untyped-call]
        if self.order_P is None:
            return x_SD
        return _permuted(self._travel(x_SD, self.send, self.receive), self.order_P, self.back_P)

    def from_experts(self, y_PD: Tensor) -> Tensor:
        """What the experts made of each token `[S, D]`, token by token in the order of its picks."""
        if self.back_P is not None:
            y_PD = self._travel(_permuted(y_PD, self.back_P, self.order_P), self.receive, self.send)
        return _permuted(y_PD, self.back_S, self.order_S)

    def _travel(self, x_PD: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        width = x_PD.shape[1]
        sends, receives = ([n * width for n in counts] for counts in (send, receive))
        return all_to_all(x_PD.flatten(), sends, receives, self.group, NAME).view(sum(receive), width)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _permuted(x: Tensor, order: Tensor, back: Tensor | None) -> Tensor:
    out: Tensor = _Permute.apply(x, order, back)  # type: ignore[no-untyped-call]
    return out


class _Permute(torch.autograd.Function):
    """Rows in another order: torch's own gradient of it adds, one after another, to zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return dout.index_select(0, back), None, None


class _Spread(torch.autograd.Function):
    """Each token once for each of its picks; its gradients are added in the order of its picks."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_S: Tensor, back_S: Tensor) -> Tensor:
        ctx.save_for_backward(back_S)
        ctx.shape = x_TD.shape
        picks = len(order_S) // max(1, len(x_TD))
        return x_TD.index_select(0, order_S.div(max(1, picks), rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, dx_SD: Tensor) -> tuple[Tensor | None, ...]:
        (back_S,) = ctx.saved_tensors
        tokens, width = ctx.shape
        dx_TKD = dx_SD.index_select(0, back_S).view(tokens, -1 if tokens else 1, width)
        return dx_TKD.sum(1), None, None
