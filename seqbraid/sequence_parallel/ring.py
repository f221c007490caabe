"""Ring attention: keys and values travel, queries stay, and out and LSE are merged block by block.

Letters: T local tokens, H query heads, G key/value heads, D head size.

While one block is computed the next one's keys are under way. The forward keeps no keys of other ranks; the
backward fetches them again, and sends each rank the gradient of its keys. It is fed the *global* out and LSE:
with a block's own statistics the gradient that flows through the merge would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm.group import Group, Transfer
from ..ops.attention import (
    BlockBackward,
    BlockForward,
    add_sink,
    block_attention,
    block_attention_backward,
    sink_gradient,
)
from ..ops.blocks import BlockPlan
from ..ops.kernels import DEFAULT, Kernels
from .ring_plan import RingMessage, RingPlan, RingRound


def ring_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    plan: RingPlan,
    group: Group,
    scale: float,
    sink_H: Tensor | None = None,
    kernels: Kernels = DEFAULT,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks, as the plan has it; differentiable.

    `sink_H` are learned logits of a key that holds nothing.
    """
    out: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        q_THD, k_TGD, v_TGD, sink_H, plan, group, scale, kernels
    )
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
        kernels: Kernels,
    ) -> Tensor:
        out, lse = ring_forward(q, k, v, plan, scale, Keys(k, v, plan, group, "ring"), kernels)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.plan, ctx.group, ctx.scale, ctx.kernels = plan, group, scale, kernels
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink = ctx.saved_tensors
        keys = Keys(k, v, ctx.plan, ctx.group, "ring again")
        gradients = ring_backward(dout, q, k, v, out, lse, ctx.plan, ctx.scale, keys, ctx.kernels)
        dsink = None if sink is None else sink_gradient(dout, out, lse, sink)
        return *gradients, dsink, None, None, None, None


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, scale: float, keys: Keys, kernels: Kernels = DEFAULT
) -> tuple[Tensor, Tensor]:
    """Out and LSE of this rank's queries over its own keys and those that come in."""
    if not plan.rounds:
        return block_attention(q, k, v, plan.local, scale, kernels)
    shared = slice(plan.num_shared)
    calls = _in_turn(
        BlockForward(q, k, v, plan.local, scale, kernels, ahead=True),
        lambda k, v, blocks: BlockForward(q[shared], k, v, blocks, scale, kernels, ahead=True, adds=True),
        plan,
        keys,
    )
    out, lse = next(calls).finish()
    shared_lse = lse[:, shared].contiguous()
    for call, (before, into) in zip(calls, _places(out[shared], plan, lse.dtype), strict=True):
        call.merge(before, shared_lse, into)
    lse[:, shared] = shared_lse
    return out, lse


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: RingPlan, scale: float,
    keys: Keys, kernels: Kernels = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's queries, keys and values; those of other ranks' keys are sent home."""
    if not plan.rounds:
        return block_attention_backward(dout, q, k, v, out, lse, plan.local, scale, kernels)
    shared = slice(plan.num_shared)
    rows, seen = (dout[shared], q[shared]), (out[shared], lse[:, shared].contiguous())
    calls = _in_turn(
        BlockBackward(dout, q, k, v, (out, lse), plan.local, scale, kernels, ahead=True),
        lambda k, v, blocks: BlockBackward(*rows, k, v, seen, blocks, scale, kernels, ahead=True, adds=True),
        plan,
        keys,
    )
    dq, dk, dv = next(calls).finish()
    # Wide, since several ranks may send theirs.
    home = keys.gradients()
    home.begin(dk[shared].to(lse.dtype), dv[shared].to(lse.dtype), k.dtype)
    places = _places(dq[shared], plan, lse.dtype)
    for call, (before, into), round_ in zip(calls, places, plan.rounds, strict=True):
        home.send(round_, *call.add(before, into))
    dk[shared], dv[shared] = home.all_in()
    return dq, dk, dv


Started = TypeVar("Started", BlockForward, BlockBackward)


def _in_turn(
    local: Started, of_round: Callable[[Tensor, Tensor, BlockPlan], Started], plan: RingPlan, keys: Keys
) -> Iterator[Started]:
    """The blocks of our own keys, then those of each round, started and to be finished.

    Those of a round are made before the ones before them are finished, so that on a GPU they do not wait for
    them, and start while those drain.
    """
    running = local.start()
    for round_ in plan.rounds:
        coming = of_round(*keys.take(), round_.blocks)
        yield running
        keys.fetch()
        running = coming.start()
    yield running


def _places(rows: Tensor, plan: RingPlan, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """For each round where the sum before it is, and where it leaves its own.

    What lies between two rounds is wide, and the last one rounds it. Rounds without blocks leave all
    where it is.
    """
    has_blocks = [len(round_.blocks.blocks) > 0 for round_ in plan.rounds]
    left = sum(has_blocks)
    wide = rows if left < 2 or rows.dtype == dtype else torch.empty_like(rows, dtype=dtype)
    before = rows
    for has in has_blocks:
        left -= has
        into = before if not has else wide if left else rows
        yield before, into
        before = into


class Keys:
    """The keys and values of the other ranks, one round ahead of their use."""

    def __init__(self, k: Tensor, v: Tensor, plan: RingPlan, group: Group, name: str) -> None:
        self.k, self.v, self.group, self.name = k, v, group, name
        self.rounds = iter(plan.rounds)
        self.under_way: tuple[RingRound, Tensor, Transfer] | None = None
        self.fetch()

    def fetch(self) -> None:
        """Start the exchange of the next round, if there is one."""
        round_ = next(self.rounds, None)
        if round_ is None:
            return
        sends = [(m.rank, _joined(_rows(self.k, m), _rows(self.v, m))) for m in round_.sent]
        buffer = self.k.new_empty(round_.num_received, _width(self.k, self.v))
        transfer = self.group.exchange(sends, _by_rank(buffer, round_.received), self.name)
        self.under_way = (round_, buffer, transfer)

    def take(self) -> tuple[Tensor, Tensor]:
        """What was fetched, when it is here."""
        assert self.under_way is not None
        (round_, buffer, transfer), self.under_way = self.under_way, None
        transfer.wait()
        return _parted(round_.sorted(buffer), self.k, self.v)

    def gradients(self) -> RingGradients:
        """The way home of their gradients."""
        return RingGradients(self.group)


class RingGradients:
    """The gradients of other ranks' keys on their way home, and those of ours as they come in."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.under_way: tuple[RingRound, Tensor, Transfer] | None = None

    def begin(self, dk: Tensor, dv: Tensor, dtype: torch.dtype) -> None:
        """Those of our keys so far, to be added to, and what they are sent in."""
        self.dk, self.dv, self.dtype = dk, dv, dtype

    def send(self, round_: RingRound, dk: Tensor, dv: Tensor) -> None:
        """Start sending a round's gradients to their owners; take in what came for us in the round before."""
        sends = _by_rank(round_.unsorted(_joined(dk, dv)), round_.received)
        expected = sum(message.num_rows for message in round_.sent)
        buffer = self.dk.new_empty(expected, _width(self.dk, self.dv), dtype=self.dtype)
        transfer = self.group.exchange(sends, _by_rank(buffer, round_.sent), "ring gradient")
        self._take_in()
        self.under_way = (round_, buffer, transfer)

    def all_in(self) -> tuple[Tensor, Tensor]:
        """The gradients of our keys, when all have come."""
        self._take_in()
        return self.dk, self.dv

    def _take_in(self) -> None:
        if self.under_way is None:
            return
        (round_, buffer, transfer), self.under_way = self.under_way, None
        transfer.wait()
        ranges = [rows for message in round_.sent for rows in message.rows]
        for part, total in zip(_parted(buffer, self.dk, self.dv), (self.dk, self.dv), strict=True):
            begin = 0
            for start, stop in ranges:
                total[start:stop] += part[begin : begin + stop - start]
                begin += stop - start


def _rows(x_TGD: Tensor, message: RingMessage) -> Tensor:
    parts = [x_TGD[start:stop] for start, stop in message.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_rank(buffer: Tensor, messages: Sequence[RingMessage]) -> list[tuple[int, Tensor]]:
    """The part of a buffer that belongs to each message, in their order."""
    parts = buffer.split([message.num_rows for message in messages]) if messages else ()
    return [(message.rank, part) for message, part in zip(messages, parts, strict=True)]


def _width(k: Tensor, v: Tensor) -> int:
    return k.shape[1:].numel() + v.shape[1:].numel()


def _joined(k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
    """Keys and values in one message: `[S, G·D + G·D]`."""
    return torch.cat([k_SGD.flatten(1), v_SGD.flatten(1)], dim=1)


def _parted(joined: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = joined.split([k.shape[1:].numel(), v.shape[1:].numel()], dim=1)
    return keys.view(-1, *k.shape[1:]), values.view(-1, *v.shape[1:])
