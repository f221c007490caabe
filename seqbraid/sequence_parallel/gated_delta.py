"""Gated-delta layers over the ranks that share a row: by a head all-to-all, or, here, by passing states.

Over a segment the rule is affine in its state, S_out = M S_in + S0. Each rank reduces its open segments
(those of sequences in several segments) to M and S0, tells them to the ranks that hold later segments of the
same sequence, and finds the states that enter its own by a scan along each chain. The backward mirrors it:
dS_in goes to the ranks that hold earlier segments, and a scan with Mᵀ gives each segment its dS_out. What is
sent does not grow with the length, and nothing is sent for a sequence that lives in one piece.

Letters: T local tokens, N segments of this rank, E those among them that a state enters (in the backward:
that a gradient enters from behind), C channels of the convolution, W its width, H value heads, K key head
size, V value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.group import Group
from ..comm.rows import exchange_rows
from ..ops.conv import causal_conv
from ..ops.gated_delta import make_call
from ..ops.kernels import DEFAULT, Kernels
from .chain import ChainPlan, ScanPlan
from .context import StepContext
from .gated_delta_bytes import HeadSizes
from .gated_delta_heads import mixing_by_heads
from .gated_delta_layer import GatedDeltaLayer


def gated_delta_mixing(
    mixed_TC: Tensor, b_TH: Tensor, a_TH: Tensor, layer: GatedDeltaLayer, context: StepContext
) -> Tensor:
    """The layer between its projections and its norm, `[T, H, V]`, for this rank's tokens; padding gets 0."""
    method = context.gated_delta_method(HeadSizes.of(layer), mixed_TC.element_size())
    if method == "heads":
        heads_plan = context.row.heads(mixed_TC.device)
        return mixing_by_heads(mixed_TC, b_TH, a_TH, layer, heads_plan, context.sequence, context.kernels)
    assert method == "states", method
    chain_plan = context.row.chain(mixed_TC.device)
    return mixing_by_states(mixed_TC, b_TH, a_TH, layer, chain_plan, context.sequence, context.kernels)


def mixing_by_states(
    mixed_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    layer: GatedDeltaLayer,
    plan: ChainPlan,
    group: Group,
    kernels: Kernels = DEFAULT,
) -> Tensor:
    """Each rank mixes its own tokens; halos of the convolution and states travel. Any number of heads."""
    mixed_TC, b_TH, a_TH = (plan.compact(x) for x in (mixed_TC, b_TH, a_TH))
    mixed_TC = causal_conv(
        mixed_TC,
        layer.conv_weight_CW,
        layer.conv_bias_C,
        plan.cu,
        halo_NWC=_halo(mixed_TC, layer.conv_weight_CW.shape[1], plan, group),
        activation=layer.activation,
        kernels=kernels,
    )
    q, k, v = layer.split(mixed_TC)
    g_TH, beta_TH = layer.log_decay(a_TH), b_TH.sigmoid()
    return plan.spread(rule_with_states(q, k, v, g_TH, beta_TH, plan, group, kernels))


def _halo(mixed_TC: Tensor, width: int, plan: ChainPlan, group: Group) -> Tensor | None:
    """The inputs `[N, W−1, C]` before each of our segments, 0 before the start of a sequence."""
    halo = plan.halo(width)
    if halo.is_empty:
        return None
    arrived_RC = exchange_rows(mixed_TC, halo.rows, group, "gated delta halo")
    num_segments, channels = len(plan.cu) - 1, mixed_TC.shape[1]
    halo_TC = mixed_TC.new_zeros(num_segments * (width - 1), channels)
    return halo_TC.index_copy(0, halo.places, arrived_RC).view(num_segments, width - 1, channels)


def rule_with_states(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    plan: ChainPlan,
    group: Group,
    kernels: Kernels = DEFAULT,
) -> Tensor:
    """The gated delta rule on the real tokens of this rank, each segment from the state its chain brings."""
    out_THV: Tensor = _RuleWithStates.apply(  # type: ignore[no-untyped-call]
        q_THK, k_THK, v_THV, g_TH, beta_TH, plan, group, kernels
    )
    return out_THV


