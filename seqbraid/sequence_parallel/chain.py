"""Chains: all segments of one sequence in sequence order, wherever they live; who must tell whom what.

Along a chain the rule is affine, S_in_{j+1} = M_j S_in_j + S0_j from S_in_1 = 0, so a rank that holds a
segment needs (M, S0) of every segment before it in the chain, without M of the first. The gradient runs back
in the same way, dS_out_j = M_{j+1}ᵀ dS_out_{j+1} + dS_in_{j+1} from dS_out_n = 0, where dS_in is what a
segment alone would pass on: needed is (M, dS_in) of every segment after it, without M of the last.

Pure arithmetic from the layout, the same knowledge on every rank. Letters: N segments of this rank, W width
of the convolution, J open segments (of chains of more than one) of all ranks, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..comm.rows import RowPlan
from ..layout import SequenceLayout

Ints = NDArray[np.int64]
"""An array of 64-bit integers."""


class Chains(NamedTuple):
    """The open segments of all ranks, chain by chain, in sequence order."""

    chain_J: Ints
    position_J: Ints
    """Place in its chain."""
    count_J: Ints
    """Segments of its chain."""
    rank_J: Ints
    local_J: Ints
    """Place among the segments of its rank."""
    row_J: Ints
    """Its first row among the real tokens of its rank."""
    start_J: Ints
    """Its first token in its sequence."""
    token_J: Ints
    """Its first token in the packed row."""

    @staticmethod
    def of(layout: SequenceLayout) -> Chains:
        """The chains of a layout."""
        ranks = [
            np.array(layout.segments(rank), dtype=np.int64).reshape(-1, 5) for rank in range(layout.num_ranks)
        ]
        sequence, start, _, rank, _ = np.concatenate(ranks).T
        local = np.concatenate([np.arange(len(segments)) for segments in ranks])
        lengths = [segments[:, 2] - segments[:, 1] for segments in ranks]
        row = np.concatenate([np.cumsum(some) - some for some in lengths])
        count = np.bincount(sequence, minlength=len(layout.lengths))
        order = np.lexsort((start, sequence))
        order = order[count[sequence[order]] > 1]
        sequence, start, rank, local, row = (x[order] for x in (sequence, start, rank, local, row))
        _, first, chain = np.unique(sequence, return_index=True, return_inverse=True)
        return Chains(
            chain_J=chain,
            position_J=np.arange(len(order)) - first[chain],
            count_J=count[sequence],
            rank_J=rank,
            local_J=local,
            row_J=row,
            start_J=start,
            token_J=np.array(layout.cu_seqlens)[sequence] + start,
        )

    def last_held(self, position_J: Ints, num_ranks: int) -> Ints:
        """The last place that each rank holds in a segment's chain `[J, P]`, −1 where it holds none."""
        last = np.full((len(np.unique(self.chain_J)), num_ranks), -1)
        np.maximum.at(last, (self.chain_J, self.rank_J), position_J)
        last_JP: Ints = last[self.chain_J]
        return last_JP


