"""FSDP2 over the joint data × sequence axes: parameters sharded, gradients summed."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from ..comm.consensus import agree
from ..mesh import Mesh
from ..models.braided import BraidedModel
from ..plan.units import Units
from .experts import experts_shard, place_experts
from .tensor import share_matrices

COMPUTE_DTYPES = (torch.bfloat16, torch.float32)
"""What a step may be computed in. float16 would need its loss scaled."""


def check_compute_dtype(model: nn.Module, compute_dtype: torch.dtype | None) -> None:
    """Refuse a type that we cannot compute in, and parameters too narrow to be trained beside it."""
    if compute_dtype is None:
        return
    if compute_dtype not in COMPUTE_DTYPES:
        choices = ", ".join(str(dtype) for dtype in COMPUTE_DTYPES)
        raise ValueError(f"compute_dtype={compute_dtype} is not supported; use one of {choices}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(
                f"compute_dtype={compute_dtype} keeps float32 parameters, but {name} is {parameter.dtype}; "
                "load the model with dtype=torch.float32, or leave compute_dtype out"
            )


def shard_parameters(model: BraidedModel, mesh: Mesh, compute_dtype: torch.dtype | None = None) -> None:
    """Shard unit by unit (`plan/units.py` says which, and what stays gathered); `.grad` is then the sum over
    all ranks, each of which holds its part of it.

    The sum is right because every rank's loss is its own tokens' share of the one global mean. With a
    `compute_dtype`, parameters are cast when they are gathered, and gradients are summed in float32. One
    process takes the same way, as a group of one, so that `compute_dtype` means the same on any mesh.
    """
    if mesh.ep > 1:
        place_experts(model.parts, mesh)
    if model.tensor is not None:
        share_matrices(model)
    meshes = mesh.device_meshes or dict.fromkeys(("fsdp", "tokens"), _mesh_of_one())
    # Gradients of narrower parameters are summed in float32 as well.
    policy = MixedPrecisionPolicy(reduce_dtype=_reduce_dtype(model))
    if compute_dtype is not None:
        # Inputs are not cast: the embeddings start in the right type, as in a stock model of that type, and
        # the casting would rebuild every dataclass among a layer's arguments, the step's context included.
        policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    units = Units.of(model.parts, mesh.ep, model.tensor)
    for unit in reversed(units.units):  # those within others first
        fully_shard(
            unit.module,
            mesh=meshes[unit.axes],
            mp_policy=policy,
            reshard_after_forward=not unit.stays_for_backward,
            shard_placement_fn=partial(experts_shard, mesh.expert_shards) if unit.axes == "efsdp" else None,
        )
    fully_shard(model, mesh=meshes[units.rest_axes], mp_policy=policy)
    _prefetch(model, units)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "gathered")


def _prefetch(model: nn.Module, units: Units) -> None:
    """While a unit computes, the next is gathered: said here, since the host may wait for the device within a
    layer (experts, chains of states), and would gather the next one too late.
    """
    module: Any
    for module, following in units.forward_prefetch(model):
        module.set_modules_to_forward_prefetch(following)
    order = units.backward
    wanted = {
        id(unit.module): next((u.module for u in order[i + 1 :][:1] if u.backward_reads), unit.module)
        for i, unit in enumerate(order)
        if not unit.begins_stage
    }
    for unit in units.units:
        module = unit.module
        module.set_unshard_in_backward(unit.backward_reads)
        # One that is at work already stands for none: by default FSDP2 gathers what ran before, which may
        # have no backward.
        module.set_modules_to_backward_prefetch([wanted.get(id(module), module)])
    root: Any = model
    root.set_modules_to_backward_prefetch([root])


def _mesh_of_one() -> DeviceMesh:
    """This process alone; a process group of one is made where there is none."""
    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        backend = "nccl" if on_gpu else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if dist.get_world_size() != 1:
        raise ValueError(
            f"the mesh is one process, but the process group has {dist.get_world_size()}; give their number "
            "to the mesh, or leave compute_dtype out"
        )
    return init_device_mesh("cuda" if "nccl" in dist.get_backend() else "cpu", (1,))


def _reduce_dtype(model: nn.Module) -> torch.dtype | None:
    """Float32 where gradients are narrower; else what they are."""
    narrow = any(p.dtype.itemsize < 4 for p in model.parameters() if p.requires_grad)
    return torch.float32 if narrow else None


def check_same_weights(model: nn.Module, mesh: Mesh) -> None:
    """Each rank keeps its part of its own weights: if they differed, the whole would be a model of nobody."""
    if mesh.world_size == 1 or any(p.is_meta for p in model.parameters()):
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
