"""Ring attention: keys and values travel, queries stay, and out and LSE are merged block by block.

Letters: T local tokens, H query heads, G key/value heads, D head size.

While one block is computed the next one's keys are under way. The forward keeps no keys of other ranks; the
backward fetches them again, and sends each rank the gradient of its keys. It is fed the *global* out and LSE:
with a block's own statistics the gradient that flows through the merge would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.group import Group, Transfer
from ..ops.attention import (
    add_sink,
    block_attention,
    block_attention_backward,
    merge_block_attention,
    sink_gradient,
)
from .ring_plan import Message, RingPlan, RingRound


def ring_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    plan: RingPlan,
    group: Group,
    scale: float,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks, as the plan has it; differentiable.

    `sink_H` are learned logits of a key that holds nothing.
    """
    out: Tensor = _RingAttention.apply(q_THD, k_TGD, v_TGD, sink_H, plan, group, scale)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        plan: RingPlan,
        group: Group,
        scale: float,
    ) -> Tensor:
        keys = _Keys(k, v, plan, group, "ring")
        out, lse = block_attention(q, k, v, plan.local, scale)
        if plan.rounds:
            shared = slice(plan.num_shared)
            wide, wide_lse = out[shared].to(_sum_dtype(out, lse, plan)), lse[:, shared].contiguous()
            for round_ in plan.rounds:
                merge_block_attention(wide, wide_lse, q[shared], *keys.next(), round_.blocks, scale)
            lse[:, shared] = wide_lse
            _round_into(out[shared], wide)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.plan, ctx.group, ctx.scale = plan, group, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink = ctx.saved_tensors
        plan, group, scale = ctx.plan, ctx.group, ctx.scale
        keys = _Keys(k, v, plan, group, "ring again")
        gradients = block_attention_backward(dout, q, k, v, out, lse, plan.local, scale)
        if plan.rounds:
            shared = slice(plan.num_shared)
            dq = gradients[0][shared].to(_sum_dtype(q, lse, plan))
            dk, dv = (x[shared].to(lse.dtype) for x in gradients[1:])  # several ranks may send theirs
            home = _Gradients(dk, dv, k.dtype, group)
            rows = (dout[shared], q[shared])
            seen = (out[shared], lse[:, shared].contiguous())
            for round_ in plan.rounds:
                _, *theirs = block_attention_backward(*rows, *keys.next(), *seen, round_.blocks, scale, dq)
                home.send(round_, *theirs)
            home.take_in()
            for gradient, total in zip(gradients, (dq, dk, dv), strict=True):
                _round_into(gradient[shared], total)
        dsink = None if sink is None else sink_gradient(dout, out, lse, sink)
        return *gradients, dsink, None, None, None


def _sum_dtype(x: Tensor, lse: Tensor, plan: RingPlan) -> torch.dtype:
    """What sums over rounds are kept in. One round adds to a row once, and its sum is rounded once either
    way.
    """
    return x.dtype if len(plan.rounds) == 1 else lse.dtype


def _round_into(rows: Tensor, total: Tensor) -> None:
    """Sums over rounds to where they belong, unless they were made there."""
    if total.data_ptr() != rows.data_ptr():
        rows.copy_(total)


class _Keys:
    """The keys and values of the other ranks, one round ahead of their use."""

    def __init__(self, k: Tensor, v: Tensor, plan: RingPlan, group: Group, name: str) -> None:
        self.k, self.v, self.group, self.name = k, v, group, name
        self.rounds = iter(plan.rounds)
        self.under_way = self._start()

    def next(self) -> tuple[Tensor, Tensor]:
        """What this round received; the exchange of the round after it is started first."""
        assert self.under_way is not None
        round_, buffer, transfer = self.under_way
        transfer.wait()
        self.under_way = self._start()
        return _parted(_reordered(buffer, round_.sorting), self.k, self.v)

    def _start(self) -> tuple[RingRound, Tensor, Transfer] | None:
        round_ = next(self.rounds, None)
        if round_ is None:
            return None
        sends = [(m.rank, _joined(_rows(self.k, m), _rows(self.v, m))) for m in round_.sent]
        buffer = self.k.new_empty(round_.num_received, _width(self.k, self.v))
        return round_, buffer, self.group.exchange(sends, _by_rank(buffer, round_.received), self.name)


class _Gradients:
    """The gradients of other ranks' keys on their way home, and those of ours as they come in."""

    def __init__(self, dk: Tensor, dv: Tensor, dtype: torch.dtype, group: Group) -> None:
        self.dk, self.dv, self.dtype, self.group = dk, dv, dtype, group
        self.under_way: tuple[RingRound, Tensor, Transfer] | None = None

    def send(self, round_: RingRound, dk: Tensor, dv: Tensor) -> None:
        """Start sending a round's gradients to their owners; take in what came for us in the round before."""
        sends = _by_rank(_reordered(_joined(dk, dv), round_.unsorting), round_.received)
        expected = sum(message.num_rows for message in round_.sent)
        buffer = self.dk.new_empty(expected, _width(self.dk, self.dv), dtype=self.dtype)
        transfer = self.group.exchange(sends, _by_rank(buffer, round_.sent), "ring gradient")
        self.take_in()
        self.under_way = (round_, buffer, transfer)

    def take_in(self) -> None:
        """Add what is under way to our gradients."""
        if self.under_way is None:
            return
        round_, buffer, transfer = self.under_way
        transfer.wait()
        self.under_way = None
        ranges = [rows for message in round_.sent for rows in message.rows]
        for part, total in zip(_parted(buffer, self.dk, self.dv), (self.dk, self.dv), strict=True):
            begin = 0
            for start, stop in ranges:
                total[start:stop] += part[begin : begin + stop - start]
                begin += stop - start


def _rows(x_TGD: Tensor, message: Message) -> Tensor:
    parts = [x_TGD[start:stop] for start, stop in message.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_rank(buffer: Tensor, messages: Sequence[Message]) -> list[tuple[int, Tensor]]:
    """The part of a buffer that belongs to each message, in their order."""
    parts = buffer.split([message.num_rows for message in messages]) if messages else ()
    return [(message.rank, part) for message, part in zip(messages, parts, strict=True)]


def _reordered(buffer: Tensor, order: Tensor | None) -> Tensor:
    return buffer if order is None else buffer[order.to(buffer.device)]


def _width(k: Tensor, v: Tensor) -> int:
    return k.shape[1:].numel() + v.shape[1:].numel()


def _joined(k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
    """Keys and values in one message: `[S, G·D + G·D]`."""
    return torch.cat([k_SGD.flatten(1), v_SGD.flatten(1)], dim=1)


def _parted(joined: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = joined.split([k.shape[1:].numel(), v.shape[1:].numel()], dim=1)
    return keys.view(-1, *k.shape[1:]), values.view(-1, *v.shape[1:])
