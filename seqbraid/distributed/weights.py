"""Weights that one rank has read, to all ranks, each of which keeps its part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..comm.consensus import agree
from ..models.braided import BraidedModel
from ..models.parts import tensors_by_name


def spread_weights(model: BraidedModel, source: nn.Module | None, device: torch.device) -> None:
    """Give a model that was put on the mesh without weights those of a stock model that the first rank has.

    So a host holds the whole model once, however many ranks it has, and a GPU never more than one tensor
    beside its own part.

    Args:
        model: what `parallelize` made of a model whose parameters are on the meta device, on every rank.
        source: the same model with its weights, on the first rank; None on the others.
        device: where the parts go.
    """
    first = model.mesh.rank == 0
    named = _own(model)
    wanted = tensors_by_name(model.structure)  # those of other pipeline stages too
    found = {} if source is None else tensors_by_name(source)
    error = None
    if first != (source is not None):
        error = ValueError("only the first rank passes the weights")
    elif not all(x.is_meta for x in named.values()):
        error = ValueError("the model already has weights; build it on the meta device")
    elif first and (wrong := sorted(name for name, x in wanted.items() if _differ(x, found.get(name)))):
        error = ValueError(f"the loaded weights do not match the model: {', '.join(wrong[:5])}")
    agree(model.mesh.cpu_group, error)
    model.to_empty(device=device)
    named = _own(model)
    with torch.no_grad():
        for name, kind in wanted.items():
            full = torch.empty(kind.shape, dtype=kind.dtype, device=device)
            if first:
                full.copy_(found[name])
            dist.broadcast(full, src=0)
            target = named.get(name)
            if target is None:
                continue
            if isinstance(target, DTensor):
                part = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(part.to_local())
            else:
                target.copy_(full)


def _own(model: BraidedModel) -> dict[str, Tensor]:
    """This rank's tensors, by the names that they have where they are counted."""
    return {model.copies.get(name, name): x for name, x in tensors_by_name(model.model).items()}


def _differ(here: Tensor, there: Tensor | None) -> bool:
    return there is None or (here.shape, here.dtype) != (there.shape, there.dtype)
