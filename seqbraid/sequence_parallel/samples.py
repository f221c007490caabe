"""Sums over the tokens of each sample, wherever they are: differentiable, and counted once.

Letters: T tokens of this rank, N samples of the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.group import Group
from ..layout import PADDING, SequenceLayout


class LocalSamples(NamedTuple):
    """Of which sample this rank's slots are."""

    of_slot_T: Tensor
    """0 in padding slots, which `is_real_T` tells."""
    is_real_T: Tensor
    order: Tensor
    """The real slots, sample by sample."""
    counts_N: Tensor
    """How many each sample has here."""

    @staticmethod
    def of(layout: SequenceLayout, rank: int, device: torch.device) -> LocalSamples:
        """Made from the layout, without communication."""
        index_T = layout.index(rank)
        is_real_T = index_T != PADDING
        ends_N = torch.tensor(layout.cu_seqlens[1:])
        of_slot_T = torch.searchsorted(ends_N, index_T.clamp(min=0), right=True)
        slots = is_real_T.nonzero()[:, 0]
        order = slots[of_slot_T[slots].argsort(stable=True)]
        counts_N = of_slot_T[slots].bincount(minlength=len(ends_N))
        return LocalSamples(*(x.to(device) for x in (of_slot_T, is_real_T, order, counts_N)))

    def sums(self, values_T: Tensor) -> Tensor:
        """`[N]` in float64, of this rank's tokens; the same bits each time, as no sum is scattered."""
        return torch.segment_reduce(values_T.double()[self.order], "sum", lengths=self.counts_N)

    def spread(self, values_N: Tensor) -> Tensor:
        """`[T]`: of each token its sample's; 0 in padding slots."""
        return values_N[self.of_slot_T] * self.is_real_T


def sums_on_first(values_T: Tensor, samples: LocalSamples, group: Group) -> Tensor:
    """`[N]` sums over all tokens of each sample on the first rank of a group, and `[0]` on all others, so
    that what is made of a sample's sum is counted once. Every rank must take part in the backward.
    """
    return _SumsOnFirst.apply(values_T, samples, group)  # type: ignore[no-untyped-call, no-any-return]


def sums_at_tokens(values_T: Tensor, samples: LocalSamples, group: Group) -> Tensor:
    """`[T]`: at each token the sum over all tokens of its sample, on any rank of a group. Every rank must
    take part in the backward.
    """
    return _SumsAtTokens.apply(values_T, samples, group)  # type: ignore[no-untyped-call, no-any-return]


class _SumsOnFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_T: Tensor, samples: LocalSamples, group: Group) -> Tensor:
        ctx.samples, ctx.group, ctx.dtype = samples, group, values_T.dtype
        sums_N = group.all_reduce(samples.sums(values_T)).to(values_T.dtype)
        return sums_N if group.rank == 0 else sums_N[:0].clone()

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor, None, None]:
        first = ctx.group.rank == 0
        dsums_N = dsums.contiguous() if first else dsums.new_zeros(len(ctx.samples.counts_N))
        return ctx.samples.spread(ctx.group.all_reduce(dsums_N)).to(ctx.dtype), None, None


class _SumsAtTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_T: Tensor, samples: LocalSamples, group: Group) -> Tensor:
        ctx.samples, ctx.group, ctx.dtype = samples, group, values_T.dtype
        return _at_tokens(values_T, samples, group)

    @staticmethod
    def backward(ctx: Any, dsums_T: Tensor) -> tuple[Tensor, None, None]:
        # Each token's number has a part in each token's sum: the operation is its own transpose.
        return _at_tokens(dsums_T, ctx.samples, ctx.group), None, None


def _at_tokens(values_T: Tensor, samples: LocalSamples, group: Group) -> Tensor:
    return samples.spread(group.all_reduce(samples.sums(values_T))).to(values_T.dtype)