@dataclass(frozen=True)
class ScanPlan:
    """What one direction of the scan sends, receives and computes on this rank.

    In the backward a chain runs from its last segment to its first: "before" reads "after", S0 reads dS_in.
    """

    firsts: tuple[int, ...]
    """Own segments that send S0 alone: nothing enters the first of a chain."""
    others: tuple[int, ...]
    """Own segments that send M and S0: neither first nor last of their chain; the same both ways."""
    S0_sent: Tensor
    """The entries of S0 (of `firsts`, then `others`) that are sent, rank after rank."""
    M_sent: Tensor
    """The same of M (of `others`)."""
    send: tuple[tuple[int, int], ...]
    """How many S0 and how many M each rank gets."""
    receive: tuple[tuple[int, int], ...]
    """How many S0 and how many M come from each rank."""
    is_local: bool
    """Whether no rank of the whole group tells another anything."""
    active: tuple[int, ...]
    """Chains that take each step; those that take more steps come first."""
    S0_order: Tensor
    """What arrived, step after step."""
    M_order: Tensor
    """The same of M; the first step has none."""
    leaving: Tensor
    """The states, among those of all steps, that enter a segment of ours."""
    entered: Tensor
    """The own segments that they enter."""

    @staticmethod
    def of(chains: Chains, rank: int, num_ranks: int, reverse: bool, device: torch.device) -> ScanPlan:
        """The scan along all chains, or back along them."""
        chain = chains.chain_J
        position = chains.count_J - 1 - chains.position_J if reverse else chains.position_J
        # A rank needs what stands before the last segment of a chain that it holds.
        last_JP = chains.last_held(position, num_ranks)
        needed_JP = position[:, None] < last_JP
        with_M = position > 0

        def index(x: Ints) -> Tensor:
            return torch.from_numpy(x).to(device)

        def counts(*ranks: Ints) -> tuple[tuple[int, int], ...]:
            return tuple(zip(*(np.bincount(x, minlength=num_ranks).tolist() for x in ranks), strict=True))

        own = (chains.rank_J == rank) & (position < chains.count_J - 1)
        firsts, others = np.flatnonzero(own & ~with_M), np.flatnonzero(own & with_M)
        peer_S0, S0 = np.nonzero(needed_JP[np.append(firsts, others)].T)
        peer_M, M = np.nonzero(needed_JP[others].T)

        # Arriving rank by rank, and from a rank first its firsts, then its others, each in chain order.
        heard = np.flatnonzero(needed_JP[:, rank])
        heard = heard[np.lexsort((with_M[heard], chains.rank_J[heard]))]
        heard_M = heard[with_M[heard]]
        # Step by step, and in each step the chains that go furthest first.
        far = np.lexsort((chain[heard], -last_JP[heard, rank], position[heard]))
        far_M = np.lexsort((chain[heard_M], -last_JP[heard_M, rank], position[heard_M]))
        following = heard[far] + (-1 if reverse else 1)
        leaving = np.flatnonzero(chains.rank_J[following] == rank)
        return ScanPlan(
            firsts=tuple(chains.local_J[firsts].tolist()),
            others=tuple(chains.local_J[others].tolist()),
            S0_sent=index(S0),
            M_sent=index(M),
            send=counts(peer_S0, peer_M),
            receive=counts(chains.rank_J[heard], chains.rank_J[heard_M]),
            is_local=bool(needed_JP.sum() == needed_JP[np.arange(len(chain)), chains.rank_J].sum()),
            active=tuple(np.bincount(position[heard]).tolist()),
            S0_order=index(far),
            M_order=index(far_M),
            leaving=index(leaving),
            entered=index(chains.local_J[following[leaving]]),
        )

    def to(self, device: torch.device) -> ScanPlan:
        """The plan with its indices on another device."""
        names = ("S0_sent", "M_sent", "S0_order", "M_order", "leaving", "entered")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


