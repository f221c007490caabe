"""Which queries meet which keys: blocks of rows, and how they are gathered into kernel calls.

Letters: T query tokens, S key tokens, H query heads, G key/value heads (G divides H), D head size, B
equal blocks.

A row is covered by *blocks*: query rows `[q_start, q_stop)` against key rows `[k_start, k_stop)`. The plan of
a single process has one causal block per sequence; a ring step has others. Within one plan every query row
belongs to at most one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout.placement import ROUND
from .attention_kernels import (
    DenseShape,
    VarlenShape,
    dense_backward,
    dense_forward,
    uses_varlen,
)
from .flash_impl import TORCH, FlashImpl, flash_impl
from .kernels import DEFAULT, Kernels
from .merge import RowIndex


def rounded(rows: int) -> int:
    """The next of 16 to 32 sizes per doubling, so that shapes recur and little is computed in vain."""
    grain = min(max(rows // 32, 128), ROUND)
    grain = 1 << (grain.bit_length() - 1)
    return -(-rows // grain) * grain


ROUND_PAIRS, ANY_PAIRS = 2**21, 2**26
"""Blocks of one shape with at least this many query-key pairs get a dense call of their own, if round or of
any shape, as do blocks side by side with as many between them; the others share one varlen call. Below
ANY_PAIRS the layers of one step do not earn back what a new shape costs."""


FEW_CALLS = 8
"""Up to so many varlen calls are made instead of gathering rows for one, which takes longer."""


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


class DenseGroup(NamedTuple):
    """Blocks of one shape, stacked."""

    num_blocks: int
    q_rows: RowIndex
    k_rows: RowIndex
    shape: DenseShape
    is_round: bool = False
    """Whether a single block is made longer, to a round shape, by the rows that happen to lie behind it: no
    query that counts sees them, and what comes out for them is thrown away."""

    @staticmethod
    def of(blocks: Sequence[Block], device: torch.device, is_round: bool = False) -> DenseGroup:
        queries, keys, causal, shift, window = blocks[0].shape
        mask = None
        if window is not None or (causal and shift):
            distance = (
                torch.arange(queries, device=device)[:, None] + shift - torch.arange(keys, device=device)
            )
            mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
            mask = mask if window is None else mask & (distance < window)
        return DenseGroup(
            len(blocks),
            _rows([(block.q_start, block.q_stop) for block in blocks], device),
            _rows([(block.k_start, block.k_stop) for block in blocks], device),
            DenseShape(causal and mask is None, mask),
            is_round,
        )

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Out `[rows, H, D]` and LSE `[H, rows]` of the group's query rows; the kernels choose where."""
        q = self._stack(q_THD, self.q_rows)
        k, v = self._stack(k_SGD, self.k_rows), self._stack(v_SGD, self.k_rows)
        out, lse = dense_forward(q, k, v, self.shape, scale)
        lse = lse[..., : self._num_rows(self.q_rows)]
        return self._unstack(out, self.q_rows), lse.transpose(0, 1).flatten(1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, scale: float,
        *places: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of the group's query, key and value rows; the kernels choose where."""
        dout, q, out = (self._stack(x, self.q_rows) for x in (dout, q, out))
        k, v = self._stack(k, self.k_rows), self._stack(v, self.k_rows)
        lse = lse_HT[:, self.q_rows].unflatten(1, (self.num_blocks, -1)).transpose(0, 1)
        # A softmax over infinitely much is 0: queries that fill the block up have no gradient to give.
        lse = F.pad(lse, (0, q.shape[2] - lse.shape[2]), value=torch.inf).contiguous()
        dq, dk, dv = dense_backward(dout, q, k, v, out, lse, self.shape, scale)
        return self._unstack(dq, self.q_rows), self._unstack(dk, self.k_rows), self._unstack(dv, self.k_rows)

    def _num_rows(self, rows: RowIndex) -> int:
        return num_rows(rows) // self.num_blocks

    def _stack(self, x_THD: Tensor, rows: RowIndex) -> Tensor:
        """`[T, H, D]` to `[B, H, rows, D]`."""
        if not self.is_round:
            stacked: Tensor = x_THD[rows].unflatten(0, (self.num_blocks, -1))
            return stacked.transpose(1, 2)
        assert isinstance(rows, slice) and self.num_blocks == 1
        filled = x_THD[rows.start : rows.start + rounded(rows.stop - rows.start)]
        missing = rounded(rows.stop - rows.start) - len(filled)
        return (F.pad(filled, (0, 0, 0, 0, 0, missing)) if missing else filled)[None].transpose(1, 2)

    def _unstack(self, x_BHSD: Tensor, rows: RowIndex) -> Tensor:
        return x_BHSD[:, :, : self._num_rows(rows)].transpose(1, 2).flatten(0, 1)


class VarlenGroup(NamedTuple):
    """Blocks of any shapes, one behind the other."""

    q_rows: RowIndex
    k_rows: RowIndex
    shape: VarlenShape
    impl: FlashImpl

    @staticmethod
    def of(blocks: Sequence[Block], device: torch.device, impl: FlashImpl) -> VarlenGroup:
        queries, keys = [block.shape[0] for block in blocks], [block.shape[1] for block in blocks]
        cu_q, cu_k = (
            torch.tensor([0, *n], device=device).cumsum(0, dtype=torch.int32) for n in (queries, keys)
        )
        return VarlenGroup(
            _rows([(block.q_start, block.q_stop) for block in blocks], device),
            _rows([(block.k_start, block.k_stop) for block in blocks], device),
            VarlenShape(cu_q, cu_k, max(queries), max(keys), blocks[0].causal, blocks[0].window),
            impl,
        )

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Out `[rows, H, D]`, in the given place if the kernel can, and LSE `[H, rows]` of the
        group's query rows.
        """
        q, k, v = q_THD[self.q_rows], k_SGD[self.k_rows], v_SGD[self.k_rows]
        return self.impl.forward(q, k, v, self.shape, scale, out)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, scale: float,
        *places: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of the group's query, key and value rows, in the given places if the kernel can."""
        dout, q, out = (x[self.q_rows] for x in (dout, q, out))
        k, v, lse = k[self.k_rows], v[self.k_rows], lse_HT[:, self.q_rows].contiguous()
        return self.impl.backward(dout, q, k, v, out, lse, self.shape, scale, *places)


def num_rows(rows: RowIndex) -> int:
    """How many rows are selected."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def gaps(ranges: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """What lies before, between and behind ranges, which are in order, of so many rows."""
    found, end = [], 0
    for start, stop in [*ranges, (total, total)]:
        if start > end:
            found.append((end, start))
        end = max(end, stop)
    return found


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> RowIndex:
    if all(start == stop for (_, stop), (start, _) in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(device)


def _are_neighbours(blocks: Sequence[Block]) -> bool:
    """Whether these can be stacked without being gathered."""
    return len(_stretches(sorted(blocks))) == 1


def _stretches(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks in order, parted where their query or key rows do not lie side by side."""
    stretches: list[list[Block]] = []
    for block in blocks:
        last = stretches[-1][-1] if stretches else None
        if last is not None and (last.q_stop, last.k_stop) == (block.q_start, block.k_start):
            stretches[-1].append(block)
        else:
            stretches.append([block])
    return stretches


@dataclass(frozen=True)
class BlockPlan:
    """All blocks of one call; the layers of a step share one plan, and its rows are made once per device."""

    blocks: tuple[Block, ...]
    _groups: dict[tuple[torch.device, FlashImpl | None], list[DenseGroup | VarlenGroup]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def keys_are_apart(self) -> bool:
        """Whether no two blocks share a key."""
        return all(stop <= start for (_, stop), (start, _) in pairwise(self.k_ranges))

    @cached_property
    def q_ranges(self) -> list[tuple[int, int]]:
        """Rows of queries that have a block, in order."""
        return sorted((block.q_start, block.q_stop) for block in self.blocks)

    @cached_property
    def k_ranges(self) -> list[tuple[int, int]]:
        """Rows of keys that have a block, in order."""
        return sorted((block.k_start, block.k_stop) for block in self.blocks)

    @cached_property
    def windowed(self) -> bool:
        """Whether any block has a window."""
        return any(block.window is not None for block in self.blocks)

    def groups(
        self, q_THD: Tensor, v_SGD: Tensor, kernels: Kernels = DEFAULT
    ) -> list[DenseGroup | VarlenGroup]:
        """The kernel calls for these tensors."""
        impl = flash_impl(q_THD, v_SGD, self.windowed, kernels) if uses_varlen(q_THD, v_SGD) else None
        key = (q_THD.device, impl)
        if key not in self._groups:
            self._groups[key] = self._grouped(*key)
        return self._groups[key]

    def _grouped(self, device: torch.device, impl: FlashImpl | None) -> list[DenseGroup | VarlenGroup]:
        by_shape: dict[tuple[int, int, bool, int, int | None], list[Block]] = {}
        for block in self.blocks:
            by_shape.setdefault(block.shape, []).append(block)
        if impl is None:
            return [DenseGroup.of(blocks, device) for blocks in by_shape.values()]
        # Decided by the shape alone: a choice that remembered shapes would change bits after a restart.
        groups: list[DenseGroup | VarlenGroup] = []
        short: dict[tuple[bool, int | None], list[Block]] = {}
        for (queries, keys, causal, shift, window), blocks in by_shape.items():
            assert not causal or shift == keys - queries, (
                "the varlen kernel aligns causal blocks at their ends"
            )
            # Queries behind the last one change nothing, and keys behind it are seen by none of a causal
            # block.
            can_fill = causal or keys % ROUND == 0
            is_many = len(blocks) * queries * keys >= ANY_PAIRS and _are_neighbours(blocks)
            if window is not None or shift or impl is not TORCH:
                short.setdefault((causal, window), []).extend(blocks)
            elif can_fill and queries * keys >= ROUND_PAIRS:
                groups += [DenseGroup.of([block], device, is_round=True) for block in blocks]
            elif can_fill and queries % ROUND == 0 and len(blocks) * queries * keys >= ROUND_PAIRS:
                groups.append(DenseGroup.of(blocks, device))
            elif is_many:
                groups.append(DenseGroup.of(sorted(blocks), device))
            elif queries * keys >= ANY_PAIRS:
                groups += [DenseGroup.of([block], device) for block in blocks]
            else:
                short.setdefault((causal, window), []).extend(blocks)
        for blocks in short.values():
            stretches = _stretches(sorted(blocks))
            # A few calls on rows as they lie are cheaper than one on rows that must be gathered first.
            parts = stretches if len(stretches) <= FEW_CALLS else [sorted(blocks)]
            groups += [VarlenGroup.of(part, device, impl) for part in parts]
        return groups

    @staticmethod
    def whole(segments: Sequence[tuple[int, int]]) -> BlockPlan:
        """All rows of a segment `[start, stop)` see each other."""
        return BlockPlan(tuple(Block(start, stop, start, stop, False) for start, stop in segments))

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
