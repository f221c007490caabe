"""Block attention on packed rows: LSE out, and a backward that takes the global out and LSE.

Letters: T query tokens, S key tokens, H query heads, G key/value heads (G divides H), D head size.

Rows of no block get out 0 and LSE −inf, and no gradient.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .blocks import BlockPlan, num_rows
from .merge import Rows, merge_rows
from .streams import side_by_side


def block_attention(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: BlockPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every block; returns out `[T, H, D]` and its natural-log LSE `[H, T]`."""
    lse_HT = q_THD.new_full(q_THD.shape[1::-1], -torch.inf, dtype=wide_dtype(q_THD))
    groups = plan.groups(q_THD, v_SGD)
    whole = _Whole(q_THD[..., : v_SGD.shape[2]], [group.q_rows for group in groups])
    calls = [
        partial(group.forward, q_THD, k_SGD, v_SGD, scale, whole.place(group.q_rows)) for group in groups
    ]
    for group, (out, lse) in zip(groups, side_by_side(calls, q_THD), strict=True):
        lse_HT[:, group.q_rows] = lse
        whole.put(group.q_rows, out)
    return whole.filled(plan.q_ranges), lse_HT


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
    # Most keys first: a sum that starts with all of them needs no zeros.
    groups = sorted(plan.groups(q_THD, v_SGD), key=lambda group: -num_rows(group.k_rows))
    tensors = (dout_THD, q_THD, k_SGD, v_SGD, out_THD, lse_HT, scale)
    q_rows, k_rows = [group.q_rows for group in groups], [group.k_rows for group in groups]
    wholes = [
        _Whole(q_THD, q_rows) if dq_THD is None else _Sum(dq_THD, q_THD),
        *(_Whole(x, k_rows) if plan.keys_are_apart else _Sum(None, x) for x in (k_SGD, v_SGD)),
    ]
    places = list(zip(q_rows, k_rows, k_rows, strict=True))
    calls = [
        partial(group.backward, *tensors, *(whole.place(r) for whole, r in zip(wholes, rows, strict=True)))
        for group, rows in zip(groups, places, strict=True)
    ]
    for rows, gradients in zip(places, side_by_side(calls, q_THD), strict=True):
        for whole, r, gradient in zip(wholes, rows, gradients, strict=True):
            whole.put(r, gradient)
    dq, dk, dv = (
        whole.filled(ranges)
        for whole, ranges in zip(wholes, (plan.q_ranges, plan.k_ranges, plan.k_ranges), strict=True)
    )
    return dq, dk, dv


class _Whole:
    """A tensor in the making, of which each call computes other rows; those of no call become 0.

    Calls may write their rows to their place themselves. A single call that has all rows makes the tensor.
    """

    def __init__(self, like: Tensor, rows: list[Rows]) -> None:
        has_all = len(rows) == 1 and isinstance(rows[0], slice) and num_rows(rows[0]) == len(like)
        self.tensor = None if has_all else like.new_empty(like.shape)

    def place(self, rows: Rows) -> Tensor | None:
        """Where a call may write its rows."""
        return self.tensor[rows] if self.tensor is not None and isinstance(rows, slice) else None

    def put(self, rows: Rows, part: Tensor) -> None:
        """What a call gave for its rows."""
        place = self.place(rows)
        if self.tensor is None:
            self.tensor = part
        elif place is None or place.data_ptr() != part.data_ptr():
            self.tensor[rows] = part

    def filled(self, ranges: list[tuple[int, int]]) -> Tensor:
        """The tensor; rows outside the ranges, which are in order, have been of no call."""
        assert self.tensor is not None
        end = 0
        for start, stop in [*ranges, (len(self.tensor), len(self.tensor))]:
            if start > end:
                self.tensor[end:start] = 0
            end = max(end, stop)
        return self.tensor


class _Sum:
    """A tensor to which each call adds: rows may be of several (window tiles share keys, ring steps share
    queries). It starts as what is given, as the part of a call that has all rows, or as 0.
    """

    def __init__(self, total: Tensor | None, like: Tensor) -> None:
        self.total, self.like = total, like

    def place(self, rows: Rows) -> None:
        """Calls write and do not add."""

    def put(self, rows: Rows, part: Tensor) -> None:
        """Add what a call gave for its rows."""
        if self.total is None and isinstance(rows, slice) and len(part) == len(self.like):
            self.total = part
            return
        if self.total is None:
            self.total = torch.zeros_like(self.like)
        if isinstance(rows, slice):
            self.total[rows] += part
        else:
            self.total.index_add_(0, rows, part.to(self.total.dtype))

    def filled(self, ranges: list[tuple[int, int]]) -> Tensor:
        """The sum."""
        return torch.zeros_like(self.like) if self.total is None else self.total


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
