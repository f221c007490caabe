"""Activation checkpoints: a layer keeps its input and is computed again when the backward needs it.

What is kept of a decoder layer, beside its input:
- `full`: nothing. The mixer is computed again, and with it its exchanges with other ranks; all ranks come to
  a layer in the same order, so they meet there as in the forward.
- `selective`: what the mixer's own backward needs (queries, keys and values as they were after the exchange,
  output and log-sum-exp; for gated delta its convolved channels and states) and the mixer's output. Norms,
  projections and MLP are computed again; the mixer is not, and nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..sequence_parallel.context import StepContext
from .offload import HostMemory, LayerMemory


class CheckpointedLayer:
    """Stands in for the forward of a layer.

    It wraps the inside of the layer: a sharded layer gathers its parameters around it, once per backward, and
    parameters keep their names.
    """

    def __init__(self, layer: nn.Module, index: int, keep_mixers: bool, host: HostMemory | None) -> None:
        self.layer = layer
        self.stock: Callable[..., Any] = layer.forward
        self.index = index
        self.keep_mixers = keep_mixers
        self.host = host

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.stock(*args, **kwargs)
        with set_checkpoint_early_stop(not self.has_units):
            if self.host is None:
                return checkpoint(self._run(LayerMemory()), *args, use_reentrant=False, **kwargs)
            memory = self.host.open(self.index, self.layer)
            # The checkpoint's own hooks lie inside of these: what is left for them is the layer's input.
            with saved_tensors_hooks(memory.pack, memory.unpack):
                return checkpoint(self._run(memory), *args, use_reentrant=False, **kwargs)

    @cached_property
    def has_units(self) -> bool:
        """Whether something in the layer is gathered by itself, as experts over ranks are: FSDP2 would lose
        track of the step where the layer is computed again and left in the middle of such a unit.
        """
        return any(isinstance(part, FSDPModule) for part in self.layer.modules() if part is not self.layer)

    def _run(self, memory: LayerMemory) -> Callable[..., Any]:
        return _MixersKept(self.stock, memory).run if self.keep_mixers else self.stock


class CheckpointedDecoderLayer(CheckpointedLayer):
    """A decoder layer: calls without a step context, as in `generate`, go to the stock forward."""

    def __call__(self, *args: Any, braid: StepContext | None = None, **kwargs: Any) -> Any:
        if braid is None:
            return self.stock(*args, **kwargs)
        return super().__call__(*args, braid=braid, **kwargs)


class _MixersKept:
    """One pass through a layer: its first run fills `kept`, each later one takes the mixers' results from it.

    A later run is there for the tensors that it saves along the way; its own graph is thrown away. So it is
    enough that a result has the right values and asks for a gradient where the first one did.
    """

    def __init__(self, stock: Callable[..., Any], memory: LayerMemory) -> None:
        self.stock = stock
        self.memory = memory
        self.kept: list[tuple[Any, bool]] | None = None

    def run(self, *args: Any, braid: StepContext, **kwargs: Any) -> Any:
        """The layer with its mixers called by us."""
        if self.kept is not None:
            return self.stock(*args, braid=replace(braid, mix=_Again(iter(self.kept), self.memory)), **kwargs)
        kept: list[tuple[Any, bool]] = []

        def mix(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
            # The innermost hooks count: what the mixer saves is kept, not computed again.
            with saved_tensors_hooks(self.memory.pack, self.memory.unpack):
                out = function(*inputs)
            kept.append((self.memory.pack(out.detach()), out.requires_grad))
            return out

        result = self.stock(*args, braid=replace(braid, mix=mix), **kwargs)
        self.kept = kept
        return result


class _Again:
    """Hands out the results of a layer's mixers in their order."""

    def __init__(self, kept: Iterator[tuple[Any, bool]], memory: LayerMemory) -> None:
        self.kept = kept
        self.memory = memory

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        packed, requires_grad = next(self.kept)
        return self.memory.unpack(packed).detach().requires_grad_(requires_grad)
