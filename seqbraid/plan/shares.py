"""What a rank keeps of each parameter, and has of it when it is gathered."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod

from torch import nn

from ..mesh import Mesh
from ..models.parts import ModelParts
from ..models.tensor import TensorPlan
from .units import expert_cut


class Shares:
    """Of the parameters of a model on a mesh, those of the rank that has most."""

    def __init__(self, parts: ModelParts, mesh: Mesh, tensor: TensorPlan | None) -> None:
        self.tp, self.ep, self.fsdp = mesh.tp, mesh.ep, mesh.dp_shard * mesh.sequence_size
        self.is_sharded = self.tp * self.fsdp * mesh.dp_replicate > 1
        self.tensor = tensor
        cuts = () if tensor is None else tensor.cuts
        self._cut = {id(p): cut.dim if p.ndim > 1 else 0 for cut in cuts for p in cut.module.parameters()}
        self._experts = parts.expert_parameters if mesh.ep > 1 else frozenset[int]()
        self._expert_shards = mesh.expert_shards

    def held(self, p: nn.Parameter) -> int:
        """Numbers that stay there from step to step: FSDP cuts rows, of what tp or ep has cut before; the
        first ranks hold what does not divide.
        """
        shape, dim, ranks = [*p.shape] or [1], 0, self.fsdp * self.tp
        if id(p) in self._cut:
            ranks, over = self.fsdp, self._cut[id(p)]
            shape[over] = ceil(shape[over] / self.tp)
        elif id(p) in self._experts:
            ranks, shape[0] = self._expert_shards, shape[0] // self.ep
            dim = expert_cut(shape, ranks)
        shape[dim] = ceil(shape[dim] / ranks)
        return int(prod(shape))

    def gathered(self, parameters: Iterable[nn.Parameter]) -> int:
        """Numbers of a unit's parameters while it is at work."""

        def parts(p: nn.Parameter) -> int:
            return self.tp if id(p) in self._cut else self.ep if id(p) in self._experts else 1

        return sum(ceil(p.numel() / parts(p)) for p in parameters)
