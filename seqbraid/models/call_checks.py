"""What a call of a braided model must find on this rank, and what of the model must be alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..mesh import Mesh
from .adapter import Adapter
from .agreement import check_batch, check_no_autocast, config_values, trained
from .batch import PackedBatch
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
    shared = frozenset[int]() if tensor is None else tensor.inside
    for name, module in adapter.dropping.items() if shared else ():
        if id(module) in shared:
            raise ValueError(
                f"{type(model).__name__} trains with dropout at {name!r}, among heads or channels "
                f"that tp={mesh.tp} shares out; set it to 0 or use tp=1"
            )
    check_no_autocast()
    adapter.check_step(batches, seed)


def call_settings(mesh: Mesh, adapter: Adapter, gated_delta: str) -> dict[str, Any]:
    """What decides which exchanges a step makes, and what its sums mean: the same on every rank."""
    return {
        "gated_delta": gated_delta,
        "training mode": adapter.is_training,
        "grad mode": torch.is_grad_enabled(),
        "config": config_values(adapter.config),
        "mtp": repr(adapter.mtp),
        **(stage_settings(adapter.model) if mesh.pp == 1 else {}),
    }


def stage_settings(model: PreTrainedModel) -> dict[str, Any]:
    """The same on every rank of a pipeline stage."""
    dtypes = sorted({str(p.dtype) for p in model.parameters()})
    return {"requires_grad of": trained(model), "dtypes of parameters": dtypes}
