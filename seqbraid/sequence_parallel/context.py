"""The step's context: what a token mixer must know of the batch, passed down as a keyword argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..comm.group import Group
from ..layout import SequenceLayout
from ..ops.kernels import DEFAULT, Kernels
from .gated_delta_bytes import HeadSizes
from .plans import RowPlans


def call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """How mixers are called by default."""
    return function(*args)


@dataclass(frozen=True)
class StepContext:
    """One forward pass: the layout, this rank's place in it, and its groups. Made for the step
    and never stored.

    It travels through the stock model's keyword arguments as `braid=`, to every attention and gated-delta
    module, also when a checkpointed layer is recomputed in the backward.
    """

    row: RowPlans
    """The layout of the row and what this rank does in it."""
    ring: Group = field(default_factory=Group)
    ulysses: Group = field(default_factory=Group)
    sequence: Group = field(default_factory=Group)
    """All ranks that share the row, ring × ulysses, in the layout's order."""
    row_group: Group = field(default_factory=Group)
    """All ranks that hold tokens of the row between mixers and MLPs, or encode its media: sequence × tp."""
    gated_delta: str = "auto"
    """What gated-delta layers exchange: `states`, `heads`, or `auto`, whichever is less."""
    seed: int | None = None
    """What the step's random numbers follow from, the same on every rank; None where nothing is random."""
    token_keys: Tensor | None = field(default=None, compare=False, repr=False)
    """`[T]`: what tells this rank's tokens from others when something is drawn for each."""
    kernels: Kernels = DEFAULT
    """What computes the model's ops."""
    mix: Callable[..., Tensor] = call
    """Calls a mixer, `mix(function, *args)`: activation checkpointing that keeps the outputs of mixers sets
    its own here, so that a recomputed layer neither mixes nor communicates again.
    """
    mixed_layers: set[int] = field(default_factory=set, compare=False, repr=False)
    """The layers whose mixer was ours: any other layer would let packed samples see each other."""
    expert_counts: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """`[E]` for each module of experts: how often this rank's tokens went to each."""
    counted_rows: Tensor | None = field(default=None, compare=False, repr=False)
    """The slots of this rank's share that count, where these are fewer than those that hold a token."""

    @property
    def layout(self) -> SequenceLayout:
        """Where the tokens of the row are."""
        return self.row.layout

    @property
    def rank(self) -> int:
        """This rank's place in the sequence group."""
        return self.row.rank

    @property
    def num_local_tokens(self) -> int:
        """Tokens of this rank, its padding included."""
        return self.layout.num_local_tokens

    def gated_delta_method(self, sizes: HeadSizes, itemsize: int) -> str:
        """How gated-delta layers with these heads and activations exchange: as the model was told, or as the
        row makes cheaper.
        """
        return self.row.method(sizes, itemsize) if self.gated_delta == "auto" else self.gated_delta

    def padding_rows(self, device: torch.device) -> Tensor | None:
        """This rank's slots that hold no token, on a device; None where there are none."""
        return self.row.slots(device)[0]

    def real_rows(self, device: torch.device) -> Tensor | None:
        """The slots that hold a token of those that this rank has between mixers and MLPs, on a device; None
        where all do.
        """
        if self.counted_rows is not None:
            return self.counted_rows
        return self.row.slots(device, of_share=True)[1]

    def record(self, layer: int) -> None:
        """Note that a layer mixed its tokens by our rules."""
        self.mixed_layers.add(layer)
