"""The axes of the device mesh, and which rank this process is on each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .comm import ending  # noqa: F401  its exit handler is registered
from .comm.consensus import agree
from .comm.rendezvous import join_job


class Axis(NamedTuple):
    """What the ranks along an axis are to each other."""

    name: str
    what: str
    sees_other_samples: bool = False
    """Whether its ranks are given samples of their own."""
    holds_other_parts: bool = True
    """Whether its ranks keep different parts of parameters, gradients and optimizer state."""


TABLE = (
    Axis("pp", "pipeline stages"),
    Axis("dp_replicate", "copies of the model that see different samples", True, False),
    Axis("dp_shard", "ranks that see different samples and share the parameters", True),
    Axis("ring", "ranks along which keys and values of long sequences travel"),
    Axis("ulysses", "ranks that exchange heads for tokens"),
    Axis("tp", "ranks that share every matrix product"),
)
"""Outermost first: neighbours in rank are neighbours in `tp`, then `ulysses`; ring ranks are further apart.
"""

AXES = tuple(axis.name for axis in TABLE)

EXPERTS_FROM = ("dp_shard", "ring", "ulysses", "tp")
"""The axes that `ep` is carved out of: neighbours in rank among them share the experts."""


def launched() -> tuple[int, int]:
    """This process's rank and how many there are, as torchrun says; 0 and 1 without it."""
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not found:
        return 0, 1
    given = ", ".join(f"{name}={value!r}" for name, value in found.items())
    try:
        rank, world_size = int(found["RANK"]), int(found["WORLD_SIZE"])
    except KeyError as missing:
        raise ValueError(
            f"the environment has {given} but no {missing.args[0]}; start with torchrun, which sets both, or "
            "unset it for one process"
        ) from None
    except ValueError:
        raise ValueError(
            f"the environment has {given}, which are not whole numbers; torchrun sets both"
        ) from None
    if not 0 <= rank < world_size:
        raise ValueError(f"the environment has {given}; ranks count from 0 to WORLD_SIZE − 1")
    return rank, world_size


