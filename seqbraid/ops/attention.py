"""Block attention on packed rows: LSE out, and a backward that takes the global out and LSE.

Letters: T query tokens, S key tokens, H query heads, G key/value heads (G divides H), D head size.

Rows of no block get out 0 and LSE −inf, and no gradient.

The functions do it at once. The classes do it in two steps, between which other blocks can be started: with
`ahead`, kernels wait for what was launched when the object was made, and not for blocks started before them
(see `streams.py`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .blocks import BlockPlan, gaps, num_rows
from .kernels import DEFAULT, Kernels
from .merge import RowIndex, add_rows, merge_rows
from .streams import Calls, take_turns


def block_attention(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: BlockPlan, scale: float, kernels: Kernels = DEFAULT
) -> tuple[Tensor, Tensor]:
    """Attention of every block; returns out `[T, H, D]` and its natural-log LSE `[H, T]`."""
    return BlockForward(q_THD, k_SGD, v_SGD, plan, scale, kernels).start().finish()


def merge_block_attention(
    out_THD: Tensor,
    lse_HT: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    plan: BlockPlan,
    scale: float,
    kernels: Kernels = DEFAULT,
) -> None:
    """Add blocks over further keys to an out and LSE, in place; out is rounded to what it is kept in."""
    BlockForward(q_THD, k_SGD, v_SGD, plan, scale, kernels, adds=True).start().merge(out_THD, lse_HT, out_THD)


def block_attention_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    plan: BlockPlan,
    scale: float,
    kernels: Kernels = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through these blocks, given the out and LSE of *all* keys that a query row saw.

    With the blocks' own out and LSE instead, the gradient that flows through the merge would be lost.
    """
    backward = BlockBackward(dout_THD, q_THD, k_SGD, v_SGD, (out_THD, lse_HT), plan, scale, kernels)
    return backward.start().finish()


class BlockForward:
    """Attention of every block: `start`, then `finish`; or `merge`, if it `adds` to that of other keys."""

    def __init__(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: BlockPlan, scale: float,
        kernels: Kernels = DEFAULT, *, ahead: bool = False, adds: bool = False,
    ) -> None:  # fmt: skip
        self._plan, self._groups, self._kernels = plan, plan.groups(q_THD, v_SGD, kernels), kernels
        rows = [group.q_rows for group in self._groups]
        apart = take_turns(len(rows), q_THD, ahead)
        self._out = None if adds else _Whole(q_THD[..., :1].expand(-1, -1, v_SGD.shape[2]), rows, apart)
        self._lse_HT = None if adds else _no_keys(q_THD)
        calls = [
            partial(group.forward, q_THD, k_SGD, v_SGD, scale, _place(self._out, group.q_rows))
            for group in self._groups
        ]
        self._calls = Calls(calls, q_THD, ahead)

    def start(self) -> BlockForward:
        """Launch the kernels."""
        self._calls.start()
        return self

    def finish(self) -> tuple[Tensor, Tensor]:
        """Out and LSE."""
        assert self._out is not None and self._lse_HT is not None
        with self._calls.results() as results:
            for group, (out, lse) in zip(self._groups, results, strict=True):
                self._lse_HT[:, group.q_rows] = lse
                self._out.put(group.q_rows, out)
        return self._out.filled(self._plan.q_ranges), self._lse_HT

    def merge(self, out_THD: Tensor, lse_HT: Tensor, into_THD: Tensor) -> None:
        """Write the out of the keys before and of these to `into`, which may be the one before; the LSE
        changes in place.
        """
        with self._calls.results() as results:
            for group, (out, lse) in zip(self._groups, results, strict=True):
                merge_rows(out_THD, lse_HT, group.q_rows, out, lse, into_THD, self._kernels)
        _copy_gaps(out_THD, into_THD, self._plan.q_ranges)


