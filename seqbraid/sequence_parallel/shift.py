"""Tokens further along in their own sample, wherever they live: what layers of multi-token prediction read.

At depth k the slot of a token reads the row of the token k places on in its sample. Rows of other ranks come
in one exchange for all depths: before a cut it is the first few rows of the next segment, or of several
segments where these are shorter. What stands in the last k tokens of a sample has nothing to read: zeros.

Letters: T local slots, K depths, N tokens of the row, H rows that arrive, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..comm.group import Group
from ..comm.rows import RowPlan, exchange_rows
from ..layout import SequenceLayout


@dataclass(frozen=True)
class ShiftPlan:
    """Where a rank finds the tokens 1 to K places on from its own."""

    rows: RowPlan
    """What ranks send to each other; nothing to themselves."""
    sources_KT: Tensor
    """For each depth and slot its source: a local row, behind those an arriving one, behind those nothing."""
    has_source_KT: Tensor
    """Whether there is one: the slot's token is not among the last k of its sample, and not padding."""

    @staticmethod
    def of(layout: SequenceLayout, depths: int, rank: int, tp: int = 1) -> ShiftPlan:
        """The plan of a rank, of those that share a row's tokens out among them: each rank of the layout has
        `tp` of them, which hold equal parts of its slots.
        """
        size, num_ranks = layout.num_local_tokens // tp, layout.num_ranks * tp
        slot_N = layout.slot_of_token
        left_N = np.concatenate([np.arange(length)[::-1] for length in layout.lengths])
        source_KN = np.full((depths, len(slot_N)), -1)
        for depth in range(1, depths + 1):
            to_N = np.flatnonzero(left_N >= depth)
            source_KN[depth - 1, to_N] = slot_N[to_N + depth]
        user_N = slot_N // size
        crosses_KN = (source_KN >= 0) & (source_KN // size != user_N)
        # A row goes to a rank once, however many of its slots read it.
        pairs = np.unique(
            np.broadcast_to(user_N, source_KN.shape)[crosses_KN] * (size * num_ranks) + source_KN[crosses_KN]
        )
        user_J, source_J = np.divmod(pairs, size * num_ranks)
        leaving, arriving = source_J // size == rank, user_J == rank
        rows = RowPlan(
            rows=torch.from_numpy(source_J[leaving] - rank * size),
            send=np.bincount(user_J[leaving], minlength=num_ranks).tolist(),
            receive=np.bincount(source_J[arriving] // size, minlength=num_ranks).tolist(),
            is_local=not len(pairs),
        )
        own_N, halo_H = np.flatnonzero(user_N == rank), source_J[arriving]
        found_KN = source_KN[:, own_N]
        is_here_KN = found_KN // size == rank
        place_KN = np.where(is_here_KN, found_KN - rank * size, size + np.searchsorted(halo_H, found_KN))
        place_KN[found_KN < 0] = size + len(halo_H)
        sources_KT = np.full((depths, size), size + len(halo_H))
        sources_KT[:, slot_N[own_N] - rank * size] = place_KN
        sources = torch.from_numpy(sources_KT)
        return ShiftPlan(rows, sources, sources < size + len(halo_H))

    def to(self, device: torch.device) -> ShiftPlan:
        """The plan with its indices on another device."""
        rows = replace(self.rows, rows=self.rows.rows.to(device))
        return ShiftPlan(rows, self.sources_KT.to(device), self.has_source_KT.to(device))


def shifted_rows(x_TC: Tensor, plan: ShiftPlan, group: Group, name: str) -> list[Tensor]:
    """For each depth the rows `[T, …]` of the tokens that many places on; differentiable, and zero where
    there is none. Every rank of the group takes part.
    """
    parts = [x_TC]
    if not plan.rows.is_local:
        parts.append(exchange_rows(x_TC, plan.rows, group, name))
    pool = torch.cat([*parts, x_TC.new_zeros(1, *x_TC.shape[1:])])
    return [pool.index_select(0, source_T) for source_T in plan.sources_KT]