@dataclass(frozen=True)
class Mesh:
    """How the processes of a job are shared out among the axes; reads torchrun's environment.

    Args:
        pp: pipeline stages.
        dp_replicate: copies of the model that see different samples.
        dp_shard: ranks that see different samples and share the parameters; −1 takes what the others leave.
        ring: ranks along which keys and values of long sequences travel.
        ulysses: ranks that exchange heads for tokens; the sequence group is `ring × ulysses`.
        tp: ranks that share every matrix product.
        ep: ranks that share the experts; carved out of `dp_shard × ring × ulysses × tp`.

    >>> mesh = Mesh()  # without torchrun's environment: one process
    >>> mesh.sequence_size, mesh.data_world_size
    (1, 1)
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    ep: int = 1
    rank: int = field(default_factory=lambda: launched()[0])
    world_size: int = field(default_factory=lambda: launched()[1])

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            size = getattr(self, axis)
            if size < 1 and not (axis == "dp_shard" and size == -1):
                raise ValueError(
                    f"{axis}={size} must be at least 1" + (" (or −1)" if axis == "dp_shard" else "")
                )
        if self.dp_shard == -1:
            others = prod(getattr(self, axis) for axis in AXES if axis != "dp_shard")
            if self.world_size % others:
                raise ValueError(
                    f"dp_shard=-1 takes what the other axes leave, but their product {others} does not "
                    f"divide the world size {self.world_size}: {self._sizes()}"
                )
            object.__setattr__(self, "dp_shard", self.world_size // others)
        product = prod(getattr(self, axis) for axis in AXES)
        if product != self.world_size:
            raise ValueError(
                f"the mesh needs {product} processes ({self._sizes()}) but the world size is "
                f"{self.world_size}; start `torchrun --nproc-per-node {product}` or set dp_shard=-1 to take "
                "what is left"
            )
        shared = prod(getattr(self, axis) for axis in EXPERTS_FROM)
        if shared % self.ep:
            raise ValueError(
                f"ep={self.ep} is carved out of {' × '.join(EXPERTS_FROM)} = {shared} and must divide it; "
                f"use one of {', '.join(str(n) for n in range(1, shared + 1) if shared % n == 0)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without process groups, which no other process can have: `pack` takes a mesh along to workers."""
        return {axis.name: getattr(self, axis.name) for axis in fields(self)}

    @property
    def sizes(self) -> dict[str, int]:
        """Of every axis, `ep` included; `Mesh(**mesh.sizes)` is the same mesh."""
        return {axis: getattr(self, axis) for axis in (*AXES, "ep")}

    def _sizes(self) -> str:
        return ", ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    def axis_rank(self, axis: str, rank: int | None = None) -> int:
        """The place on an axis of this process, or of another."""
        stride: int = prod(getattr(self, inner) for inner in AXES[AXES.index(axis) + 1 :])
        size: int = getattr(self, axis)
        return (self.rank if rank is None else rank) // stride % size

    @property
    def ring_rank(self) -> int:
        """Place on the ring."""
        return self.axis_rank("ring")

    @property
    def ulysses_rank(self) -> int:
        """Place in the Ulysses group."""
        return self.axis_rank("ulysses")

    @property
    def sequence_size(self) -> int:
        """Ranks that share one row: `ring × ulysses`."""
        return self.ring * self.ulysses

    @property
    def sequence_rank(self) -> int:
        """Place among the ranks that share one row."""
        return self.ring_rank * self.ulysses + self.ulysses_rank

    @property
    def row_size(self) -> int:
        """Ranks that see the same samples of a stage: `ring × ulysses × tp`. Each holds other tokens of the
        row between mixers and MLPs, and encodes other media."""
        return self.sequence_size * self.tp

    @property
    def row_rank(self) -> int:
        """Place among them."""
        return self.sequence_rank * self.tp + self.axis_rank("tp")

    @property
    def media_rank(self) -> int:
        """Place among the ranks that encode a row's media, which are those of its first pipeline stage; −1 on
        the others, which have none of them.
        """
        return self.row_rank if self.axis_rank("pp") == 0 else -1

    @property
    def data_world_size(self) -> int:
        """How many groups of ranks see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        """Which of them this process is in."""
        return self.data_rank_of(self.rank)

    def data_rank_of(self, rank: int) -> int:
        """Which of them a process is in."""
        return self.axis_rank("dp_replicate", rank) * self.dp_shard + self.axis_rank("dp_shard", rank)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """Of each group of ranks that see the same samples the first, by `data_rank`: it speaks for them."""
        alike = [axis.name for axis in TABLE if not axis.sees_other_samples]
        found = {
            self.data_rank_of(rank): rank
            for rank in range(self.world_size)
            if not any(self.axis_rank(axis, rank) for axis in alike)
        }
        return tuple(found[data_rank] for data_rank in range(self.data_world_size))

    def sum_over_data(self, of_ranks: Sequence[Sequence[int]]) -> list[int]:
        """Sums over the ranks that see different samples, of what each rank of the job counted in its own.

        >>> mesh = Mesh(dp_shard=2, ring=2, rank=0, world_size=4)
        >>> mesh.sum_over_data([[5, 1], [5, 1], [7, 0], [7, 0]])
        [12, 1]
        """
        assert len(of_ranks) == self.world_size, (len(of_ranks), self.world_size)
        return [sum(counts) for counts in zip(*(of_ranks[rank] for rank in self.leaders), strict=True)]

    def sum_over_parts(self, value: Tensor) -> Tensor:
        """A sum, in place, over the ranks that hold different parts of the model: each part counts once."""
        if self.world_size > 1:
            dist.all_reduce(value, group=self.process_group("parts"))
        return value

    @property
    def expert_shards(self) -> int:
        """Ranks that share the parameters of the same experts: `efsdp`."""
        shared: int = prod(getattr(self, axis) for axis in EXPERTS_FROM)
        return shared // self.ep

    @cached_property
    def device_meshes(self) -> dict[str, DeviceMesh]:
        """Torch's meshes by name, made by all ranks together on first use; none for one process.

        One for each axis, and `sequence` (ring × ulysses), `row` (sequence × tp), `loss` (data × sequence),
        `fsdp` (what shares parameters that tp cuts: dp_shard × ring × ulysses, with dp_replicate as a second
        axis where it is used), `tokens` (what shares all others: fsdp × tp, flattened), `parts` (ranks that
        hold different parts of the model); with experts `ep`, and `efsdp` as `fsdp` is.
        """
        if self.world_size == 1:
            return {}
        # Ranks with other axes would make other groups, and wait in them for ever.
        agree(self.cpu_group, None, alike={"the mesh": f"{self._sizes()}, ep={self.ep}"})
        device_type = self.device_type
        root = init_device_mesh(device_type, tuple(getattr(self, axis) for axis in AXES), mesh_dim_names=AXES)
        meshes = {axis: root[axis] for axis in AXES}
        meshes["sequence"] = root["ring", "ulysses"]._flatten()
        meshes["row"] = root["ring", "ulysses", "tp"]._flatten("row") if self.tp > 1 else meshes["sequence"]
        meshes["loss"] = root["dp_replicate", "dp_shard", "ring", "ulysses"]._flatten()
        parts = tuple(axis.name for axis in TABLE if axis.holds_other_parts)
        meshes["parts"] = root[parts]._flatten("parts")
        if self.dp_replicate > 1:
            shards = self.dp_shard * self.sequence_size
            outside = self._outside_of({"shard": shards, "tp": self.tp}, device_type)
            # A tensor has one root: what tp cuts is sharded on a mesh beside that of its cut.
            meshes["fsdp"], meshes["tp"] = outside["dp_replicate", "shard"], outside["tp"]
            meshes["tokens"] = meshes["fsdp"]
            if self.tp > 1:
                tokens = self._outside_of({"shard": shards * self.tp}, device_type)
                meshes["tokens"] = tokens["dp_replicate", "shard"]
        else:
            meshes["fsdp"] = meshes["tokens"] = root["dp_shard", "ring", "ulysses"]._flatten()
            if self.tp > 1:
                meshes["tokens"] = root["dp_shard", "ring", "ulysses", "tp"]._flatten("tokens")
        if self.ep > 1:
            experts = self._outside_of({"shard": self.expert_shards, "ep": self.ep}, device_type)
            replicated = self.dp_replicate > 1
            meshes["efsdp"] = experts["dp_replicate", "shard"] if replicated else experts["shard"]
            meshes["ep"] = experts["ep"]
        return meshes

    @property
    def device_type(self) -> str:
        """Where the groups communicate."""
        return "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"

    def _outside_of(self, inner: dict[str, int], device_type: str) -> DeviceMesh:
        """A mesh that sees the ranks of a stage and a replica in another way."""
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, **inner}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def process_group(self, name: str) -> dist.ProcessGroup | None:
        """The group of a mesh of one axis, such as `ring`, `sequence` or `loss`; None for one process."""
        return None if self.world_size == 1 else self.device_meshes[name].get_group()

    @cached_property
    def cpu_group(self) -> dist.ProcessGroup | None:
        """All ranks, on the CPU: for agreeing on numbers and errors without waiting for a GPU."""
        if self.world_size == 1:
            return None
        join_job()
        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f"the mesh has {self.world_size} processes, the process group {dist.get_world_size()}; they "
                "must agree"
            )
        return dist.new_group(backend="gloo") if "nccl" in dist.get_backend() else dist.group.WORLD