class _RuleWithStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        plan: ChainPlan,
        group: Group,
        kernels: Kernels,
    ) -> Tensor:
        call = make_call(q, k, v, g, beta, plan.cu, opened=plan.opened, kernels=kernels)
        scan = plan.forward
        _, S0_first = call.summaries(scan.firsts, with_transition=False)
        M, S0 = call.summaries(scan.others, with_transition=True)
        assert M is not None
        S0 = torch.cat([S0_first, S0])
        entering_EHKV = _scan(*_exchange(M, S0, scan, group, "gated delta states"), scan)
        out, _ = call.forward(_of_all(entering_EHKV, scan, plan))
        # M is the size of a state, and its second computation would cost as much as the rule.
        ctx.save_for_backward(q, k, v, g, beta, M, entering_EHKV, *call.kept)
        ctx.plan, ctx.group, ctx.kernels = plan, group, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, M, entering_EHKV, *kept = ctx.saved_tensors
        plan: ChainPlan = ctx.plan
        call = make_call(q, k, v, g, beta, plan.cu, kept=kept, opened=plan.opened, kernels=ctx.kernels)
        scan = plan.backward
        dS_in = call.entering_gradients(dout, [*scan.firsts, *scan.others])
        arrived = _exchange(M.mT, dS_in, scan, ctx.group, "gated delta states gradient")
        initial = _of_all(entering_EHKV, plan.forward, plan)
        *grads, _ = call.backward(dout, initial, _of_all(_scan(*arrived, scan), scan, plan))
        return *grads, None, None, None


def _exchange(M: Tensor, S0: Tensor, scan: ScanPlan, group: Group, name: str) -> tuple[Tensor, Tensor]:
    """M and S0 of the segments before ours in their chains, as they arrive; in float32 at least."""
    size_S0, size_M = S0.shape[1:].numel(), M.shape[1:].numel()

    def sizes(counts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(num_S0 * size_S0, num_M * size_M) for num_S0, num_M in counts]

    # A rank's message is its S0, then its M.
    send, receive = sizes(scan.send), sizes(scan.receive)
    parts_S0 = S0.index_select(0, scan.S0_sent).flatten().split([message[0] for message in send])
    parts_M = M.index_select(0, scan.M_sent).flatten().split([message[1] for message in send])
    arrived = torch.cat([part for message in zip(parts_S0, parts_M, strict=True) for part in message])
    if not scan.is_local:
        arrived = group.all_to_all(arrived, [sum(m) for m in send], [sum(m) for m in receive], name)
    parts = arrived.split([size for message in receive for size in message])
    arrived_S0, arrived_M = torch.cat(parts[0::2]), torch.cat(parts[1::2])
    return arrived_M.view(-1, *M.shape[1:]), arrived_S0.view(-1, *S0.shape[1:])


def _scan(M: Tensor, S0: Tensor, scan: ScanPlan) -> Tensor:
    """S ← M S + S0 along all chains at once; the states `[E, H, K, V]` that enter our segments."""
    states, M = S0.index_select(0, scan.S0_order), M.index_select(0, scan.M_order)
    with torch.autocast(S0.device.type, enabled=False):
        steps = states.split(scan.active)
        for before, after, M_step in zip(steps, steps[1:], M.split(scan.active[1:]), strict=False):
            after += M_step @ before[: len(after)]
    return states.index_select(0, scan.leaving)


def _of_all(entering_EHKV: Tensor, scan: ScanPlan, plan: ChainPlan) -> Tensor | None:
    """States of all our segments, 0 where none enters; None where none enters any."""
    if not len(entering_EHKV):
        return None
    states_NHKV = entering_EHKV.new_zeros(len(plan.cu) - 1, *entering_EHKV.shape[1:])
    return states_NHKV.index_copy_(0, scan.entered, entering_EHKV)
