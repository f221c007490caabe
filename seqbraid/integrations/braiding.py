"""How a stock model that a trainer is given gets onto the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..comm.consensus import raised_by_all
from ..distributed.api import parallelize
from ..mesh import Mesh
from ..models.braided import BraidedModel
from ..models.local_tokens import TokenLoss
from ..ops.kernels import KernelOptions
from ..plan.memory import MemoryOptions
from ..train.lora import stock_under
from .arguments import asked_memory, check_world

OWN = ("policy", "gated_delta", "kernels", "loss")
"""Fields of `Braiding` that the trainers take by name."""


@dataclass(frozen=True)
class Braiding:
    """How a stock model gets onto the mesh, and rows onto its ranks."""

    mesh: Mesh | None = None
    row_tokens: int | None = None
    policy: str = "balanced"
    gated_delta: str = "auto"
    memory: MemoryOptions | None = None
    kernels: KernelOptions | None = None
    loss: TokenLoss | None = None
    braided: BraidedModel | None = None
    """The model that was on the mesh already."""

    def braid(self, model: Any, args: Any) -> BraidedModel:
        """The model on the mesh; one that is there stays as it is."""
        if isinstance(model, BraidedModel) or self.braided is not None:
            found = model if self.braided is None else self.braided
            if self.mesh is not None and self.mesh.sizes != found.mesh.sizes:
                raise ValueError("the model is on a mesh already, and mesh= is another; leave mesh= out")
            check_world(args, found.mesh)
            return found
        mesh = Mesh(dp_shard=-1) if self.mesh is None else self.mesh
        check_world(args, mesh)
        with raised_by_all(mesh.cpu_group):
            stock = stock_under(model)
            memory = asked_memory(args) if self.memory is None else self.memory
            if mesh.world_size == 1:
                stock = stock.to(args.device)
        return parallelize(
            stock,
            mesh,
            gated_delta=self.gated_delta,
            memory=memory,
            compute_dtype=_compute_dtype(stock, args),
            kernels=self.kernels,
        )


def _compute_dtype(model: torch.nn.Module, args: Any) -> torch.dtype | None:
    """`bf16=True` computes in bfloat16; parameters that are narrow already are what they are computed in."""
    narrow = any(p.dtype != torch.float32 for p in model.parameters() if p.requires_grad)
    return torch.bfloat16 if args.bf16 and not narrow else None
