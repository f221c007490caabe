"""Throwing the switches of `MemoryOptions`; none of them changes a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..models.braided import BraidedModel
from ..models.head import forward_replaced
from ..plan.memory import MemoryOptions
from .checkpointing import CheckpointedDecoderLayer, CheckpointedLayer
from .offload import HostMemory
from .tiled_mlp import TiledMLP


def apply_memory_options(model: BraidedModel, options: MemoryOptions) -> None:
    """Throw the switches; `release` of the model throws them back."""
    if options.checkpointing == "auto":
        raise ValueError(
            "checkpointing='auto' is chosen by seqbraid train, which knows the rows; here use 'none', "
            "'selective' or 'full', or what seqbraid.plan.auto.choose_checkpointing gives"
        )
    layers = [layer.module for layer in model.parts.every_layer]
    if options.checkpointing != "none":
        _refuse_second_checkpoint(model, layers)
    if options.mlp_tile is not None:
        # Routed experts are left alone: how many tokens they get is up to the router, and they never see all
        # of them at once.
        found = [module for layer in model.parts.every_layer for module in layer.dense]
        if not found:
            raise ValueError(
                f"mlp_tile={options.mlp_tile}: {type(model.model).__name__} has no dense MLP that can be "
                f"tiled (its layers have {_kinds(layers[0])}); leave mlp_tile out"
            )
        _refuse_tiles_of_parts(model, options.mlp_tile)
        for module in found:
            model.until_release(forward_replaced(module, TiledMLP(module, options.mlp_tile)))
    model.loss_chunk, model.reduce_gradients = options.loss_chunk, options.reduce_gradients
    if options.checkpointing == "none":
        return
    keep_mixers = options.checkpointing == "selective"
    _checkpoint(model, layers, CheckpointedDecoderLayer, keep_mixers, options.offload)
    if options.checkpointing == "full":
        for tower in model.parts.towers:
            _checkpoint(model, tower.blocks, CheckpointedLayer, False, options.offload)


def _refuse_tiles_of_parts(model: BraidedModel, tile: int) -> None:
    """Tiles sum up gradients of what is gathered around all of them."""
    for index, layer in enumerate(() if model.tensor is None else model.tensor.regions):
        for region in layer:
            learns = any(p.requires_grad for cut in region.cuts for p in cut.module.parameters())
            if region.name.startswith("mlp") and learns and not region.is_whole:
                raise ValueError(
                    f"mlp_tile={tile}: the MLP of layer {index} of {type(model.model).__name__} is gathered "
                    f"matrix by matrix with tp={model.mesh.tp}, so its gradients cannot be summed tile by "
                    "tile; leave mlp_tile out"
                )


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
        names = ("activation_checkpointing_disable", "gradient_checkpointing_disable")  # new name, old name
        raise ValueError(
            f"{type(model.model).__name__} has its own gradient checkpointing on; call "
            f"{next(name for name in names if hasattr(model.model, name))}() on it, or leave "
            "memory.checkpointing at 'none'"
        )


def _kinds(layer: nn.Module) -> str:
    return ", ".join(dict.fromkeys(type(child).__name__ for child in layer.children()))
