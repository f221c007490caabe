"""The step's context: what a token mixer must know of the batch, passed down as a keyword argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..comm.group import Group
from ..layout import SequenceLayout
from ..ops.blocks import BlockPlan
from ..ops.kernels import DEFAULT, Kernels
from .chain import ChainPlan
from .gated_delta_bytes import HeadSizes, choose
from .gated_delta_heads import HeadsPlan
from .ring_plan import RingPlan


def call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """How mixers are called when nobody has a reason to call them otherwise."""
    return function(*args)


@dataclass(frozen=True)
class StepContext:
    """One forward pass: the layout, this rank's place in it, and its groups. Made for the step, kept by
    nobody.

    It travels through the stock model's keyword arguments as `braid=`, to every attention and gated-delta
    module, also when a checkpointed layer is computed again in the backward.
    """

    layout: SequenceLayout
    rank: int
    ring: Group = field(default_factory=Group)
    ulysses: Group = field(default_factory=Group)
    sequence: Group = field(default_factory=Group)
    """All ranks that share the row, ring × ulysses, in the layout's order."""
    gated_delta: str = "auto"
    """How gated-delta layers talk: by `states`, by `heads`, or `auto`, the cheaper of them."""
    seed: int | None = None
    """What the step's random numbers follow from, the same on every rank; None where nothing is random."""
    token_keys: Tensor | None = field(default=None, compare=False, repr=False)
    """`[T]`: what tells this rank's tokens from others when something is drawn for each."""
    kernels: Kernels = DEFAULT
    """What computes the model's ops."""
    mix: Callable[..., Tensor] = call
    """Calls a mixer, `mix(function, *args)`: a checkpoint that keeps what mixers give puts its own here, so
    that a layer that is computed again neither mixes nor talks again.
    """
    mixed_layers: set[int] = field(default_factory=set, compare=False, repr=False)
    """The layers whose mixer was ours: any other layer would let packed samples see each other."""
    _plans: dict[tuple[int | None, bool, bool, float], RingPlan] = field(
        default_factory=dict, compare=False, repr=False
    )
    _padding: dict[torch.device, tuple[Tensor | None, Tensor | None]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _methods: dict[tuple[HeadSizes, int], str] = field(default_factory=dict, compare=False, repr=False)
    _chain_plans: dict[torch.device, ChainPlan] = field(default_factory=dict, compare=False, repr=False)
    _heads_plans: dict[torch.device, HeadsPlan] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_local_tokens(self) -> int:
        """Tokens of this rank, its padding included."""
        return self.layout.num_local_tokens

    @property
    def group_tokens(self) -> list[int]:
        """Shared tokens of each rank of this rank's Ulysses group."""
        first = self.rank // self.layout.ulysses * self.layout.ulysses
        return [self.layout.num_shared_tokens(first + i) for i in range(self.layout.ulysses)]

    def ring_plan(self, window: int | None, shared: bool, whole: bool, query_heads: float = 1.0) -> RingPlan:
        """Blocks and exchanges of this rank's shared tokens, of whole sequences behind them, or of both; with
        so many query heads to a key head.
        """
        key = (window, shared, whole, query_heads)
        if key not in self._plans:
            sequences = self.layout.whole_sequences(self.rank) if whole else ()
            if shared:
                ring_rank = self.rank // self.layout.ulysses
                self._plans[key] = RingPlan.of(self.layout, ring_rank, query_heads, window, sequences)
            else:
                lengths = [self.layout.lengths[i] for i in sequences]
                starts = accumulate(lengths, initial=0)
                self._plans[key] = RingPlan(
                    BlockPlan.causal(list(zip(starts, lengths, strict=False)), window)
                )
        return self._plans[key]

    def gated_delta_method(self, sizes: HeadSizes, itemsize: int) -> str:
        """How gated-delta layers with these heads and activations talk.

        From the layout alone where it is ours to choose, so that all ranks choose the same.
        """
        if self.gated_delta != "auto":
            return self.gated_delta
        key = (sizes, itemsize)
        if key not in self._methods:
            self._methods[key] = choose(self.layout, *key)
        return self._methods[key]

    def chain_plan(self, device: torch.device) -> ChainPlan:
        """What this rank's segments tell and hear in gated-delta layers on a device."""
        if device not in self._chain_plans:
            self._chain_plans[device] = ChainPlan.of(self.layout, self.rank, device)
        return self._chain_plans[device]

    def heads_plan(self, device: torch.device) -> HeadsPlan:
        """Which tokens of this rank change hands for heads in gated-delta layers on a device."""
        if device not in self._heads_plans:
            self._heads_plans[device] = HeadsPlan.of(self.layout, self.rank, device)
        return self._heads_plans[device]

    def padding_rows(self, device: torch.device) -> Tensor | None:
        """This rank's slots that hold no token, on a device; None where there are none."""
        return self._slots(device)[0]

    def real_rows(self, device: torch.device) -> Tensor | None:
        """This rank's slots that hold a token, on a device; None where all do."""
        return self._slots(device)[1]

    def _slots(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if device not in self._padding:
            is_real = self.layout.index(self.rank) >= 0
            rows = (is_real.logical_not().nonzero()[:, 0], is_real.nonzero()[:, 0])
            self._padding[device] = (
                (None, None) if is_real.all() else (rows[0].to(device), rows[1].to(device))
            )
        return self._padding[device]

    def record(self, layer: int) -> None:
        """Note that a layer mixed its tokens by our rules."""
        self.mixed_layers.add(layer)
