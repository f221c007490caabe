"""Block attention on packed rows: explicit boundaries, LSE out, and a backward that takes the global out and
LSE.

Letters: T query tokens, S key tokens, H query heads, G key/value heads (G divides H), D head size, B equal
blocks.

A row is covered by *blocks*: query rows `[q_start, q_stop)` against key rows `[k_start, k_stop)`. The plan of
a single process has one causal block per sequence; a ring step has others. Within one plan every query row
belongs to at most one block, so nothing is merged here; rows of no block get out 0 and LSE −inf, and no
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Block(NamedTuple):
    """Query rows against key rows; `shift` is the first query's position minus the first key's.

    Query i sees key j when `j <= i + shift` (if causal) and `j > i + shift - window` (if there is a window).
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    shift: int = 0
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int, bool, int, int | None]:
        """What two blocks must share to be computed in one kernel call."""
        return (self.q_stop - self.q_start, self.k_stop - self.k_start, self.causal, self.shift, self.window)


class BlockGroup(NamedTuple):
    """Blocks of one shape, and the rows that stack them: slices where they lie side by side, else indices."""

    causal: bool
    num_blocks: int
    q_rows: slice | Tensor
    k_rows: slice | Tensor
    mask: Tensor | None
    """`[q, k]`, True where seen; None where the kernel's causal flag, or no mask at all, says it."""

    @staticmethod
    def of(blocks: Sequence[Block], device: torch.device) -> BlockGroup:
        queries, keys, causal, shift, window = blocks[0].shape
        mask = None
        if window is not None or (causal and shift):
            distance = (
                torch.arange(queries, device=device)[:, None] + shift - torch.arange(keys, device=device)
            )
            mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
            mask = mask if window is None else mask & (distance < window)
        return BlockGroup(
            causal and mask is None,
            len(blocks),
            _rows([block.q_start for block in blocks], queries, device),
            _rows([block.k_start for block in blocks], keys, device),
            mask,
        )

    def stack(self, x_THD: Tensor, rows: slice | Tensor) -> Tensor:
        """`[T, H, D]` to `[B, H, rows, D]`."""
        stacked: Tensor = x_THD[rows].unflatten(0, (self.num_blocks, -1))
        return stacked.transpose(1, 2)


def _rows(starts: Sequence[int], size: int, device: torch.device) -> slice | Tensor:
    if all(start == starts[0] + i * size for i, start in enumerate(starts)):
        return slice(starts[0], starts[0] + len(starts) * size)
    return (torch.tensor(starts, device=device)[:, None] + torch.arange(size, device=device)).flatten()


@dataclass(frozen=True)
class BlockPlan:
    """All blocks of one call; the layers of a step share one plan, and its rows are made once per device."""

    blocks: tuple[Block, ...]
    _groups: dict[torch.device, list[BlockGroup]] = field(default_factory=dict, compare=False, repr=False)

    def groups(self, device: torch.device) -> list[BlockGroup]:
        """The blocks, those of one shape together."""
        if device not in self._groups:
            by_shape: dict[tuple[Any, ...], list[Block]] = {}
            for block in self.blocks:
                by_shape.setdefault(block.shape, []).append(block)
            self._groups[device] = [BlockGroup.of(group, device) for group in by_shape.values()]
        return self._groups[device]

    @staticmethod
    def causal(segments: Sequence[tuple[int, int]], window: int | None = None) -> BlockPlan:
        """One whole sequence per `(offset, length)`; a query sees itself and what came before it there."""
        blocks: list[Block] = []
        for offset, length in segments:
            if window is None or window >= length:
                blocks.append(Block(offset, offset + length, offset, offset + length, causal=True))
                continue
            # Query tiles one window wide against two windows of keys: memory and work in proportion to the
            # window.
            for begin in range(0, length, window):
                end, first = min(begin + window, length), max(begin - window, 0)
                blocks.append(
                    Block(
                        offset + begin,
                        offset + end,
                        offset + first,
                        offset + end,
                        True,
                        begin - first,
                        window,
                    )
                )
        return BlockPlan(tuple(blocks))