class HaloPlan(NamedTuple):
    """The tokens before each segment that the convolution reads, wherever they live."""

    rows: RowPlan
    places: Tensor
    """Where arriving rows go in the halos `[N·(W−1)]`; what no row goes to is 0."""

    def to(self, device: torch.device) -> HaloPlan:
        """The plan with its indices on another device."""
        rows = replace(self.rows, rows=self.rows.rows.to(device))
        return HaloPlan(rows, self.places.to(device))

    @property
    def is_empty(self) -> bool:
        """Whether no rank has a halo from another, nor this one from itself."""
        return self.rows.is_local and not len(self.places)

    @staticmethod
    def of(chains: Chains, rank: int, num_ranks: int, width: int, device: torch.device) -> HaloPlan:
        """The halos of a convolution of this width."""
        before = np.arange(1 - width, 0)
        segment, slot = np.nonzero(chains.start_J[:, None] + before >= 0)
        # A halo may reach over several short segments, on several ranks.
        token = chains.token_J[segment] + before[slot]
        source = np.searchsorted(chains.token_J, token, side="right") - 1
        row = chains.row_J[source] + token - chains.token_J[source]
        owner, user = chains.rank_J[source], chains.rank_J[segment]
        leaving = np.flatnonzero(owner == rank)
        leaving = leaving[np.argsort(user[leaving], kind="stable")]
        arriving = np.flatnonzero(user == rank)
        arriving = arriving[np.argsort(owner[arriving], kind="stable")]
        places = chains.local_J[segment[arriving]] * (width - 1) + slot[arriving]
        plan = RowPlan(
            rows=torch.from_numpy(row[leaving]).to(device),
            send=np.bincount(user[leaving], minlength=num_ranks).tolist(),
            receive=np.bincount(owner[arriving], minlength=num_ranks).tolist(),
            is_local=bool((owner == user).all()),
        )
        return HaloPlan(plan, torch.from_numpy(places).to(device))


@dataclass(frozen=True)
class ChainPlan:
    """This rank's part in the chains of a row, made once per step and shared by all layers."""

    chains: Chains
    rank: int
    num_ranks: int
    num_slots: int
    """Local tokens, padding included."""
    cu: tuple[int, ...]
    """Boundaries of this rank's segments among its real tokens, in local order."""
    rows: Tensor | None
    """The slots of the real tokens; None when they are the first ones."""
    device: torch.device
    forward: ScanPlan
    backward: ScanPlan
    _halos: dict[int, HaloPlan] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(layout: SequenceLayout, rank: int, device: torch.device | None = None) -> ChainPlan:
        """The plan of a rank, with its indices on a device."""
        device = torch.device("cpu") if device is None else device
        segments = layout.segments(rank)
        chains = Chains.of(layout)
        cu = np.cumsum([0, *(s.num_tokens for s in segments)]).tolist()
        rows = None
        if any(s.offset != begin for s, begin in zip(segments, cu[:-1], strict=True)):
            rows = torch.cat([torch.arange(s.offset, s.offset + s.num_tokens) for s in segments]).to(device)
        forward, backward = (
            ScanPlan.of(chains, rank, layout.num_ranks, reverse, device) for reverse in (False, True)
        )
        slots = layout.num_local_tokens
        return ChainPlan(chains, rank, layout.num_ranks, slots, tuple(cu), rows, device, forward, backward)

    def to(self, device: torch.device) -> ChainPlan:
        """The plan with its indices on another device."""
        return replace(
            self,
            rows=None if self.rows is None else self.rows.to(device),
            device=device,
            forward=self.forward.to(device),
            backward=self.backward.to(device),
            _halos={width: halo.to(device) for width, halo in self._halos.items()},
        )

    @cached_property
    def opened(self) -> tuple[int, ...]:
        """This rank's segments of chains of more than one."""
        return tuple(sorted(self.chains.local_J[self.chains.rank_J == self.rank].tolist()))

    def halo(self, width: int) -> HaloPlan:
        """The halos of a convolution of this width."""
        if width not in self._halos:
            self._halos[width] = HaloPlan.of(self.chains, self.rank, self.num_ranks, width, self.device)
        return self._halos[width]

    def compact(self, x: Tensor) -> Tensor:
        """The real tokens of this rank's slots, segment after segment."""
        return x[: self.cu[-1]] if self.rows is None else x.index_select(0, self.rows)

    def spread(self, x: Tensor) -> Tensor:
        """Undo `compact`; padding gets 0."""
        if self.rows is None:
            return F.pad(x, (0, 0) * (x.dim() - 1) + (0, self.num_slots - len(x)))
        return x.new_zeros(self.num_slots, *x.shape[1:]).index_copy(0, self.rows, x)
