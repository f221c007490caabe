"""Block attention on packed rows: LSE out, and a backward that takes the global out and LSE.

Letters: T query tokens, S key tokens, H query heads, G key/value heads (G divides H), D head size.

Rows of no block get out 0 and LSE −inf, and no gradient.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .blocks import BlockPlan
from .merge import Rows, merge_rows
from .streams import side_by_side


def block_attention(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: BlockPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every block; returns out `[T, H, D]` and its natural-log LSE `[H, T]`."""
    lse_HT = q_THD.new_full(q_THD.shape[1::-1], -torch.inf, dtype=wide_dtype(q_THD))
    outs = []
    groups = plan.groups(q_THD, v_SGD)
    results = side_by_side([partial(group.forward, q_THD, k_SGD, v_SGD, scale) for group in groups], q_THD)
    for group, (out, lse) in zip(groups, results, strict=True):
        lse_HT[:, group.q_rows] = lse
        outs.append((group.q_rows, out))
    return _placed(outs, q_THD[..., : v_SGD.shape[2]], plan.q_ranges), lse_HT


def merge_block_attention(
    out_THD: Tensor,
    lse_HT: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    plan: BlockPlan,
    scale: float,
) -> None:
    """Add blocks over further keys to an out and LSE, in place; out is rounded to what it is kept in."""
    groups = plan.groups(q_THD, v_SGD)
    results = side_by_side([partial(group.forward, q_THD, k_SGD, v_SGD, scale) for group in groups], q_THD)
    for group, (out, lse) in zip(groups, results, strict=True):
        merge_rows(out_THD, lse_HT, group.q_rows, out, lse)


def block_attention_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    plan: BlockPlan,
    scale: float,
    dq_THD: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through these blocks, given the out and LSE of *all* keys that a query row saw.

    With the blocks' own out and LSE instead, the gradient that flows through the merge would be lost. Where a
    `dq_THD` is given, the gradient of q is added to it in place.
    """
    dqs, dks, dvs = [], [], []
    groups = plan.groups(q_THD, v_SGD)
    tensors = (dout_THD, q_THD, k_SGD, v_SGD, out_THD, lse_HT, scale)
    results = side_by_side([partial(group.backward, *tensors) for group in groups], q_THD)
    for group, (dq, dk, dv) in zip(groups, results, strict=True):
        if dq_THD is None:
            dqs.append((group.q_rows, dq))
        else:
            _add_rows(dq_THD, group.q_rows, dq)
        dks.append((group.k_rows, dk))
        dvs.append((group.k_rows, dv))
    if dq_THD is None:
        dq_THD = _placed(dqs, q_THD, plan.q_ranges)
    return dq_THD, _summed(dks, k_SGD, plan), _summed(dvs, v_SGD, plan)


def _placed(parts: list[tuple[Rows, Tensor]], like: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """Parts of a tensor put to their rows, which no two of them share; rows outside the ranges get 0."""
    if len(parts) == 1 and len(parts[0][1]) == len(like) and isinstance(parts[0][0], slice):
        placed = parts[0][1]
    else:
        placed = like.new_empty(like.shape)
        for rows, part in parts:
            placed[rows] = part
    end = 0
    for start, stop in [*ranges, (len(like), len(like))]:
        if start > end:
            placed[end:start] = 0
        end = max(end, stop)
    return placed


def _summed(parts: list[tuple[Rows, Tensor]], like: Tensor, plan: BlockPlan) -> Tensor:
    """Gradients of keys put to their rows; where blocks share keys (window tiles, several queries) they add
    up.
    """
    if plan.keys_are_apart:
        return _placed(parts, like, plan.k_ranges)
    total = torch.zeros_like(like)
    for rows, part in parts:
        _add_rows(total, rows, part)
    return total


def add_sink(out_THD: Tensor, lse_HT: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Let a sink take its share of the softmax: given this out and LSE, the block backward stays as it is."""
    empty = lse_HT.isneginf()
    with_sink = torch.logaddexp(lse_HT, sink_H.to(lse_HT.dtype)[:, None])
    keep_HT = (lse_HT - with_sink).exp().masked_fill(empty, 0)
    return (out_THD * keep_HT.T[..., None]).to(out_THD.dtype), with_sink.masked_fill(empty, -torch.inf)


def sink_gradient(dout_THD: Tensor, out_THD: Tensor, lse_HT: Tensor, sink_H: Tensor) -> Tensor:
    """`−Σ_t p_sink · (dout · out)`: a sink only takes probability away."""
    weight_HT = (sink_H.to(lse_HT.dtype)[:, None] - lse_HT).exp().masked_fill(lse_HT.isneginf(), 0)
    inner_HT = (dout_THD.to(lse_HT.dtype) * out_THD.to(lse_HT.dtype)).sum(-1).T
    return -(weight_HT * inner_HT).sum(1).to(sink_H.dtype)


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums over blocks are kept in: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _add_rows(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Rows may belong to several blocks (window tiles share keys, ring steps share queries): they add up."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))
