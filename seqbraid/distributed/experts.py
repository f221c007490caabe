"""Experts over ranks: which rank has which, and how FSDP2 shards what one rank has.

With E experts, rank e of an `ep` group has experts e·E/ep up to (e+1)·E/ep. They are DTensors, `Shard(0)` on
`ep`, and FSDP2 shards them over `efsdp`: the ranks with the same experts. A rank's experts get the tokens of
all ranks of its `ep` group, so that the sum over `efsdp` is the sum over all tokens.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from ..mesh import Mesh
from ..models.parts import ModelParts


def place_experts(parts: ModelParts, mesh: Mesh) -> None:
    """Leave each rank its own experts; FSDP2 takes them from there."""
    axis = mesh.device_meshes["ep"]
    for module in (module for layer in parts.layers for module in layer.experts):
        for name, whole in list(module._parameters.items()):
            assert whole is not None
            # Each rank has the same whole one.
            own = distribute_tensor(whole.detach(), axis, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(own, requires_grad=whole.requires_grad)


def experts_shard(shards: int, parameter: Tensor) -> Shard:
    """The axis along which FSDP2 cuts a rank's experts: the experts where they divide; else, as there may be
    fewer than ranks, the channels where these divide.
    """
    own = parameter.to_local().shape if hasattr(parameter, "to_local") else parameter.shape
    return Shard(next((dim for dim in range(min(2, len(own))) if own[dim] % shards == 0), 0))
