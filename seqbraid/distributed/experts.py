"""Experts over ranks: which rank has which, and how FSDP2 shards what one rank has.

With E experts, rank e of an `ep` group has experts e·E/ep up to (e+1)·E/ep. They are DTensors, `Shard(0)` on
`ep`, and FSDP2 shards them over `efsdp`: the ranks with the same experts. A rank's experts get the tokens of
all ranks of its `ep` group, so that the sum over `efsdp` is the sum over all tokens.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..mesh import Mesh
from ..models.parts import ModelParts
from ..plan.units import expert_cut


def place_experts(parts: ModelParts, mesh: Mesh) -> None:
    """Leave each rank its own experts; FSDP2 takes them from there."""
    axis = mesh.device_meshes["ep"]
    for module in (module for layer in parts.every_layer for module in layer.experts):
        for name, whole in list(module._parameters.items()):
            assert whole is not None
            # Each rank has the same whole one.
            own = distribute_tensor(whole.detach(), axis, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(own, requires_grad=whole.requires_grad)


def experts_shard(shards: int, parameter: Tensor) -> Shard:
    """Where FSDP2 cuts a parameter of a rank's experts."""
    assert isinstance(parameter, DTensor)
    return Shard(expert_cut(parameter.to_local().shape, shards))