def block_attention(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, plan: BlockPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every block; returns out `[T, H, D]` and its natural-log LSE `[H, T]`."""
    out_THD = q_THD.new_zeros(*q_THD.shape[:-1], v_SGD.shape[-1])
    lse_HT = q_THD.new_full(q_THD.shape[1::-1], -torch.inf, dtype=wide_dtype(q_THD))
    for group in plan.groups(q_THD.device):
        out, lse = _attend(q_THD, k_SGD, v_SGD, group, scale)
        out_THD[group.q_rows] = out
        lse_HT[:, group.q_rows] = lse
    return out_THD, lse_HT


def merge_block_attention(
    out_THD: Tensor,
    lse_HT: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    plan: BlockPlan,
    scale: float,
) -> None:
    """Add blocks over further keys to an out and LSE, in place; both should be float32 or wider."""
    for group in plan.groups(q_THD.device):
        part, part_lse = _attend(q_THD, k_SGD, v_SGD, group, scale)
        before = lse_HT[:, group.q_rows]
        after = torch.logaddexp(before, part_lse)
        # −inf before: these rows had seen no key yet, and their share of the sum is nothing.
        kept = out_THD[group.q_rows] * (before - after).exp().T[..., None]
        out_THD[group.q_rows] = kept.addcmul_(part.to(kept.dtype), (part_lse - after).exp().T[..., None])
        lse_HT[:, group.q_rows] = after


def block_attention_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    plan: BlockPlan,
    scale: float,
) -> None:
    """Add the gradients of q, k, v through these blocks to `gradients`, given the out and LSE of *all* keys.

    With the blocks' own out and LSE instead, the gradient that flows through the merge would be lost.
    """
    dq_THD, dk_SGD, dv_SGD = gradients
    for group in plan.groups(q_THD.device):
        q, out, dout = (group.stack(x, group.q_rows) for x in (q_THD, out_THD, dout_THD))
        k, v = (group.stack(x, group.k_rows) for x in (k_SGD, v_SGD))
        lse = lse_HT[:, group.q_rows].unflatten(1, (group.num_blocks, -1)).transpose(0, 1).contiguous()
        dq, dk, dv = _backward(dout, q, k, v, out, lse, group, scale)
        _add_rows(dq_THD, group.q_rows, dq)
        _add_rows(dk_SGD, group.k_rows, dk)
        _add_rows(dv_SGD, group.k_rows, dv)


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


def _attend(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, group: BlockGroup, scale: float
) -> tuple[Tensor, Tensor]:
    """Out `[rows, H, D]` and LSE `[H, rows]` of the blocks of one shape."""
    q, k, v = (group.stack(q_THD, group.q_rows), *(group.stack(x, group.k_rows) for x in (k_SGD, v_SGD)))
    out, lse = _forward(q, k, v, group, scale)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1).to(wide_dtype(q))


def _add_rows(total: Tensor, rows: slice | Tensor, part_BHSD: Tensor) -> None:
    """Rows may belong to several blocks (window tiles share keys, ring steps share queries): they add up."""
    part = part_BHSD.transpose(1, 2).flatten(0, 1).to(total.dtype)
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part)


def _forward(q: Tensor, k: Tensor, v: Tensor, group: BlockGroup, scale: float) -> tuple[Tensor, Tensor]:
    wide = q.shape[-1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, _widened(v, wide), 0.0, group.causal, attn_mask=_additive(group.mask, q.dtype), scale=scale
    )
    return out[..., : v.shape[-1]], lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: BlockGroup, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = q.shape[-1]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _widened(dout, wide),
        q,
        k,
        _widened(v, wide),
        _widened(out, wide),
        lse,
        0.0,
        group.causal,
        attn_mask=_additive(group.mask, q.dtype),
        scale=scale,
    )
    return dq, dk, dv[..., : v.shape[-1]]


def _widened(x: Tensor, size: int) -> Tensor:
    """Zero-pad the value head to the key head's size, which the kernel wants."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[
        None, None
    ]
