"""Softmax attention over the ranks that share a row: Ulysses inside, the ring outside, whole
sequences at home.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .context import StepContext
from .ring import ring_attention
from .ulysses import SoftmaxHeads, heads_for_tokens, tokens_for_heads


def softmax_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    context: StepContext,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence of the row, for this rank's tokens; padding gets 0."""
    if context.ulysses.size == 1:
        ratio = q_THD.shape[1] / k_TGD.shape[1]
        plan = context.row.ring(window, shared=True, whole=True, query_heads=ratio)
        return ring_attention(q_THD, k_TGD, v_TGD, plan, context.ring, scale, sink_H, context.kernels)
    # Shared tokens change hands; sequences that live whole on this rank stay, with all their heads.
    shared = context.layout.num_shared_tokens(context.rank)
    parts = []
    if sum(context.row.group_tokens):
        heads = SoftmaxHeads(q_THD.shape[1], k_TGD.shape[1], context.ulysses.size)
        q, k, v = heads_for_tokens(
            q_THD[:shared], k_TGD[:shared], v_TGD[:shared], context.row.group_tokens, heads, context.ulysses
        )
        sink = None if sink_H is None else sink_H[heads.query_heads(context.ulysses.rank)]
        ratio = q.shape[1] / k.shape[1]
        plan = context.row.ring(window, shared=True, whole=False, query_heads=ratio)
        out = ring_attention(q, k, v, plan, context.ring, scale, sink, context.kernels)
        parts.append(tokens_for_heads(out, context.row.group_tokens, context.ulysses))
    if shared < len(q_THD):
        plan = context.row.ring(window, shared=False, whole=True)
        q, k, v = q_THD[shared:], k_TGD[shared:], v_TGD[shared:]
        parts.append(ring_attention(q, k, v, plan, context.ring, scale, sink_H, context.kernels))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
