"""`RowPlans`: what the mixers of a rank must know of a row beside its layout, from its lengths alone.

A plan is made once per row and shared by all layers: ahead of the step where `prepare` is told what a model
will ask for, else when a layer first asks. It is the same plan either way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import SequenceLayout
from ..ops.blocks import BlockPlan
from .chain import ChainPlan
from .gated_delta_bytes import HeadSizes, choose_method
from .gated_delta_heads import HeadExchangePlan
from .ring_plan import RingPlan
from .samples import LocalSamples
from .shift import ShiftPlan
from .ulysses import SoftmaxHeads

CPU = torch.device("cpu")


class SoftmaxNeeds(NamedTuple):
    """What layers of softmax attention will ask of a row's plans."""

    num_heads: int
    num_kv_heads: int
    window: int | None = None
    """None for full attention."""


class MixerNeeds(NamedTuple):
    """What the mixers of a model will ask of a row's plans, as far as its config tells."""

    softmax: tuple[SoftmaxNeeds, ...] = ()
    """Each kind of its softmax layers once."""
    gated_delta: HeadSizes | None = None
    """The heads of its gated-delta layers; None where it has none."""
    conv_width: int = 0
    itemsize: int = 4
    """Bytes of an activation."""


@dataclass(frozen=True)
class RowPlans:
    """The plans of one rank for one row."""

    layout: SequenceLayout
    rank: int
    tp: int = 1
    """Ranks that share this rank's tokens out among them, between mixers and MLPs."""
    tp_rank: int = 0
    _rings: dict[tuple[int | None, bool, bool, float], RingPlan] = field(
        default_factory=dict, compare=False, repr=False
    )
    _chains: dict[torch.device, ChainPlan] = field(default_factory=dict, compare=False, repr=False)
    _heads: dict[torch.device, HeadExchangePlan] = field(default_factory=dict, compare=False, repr=False)
    _methods: dict[tuple[HeadSizes, int], str] = field(default_factory=dict, compare=False, repr=False)
    _shifts: dict[tuple[torch.device, int], ShiftPlan] = field(
        default_factory=dict, compare=False, repr=False
    )
    _slots: dict[tuple[torch.device, bool], tuple[Tensor | None, Tensor | None]] = field(
        default_factory=dict, compare=False, repr=False
    )

    _samples: dict[torch.device, LocalSamples] = field(default_factory=dict, compare=False, repr=False)

    def prepare(self, needs: MixerNeeds) -> None:
        """Make the plans that a model with these needs will ask for.

        `ValueError` where a row cannot be split as it is for such a model.
        """
        self.slots(CPU)
        self.slots(CPU, of_share=True)
        ulysses = self.layout.ulysses
        for num_heads, num_kv_heads, window in needs.softmax:
            if ulysses == 1:
                self.ring(window, True, True, num_heads / num_kv_heads)
                continue
            ratio = SoftmaxHeads(num_heads, num_kv_heads, ulysses).query_heads_per_kv_head(
                self.rank % ulysses
            )
            if sum(self.group_tokens):
                self.ring(window, True, False, ratio)
            if self.layout.num_shared_tokens(self.rank) < self.layout.num_local_tokens:
                self.ring(window, False, True)
        if needs.gated_delta is not None:
            if self.method(needs.gated_delta, needs.itemsize) == "heads":
                self.heads(CPU)
            else:
                self.chain(CPU).halo(needs.conv_width)

    @property
    def share(self) -> slice:
        """This rank's own of its tokens: what it holds of them between mixers and MLPs."""
        size = self.layout.num_local_tokens // self.tp
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)

    @property
    def group_tokens(self) -> list[int]:
        """Shared tokens of each rank of this rank's Ulysses group."""
        first = self.rank // self.layout.ulysses * self.layout.ulysses
        return [self.layout.num_shared_tokens(first + i) for i in range(self.layout.ulysses)]

    def ring(self, window: int | None, shared: bool, whole: bool, query_heads: float = 1.0) -> RingPlan:
        """Blocks and exchanges of this rank's shared tokens, of whole sequences behind them, or of both; with
        so many query heads to a key head.
        """
        key = (window, shared, whole, query_heads)
        if key not in self._rings:
            sequences = self.layout.whole_sequences(self.rank) if whole else ()
            if shared:
                ring_rank = self.rank // self.layout.ulysses
                self._rings[key] = RingPlan.of(self.layout, ring_rank, query_heads, window, sequences)
            else:
                lengths = [self.layout.lengths[i] for i in sequences]
                starts = accumulate(lengths, initial=0)
                self._rings[key] = RingPlan(
                    BlockPlan.causal(list(zip(starts, lengths, strict=False)), window)
                )
        return self._rings[key]

    def method(self, sizes: HeadSizes, itemsize: int) -> str:
        """How gated-delta layers with these heads and activations exchange at the least cost.

        From the layout alone, so that all ranks choose the same.
        """
        key = (sizes, itemsize)
        if key not in self._methods:
            self._methods[key] = choose_method(self.layout, *key)
        return self._methods[key]

    def chain(self, device: torch.device) -> ChainPlan:
        """What this rank's segments send and receive in gated-delta layers, on a device."""
        if CPU not in self._chains:
            self._chains[CPU] = ChainPlan.of(self.layout, self.rank, CPU)
        if device not in self._chains:
            self._chains[device] = self._chains[CPU].to(device)
        return self._chains[device]

    def heads(self, device: torch.device) -> HeadExchangePlan:
        """Which tokens of this rank are exchanged for heads in gated-delta layers, on a device."""
        if CPU not in self._heads:
            self._heads[CPU] = HeadExchangePlan.of(self.layout, self.rank)
        if device not in self._heads:
            self._heads[device] = self._heads[CPU].to(device)
        return self._heads[device]

    def samples(self, device: torch.device) -> LocalSamples:
        """Of which sample this rank's slots are, on a device: what some losses ask for, and no layer."""
        if device not in self._samples:
            with torch.inference_mode(False):  # what is kept serves later backwards too
                self._samples[device] = LocalSamples.of(self.layout, self.rank, device)
        return self._samples[device]

    def shift(self, depths: int, device: torch.device) -> ShiftPlan:
        """Where this rank finds the tokens that its own share of tokens predicts from, on a device."""
        if (CPU, depths) not in self._shifts:
            row_rank = self.rank * self.tp + self.tp_rank
            self._shifts[CPU, depths] = ShiftPlan.of(self.layout, depths, row_rank, self.tp)
        if (device, depths) not in self._shifts:
            self._shifts[device, depths] = self._shifts[CPU, depths].to(device)
        return self._shifts[device, depths]

    def slots(self, device: torch.device, of_share: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """This rank's slots that are padding, and those that hold a token, on a device; None for both where
        every slot holds one. Of its `share` alone they are counted from where that starts.
        """
        if (CPU, of_share) not in self._slots:
            is_real = self.layout.index(self.rank) >= 0
            if of_share:
                is_real = is_real[self.share]
            rows = (is_real.logical_not().nonzero()[:, 0], is_real.nonzero()[:, 0])
            self._slots[CPU, of_share] = (None, None) if is_real.all() else rows
        if (device, of_share) not in self._slots:
            padding, real = self._slots[CPU, of_share]
            self._slots[device, of_share] = (
                (None, None) if padding is None or real is None else (padding.to(device), real.to(device))
            )
        return self._slots[device, of_share]