class BlockBackward:
    """`block_attention_backward`: `start`, then `finish`; or `add`, if it `adds` to the gradient of q."""

    def __init__(
        self, dout_THD: Tensor, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, seen: tuple[Tensor, Tensor],
        plan: BlockPlan, scale: float, kernels: Kernels = DEFAULT, *, ahead: bool = False,
        adds: bool = False,
    ) -> None:  # fmt: skip
        """`seen` is the out [T, H, D] and the LSE [H, T] of all keys that a query sees."""
        # Most keys first: a sum that starts with all of them needs no zeros.
        self._groups = sorted(plan.groups(q_THD, v_SGD, kernels), key=lambda group: -num_rows(group.k_rows))
        q_rows, k_rows = [group.q_rows for group in self._groups], [group.k_rows for group in self._groups]
        self._plan, self._kernels = plan, kernels
        apart = take_turns(len(q_rows), q_THD, ahead)
        self._dq = None if adds else _Whole(q_THD, q_rows, apart)
        self._dkv = [
            _Whole(x, k_rows, apart) if plan.keys_are_apart else _Sum(x, apart) for x in (k_SGD, v_SGD)
        ]
        tensors = (dout_THD, q_THD, k_SGD, v_SGD, *seen, scale)
        calls = [
            partial(
                group.backward,
                *tensors,
                _place(self._dq, group.q_rows),
                *(_place(whole, group.k_rows) for whole in self._dkv),
            )
            for group in self._groups
        ]
        self._calls = Calls(calls, q_THD, ahead)

    def start(self) -> BlockBackward:
        """Launch the kernels."""
        self._calls.start()
        return self

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        assert self._dq is not None
        with self._calls.results() as results:
            for group, (dq, _, _) in zip(self._groups, results, strict=True):
                self._dq.put(group.q_rows, dq)
            dk, dv = self._keys_and_values(results)
        return self._dq.filled(self._plan.q_ranges), dk, dv

    def add(self, dq_THD: Tensor, into_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of k and v; that of q and the `dq` before it together are written to `into`, which may be
        the latter.
        """
        with self._calls.results() as results:
            for group, (dq, _, _) in zip(self._groups, results, strict=True):
                add_rows(dq_THD, group.q_rows, dq, into_THD, self._kernels)
            dk, dv = self._keys_and_values(results)
        _copy_gaps(dq_THD, into_THD, self._plan.q_ranges)
        return dk, dv

    def _keys_and_values(self, results: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        (dk, dv), self._dkv = self._dkv, []
        for group, (_, k_part, v_part) in zip(self._groups, results, strict=True):
            dk.put(group.k_rows, k_part)
            dv.put(group.k_rows, v_part)
        return dk.filled(self._plan.k_ranges), dv.filled(self._plan.k_ranges)


class _Whole:
    """A tensor in the making, of which each call computes other rows; those of no call become 0.

    Calls may write their rows to their place themselves. What a single call gives for all rows is the tensor,
    unless calls are `apart`, on streams and memory of their own.
    """

    def __init__(self, like: Tensor, rows: list[RowIndex], apart: bool) -> None:
        has_all = len(rows) == 1 and isinstance(rows[0], slice) and num_rows(rows[0]) == len(like)
        self.tensor = None if has_all and not apart else like.new_empty(like.shape)

    def place(self, rows: RowIndex) -> Tensor | None:
        """Where a call may write its rows."""
        return self.tensor[rows] if self.tensor is not None and isinstance(rows, slice) else None

    def put(self, rows: RowIndex, part: Tensor) -> None:
        """What a call gave for its rows."""
        place = self.place(rows)
        if self.tensor is None:
            self.tensor = part
        elif place is None or place.data_ptr() != part.data_ptr():
            self.tensor[rows] = part

    def filled(self, ranges: list[tuple[int, int]]) -> Tensor:
        """The tensor; rows outside the ranges, which are in order, have been of no call."""
        assert self.tensor is not None
        for start, stop in gaps(ranges, len(self.tensor)):
            self.tensor[start:stop] = 0
        return self.tensor


class _Sum:
    """A tensor to which each call adds: several may have the same keys. It starts as the part of a call that
    has all rows, copied if calls are `apart`, or as 0.
    """

    def __init__(self, like: Tensor, apart: bool) -> None:
        self.like, self.apart = like, apart
        self.total: Tensor | None = None

    def put(self, rows: RowIndex, part: Tensor) -> None:
        """Add what a call gave for its rows."""
        if self.total is None and isinstance(rows, slice) and len(part) == len(self.like):
            self.total = part.clone() if self.apart else part
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


def _place(whole: _Whole | _Sum | None, rows: RowIndex) -> Tensor | None:
    """Where a call may write its rows: it does not add."""
    return whole.place(rows) if isinstance(whole, _Whole) else None


def _copy_gaps(source: Tensor, into: Tensor, ranges: list[tuple[int, int]]) -> None:
    """Rows outside the ranges, unless both are one tensor."""
    if source.data_ptr() != into.data_ptr():
        for start, stop in gaps(ranges, len(into)):
            into[start:stop] = source[start:stop]


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


def _no_keys(q_THD: Tensor) -> Tensor:
    """The LSE `[H, T]` of queries that have seen nothing."""
    return q_THD.new_full(q_THD.shape[1::-1], -torch.inf, dtype=wide_dtype(q_THD))


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums over blocks are kept in: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
