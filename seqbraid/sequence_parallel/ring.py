"""Ring attention: keys and values travel, queries stay, and out and LSE are merged block by block.

Letters: T local tokens, H query heads, G key/value heads, D head size.

While one block is computed the next one's keys are under way. The forward keeps no keys of other ranks; the
backward fetches them again, and sends each rank the gradient of its keys. It is fed the *global* out and LSE:
with a block's own statistics the gradient that flows through the merge would be lost.
"""

from __future__ import annotations

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
from .ring_plan import RingPlan, RingStep


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
        keys = _KeysUnderWay(k, v, plan, group, "ring")
        out, lse = block_attention(q, k, v, plan.local, scale)
        if plan.steps:
            out = out.to(lse.dtype)  # merged wide, rounded once
        for step in plan.steps:
            received = keys.next()
            if received is not None:
                merge_block_attention(out, lse, q, *received, step.blocks, scale)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.plan, ctx.group, ctx.scale = plan, group, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink = ctx.saved_tensors
        plan, group, scale = ctx.plan, ctx.group, ctx.scale
        keys = _KeysUnderWay(k, v, plan, group, "ring again")
        dtype = lse.dtype if plan.steps else q.dtype  # summed wide, rounded once
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        block_attention_backward((dq, dk, dv), dout, q, k, v, out, lse, plan.local, scale)
        home = _GradientsUnderWay(dk, dv, k.dtype, group)
        for step in plan.steps:
            received = keys.next()
            theirs = None
            if received is not None:
                theirs = (torch.zeros_like(received[0]), torch.zeros_like(received[1]))
                block_attention_backward((dq, *theirs), dout, q, *received, out, lse, step.blocks, scale)
            home.send(step, theirs)
        home.take_in()
        dsink = None if sink is None else sink_gradient(dout, out, lse, sink)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None, None, None


class _KeysUnderWay:
    """The keys and values of the other ranks, one step ahead of their use."""

    def __init__(self, k: Tensor, v: Tensor, plan: RingPlan, group: Group, name: str) -> None:
        self.k, self.v, self.group, self.name = k, v, group, name
        self.steps = iter(plan.steps)
        self.under_way = self._start()

    def next(self) -> tuple[Tensor, Tensor] | None:
        """What this step received, if anything; the exchange of the step after it is started first."""
        assert self.under_way is not None
        joined = self.under_way.wait()
        self.under_way = self._start()
        return None if joined is None else _parted(joined, self.k, self.v)

    def _start(self) -> Transfer | None:
        step = next(self.steps, None)
        if step is None:
            return None
        send = _joined(_rows(self.k, step), _rows(self.v, step)) if step.num_sent else None
        receive = self.k.new_empty(step.num_received, _width(self.k, self.v)) if step.num_received else None
        return self.group.exchange(send, step.target, receive, step.source, self.name)


class _GradientsUnderWay:
    """The gradients of other ranks' keys on their way home, and those of ours as they come in."""

    def __init__(self, dk: Tensor, dv: Tensor, dtype: torch.dtype, group: Group) -> None:
        self.dk, self.dv, self.dtype, self.group = dk, dv, dtype, group
        self.under_way: tuple[RingStep, Transfer] | None = None

    def send(self, step: RingStep, dkv: tuple[Tensor, Tensor] | None) -> None:
        """Start sending a step's gradients to their owner; take in what came for us in the step before."""
        send = None if dkv is None else _joined(*dkv)
        width = _width(self.dk, self.dv)
        receive = self.dk.new_empty(step.num_sent, width, dtype=self.dtype) if step.num_sent else None
        transfer = self.group.exchange(send, step.source, receive, step.target, "ring gradient")
        self.take_in()
        self.under_way = (step, transfer)

    def take_in(self) -> None:
        """Add what is under way to our gradients."""
        if self.under_way is None:
            return
        step, transfer = self.under_way
        received = transfer.wait()
        self.under_way = None
        if received is None:
            return
        for part, total in zip(_parted(received, self.dk, self.dv), (self.dk, self.dv), strict=True):
            begin = 0
            for start, stop in step.sent_rows:
                total[start:stop] += part[begin : begin + stop - start]
                begin += stop - start


def _rows(x_TGD: Tensor, step: RingStep) -> Tensor:
    parts = [x_TGD[start:stop] for start, stop in step.sent_rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _width(k: Tensor, v: Tensor) -> int:
    return k.shape[1:].numel() + v.shape[1:].numel()


def _joined(k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
    """Keys and values in one message: `[S, G·D + G·D]`."""
    return torch.cat([k_SGD.flatten(1), v_SGD.flatten(1)], dim=1)


def _parted(joined: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = joined.split([k.shape[1:].numel(), v.shape[1:].numel()], dim=1)
    return keys.view(-1, *k.shape[1:]), values.view(-1, *v.shape[1:])
