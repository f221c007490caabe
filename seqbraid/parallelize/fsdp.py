"""FSDP2 over the joint data × sequence axes: parameters sharded, gradients summed."""

from __future__ import annotations

import zlib

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from ..comm.consensus import agree
from ..mesh import Mesh
from ..models.braided import BraidedModel


def shard_parameters(model: BraidedModel, mesh: Mesh) -> None:
    """Shard layer by layer; `.grad` is then the sum over all ranks, each of which holds its part of it.

    The sum is right because every rank's loss is its own tokens' share of the one global mean.
    """
    _check_same_weights(model, mesh)
    axes = mesh.device_meshes["fsdp"]
    for layer in model.decoder_layers:
        fully_shard(layer, mesh=axes)
    fully_shard(model, mesh=axes)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "logits")


def _check_same_weights(model: nn.Module, mesh: Mesh) -> None:
    """Each rank keeps its part of its own weights: if they differed, the whole would be a model of nobody."""
    if any(p.is_meta for p in model.parameters()):
        return
    digest = 0
    for name, parameter in model.named_parameters():
        total = parameter.detach().double().sum().item()
        digest = zlib.crc32(f"{name} {tuple(parameter.shape)} {total!r}".encode(), digest)
    found = [row[0] for row in agree(mesh.cpu_group, None, [digest])]
    different = [rank for rank, other in enumerate(found) if other != found[0]]
    if different:
        raise ValueError(
            f"the weights on ranks {different} differ from those on rank 0; load the same checkpoint, or "
            "call torch.manual_seed with one seed on every rank before the model is built"
        )
