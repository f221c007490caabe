"""What a call of a braided model must find on this rank, and what of the model must be alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..mesh import Mesh
from ..sequence_parallel.ring_plan import refuse_window
from .adapter import Adapter
from .agreement import check_batch, check_no_autocast, config_values
from .batch import PackedBatch
from .dropout import is_active
from .mixers import layer_window
from .parts import ModelParts
from .tensor import TensorPlan
from .unchanged import Unchanged


def check_call(
    wrapper: nn.Module,
    mesh: Mesh,
    adapter: Adapter,
    unchanged: Unchanged,
    tensor: TensorPlan | None,
    batches: Sequence[PackedBatch],
    seed: int | None,
) -> None:
    """Refuse batches that are none of this rank's, a model that was changed, and switches that change types;
    `wrapper` is the `BraidedModel`.
    """
    model = adapter.model
    depth = 0 if adapter.mtp is None else adapter.mtp.depth
    for batch in batches:
        check_batch(batch, mesh, depth)
    change = unchanged.difference(model, wrapper, adapter.parts.layer_list[-1])
    if change is not None:
        raise ValueError(f"{change}; call release(), change the model, then parallelize it again")
    if tensor is not None:
        tensor.check_step(type(model).__name__, adapter.dropping)
    check_no_autocast()
    adapter.check_step(batches, seed)
    windows = _windows(adapter.parts) if mesh.ring > 1 else set()
    for batch in batches:  # those of this data rank alone
        for window in sorted(windows):
            refuse_window(batch.layout, window)


def call_settings(
    mesh: Mesh, adapter: Adapter, gated_delta: str, reduce_gradients: str, loss_chunk: int | None
) -> dict[str, Any]:
    """What decides which exchanges a step makes, and what its sums mean: the same on every rank."""
    found = {
        "gated_delta": gated_delta,
        "reduce_gradients": reduce_gradients,
        "training mode": adapter.is_training,
        "grad mode": torch.is_grad_enabled(),
        "config": config_values(adapter.config),
        "mtp": repr(adapter.mtp),
    }
    if mesh.tp > 1:  # whose ranks add up each chunk of the loss
        found["loss_chunk"] = loss_chunk
    return found


def stage_settings(adapter: Adapter) -> dict[str, Any]:
    """What parameters and modules say: the same on every rank of a pipeline stage."""
    model = adapter.model
    modules = list(model.named_modules())
    mixers = {layer.index: layer.mixer for layer in adapter.parts.every_layer}
    return {
        "requires_grad of": {name: p.requires_grad for name, p in model.named_parameters()},
        "dtypes of parameters": sorted({str(p.dtype) for p in model.parameters()}),
        "sliding_window of layer": {i: getattr(mixer, "sliding_window", None) for i, mixer in mixers.items()},
        "dropout of": {name: module.p for name, module in modules if is_active(module)},
        # Layers that are computed again exchange again.
        "gradient checkpointing of": {name: True for name, module in modules if _is_checkpointed(module)},
        "the adapters of": {
            name: _adapters(module) for name, module in modules if "lora_A" in module._modules
        },
    }


def _windows(parts: ModelParts) -> set[int]:
    """Of the layers, as they are now; where a config names no kinds of layers, `pack` does not know them."""
    found = {layer.window for layer in parts.every_layer if layer.index >= len(parts.layer_list)}
    own = (layer for layer in parts.layers if layer.kind in ("full_attention", "sliding_attention"))
    found |= {layer_window(parts.config, layer.index, layer.mixer) for layer in own}
    return {window for window in found if window is not None}


def _is_checkpointed(module: nn.Module) -> bool:
    return module.training and bool(vars(module).get("gradient_checkpointing"))


def _adapters(module: Any) -> str:
    """Which of peft's adapters a layer uses, and how much of each."""
    active = [] if module.disable_adapters else list(module.active_adapters)
    return repr([(name, module.scaling.get(name)) for name in active])
