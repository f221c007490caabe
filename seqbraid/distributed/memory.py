"""Switches that trade time for memory; none of them changes a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from ..models.braided import BraidedModel
from ..models.head import forward_replaced
from .checkpointing import CheckpointedDecoderLayer, CheckpointedLayer
from .offload import HostMemory
from .tiled_mlp import TiledMLP

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class MemoryOptions:
    """What is kept from the forward for the backward, and where.

    >>> MemoryOptions(checkpointing="full", offload=True, mlp_tile=4096)
    MemoryOptions(checkpointing='full', offload=True, mlp_tile=4096, loss_chunk=None)
    """

    checkpointing: Checkpointing = "none"
    """What a decoder layer computes again in the backward: nothing, all but its token mixer (nothing is sent
    twice), or everything from its input on; `full` goes for the blocks of media encoders too.
    """
    offload: bool = False
    """Keep what checkpoints save in host memory, pinned where there is a GPU."""
    mlp_tile: int | None = None
    """Tokens per tile of the MLPs, whose intermediate tensors then exist for one tile at a time."""
    loss_chunk: int | None = None
    """Tokens per chunk of head and loss; by default a quarter of the hidden size, or as many as make 64 MiB
    of logits where those are more.
    """

    def __post_init__(self) -> None:
        if self.checkpointing not in get_args(Checkpointing):
            choices = ", ".join(repr(choice) for choice in get_args(Checkpointing))
            raise ValueError(f"checkpointing={self.checkpointing!r} is unknown; use one of {choices}")
        if not isinstance(self.offload, bool):
            raise ValueError(f"offload={self.offload!r} must be True or False")
        if self.offload and self.checkpointing == "none":
            raise ValueError(
                "offload=True moves what checkpoints save, but checkpointing='none' saves none; use "
                "checkpointing='full' or 'selective'"
            )
        for name in ("mlp_tile", "loss_chunk"):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be a number of tokens, at least 1, or None")


def apply_memory_options(model: BraidedModel, options: MemoryOptions) -> None:
    """Throw the switches; `release` of the model throws them back."""
    layers = list(model.parts.layer_list)
    if options.checkpointing != "none":
        _refuse_second_checkpoint(model, layers)
    if options.mlp_tile is not None:
        # Routed experts are left alone: how many tokens they get is up to the router, and they never see all
        # of them at once.
        found = [module for layer in model.parts.layers for module in layer.dense]
        if not found:
            raise ValueError(
                f"mlp_tile={options.mlp_tile}: {type(model.model).__name__} has no dense MLP that we know to "
                f"cut into tiles (its layers hold {_kinds(layers[0])}); leave mlp_tile out"
            )
        for module in found:
            model.until_release(forward_replaced(module, TiledMLP(module, options.mlp_tile)))
    model.loss_chunk = options.loss_chunk
    if options.checkpointing == "none":
        return
    keep_mixers = options.checkpointing == "selective"
    _checkpoint(model, layers, CheckpointedDecoderLayer, keep_mixers, options.offload)
    if options.checkpointing == "full":
        for tower in model.parts.towers:
            _checkpoint(model, tower.blocks, CheckpointedLayer, False, options.offload)


def _checkpoint(
    model: BraidedModel,
    layers: Sequence[nn.Module],
    kind: type[CheckpointedLayer],
    keep_mixers: bool,
    offload: bool,
) -> None:
    host = HostMemory() if offload else None
    for index, layer in enumerate(layers):
        model.until_release(forward_replaced(layer, kind(layer, index, keep_mixers, host)))


def _refuse_second_checkpoint(model: BraidedModel, layers: Sequence[nn.Module]) -> None:
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        raise ValueError(
            f"{type(model.model).__name__} has its own gradient checkpointing on; call "
            "gradient_checkpointing_disable() on it, or leave memory.checkpointing at 'none'"
        )


def _kinds(layer: nn.Module) -> str:
    return ", ".join(dict.fromkeys(type(child).__name__ for child in layer.children()))
