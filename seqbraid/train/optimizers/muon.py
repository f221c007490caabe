"""Muon on a mesh: torch's own step on whole matrices, each on one of the ranks that hold its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...mesh import Mesh
from ...models.braided import BraidedModel
from ...models.parts import ModelParts
from .whole import WholeMatrices, box_of


def layer_matrices(model: nn.Module) -> frozenset[int]:
    """Ids of what Muon steps: matrices of layers (of multi-token prediction too) and of the blocks of media
    encoders, and experts, each of which is a matrix.
    """
    parts = model.parts if isinstance(model, BraidedModel) else ModelParts.of(model)
    blocks = [layer.module for layer in parts.every_layer]
    blocks += [block for tower in parts.towers for block in tower.blocks]
    embeddings = {id(m.weight) for block in blocks for m in block.modules() if isinstance(m, nn.Embedding)}
    found = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2} - embeddings
    found |= {
        id(p)
        for layer in parts.every_layer
        for module in layer.experts
        for p in module.parameters()
        if p.ndim == 3
    }
    return frozenset(found)


class ShardedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` for parts of matrices: the same numbers, whatever ranks the parts lie on.

    Momentum and decay work number by number. What is made of a whole matrix is computed by `torch.optim.Muon`
    itself, on one rank, and sent to those that have its parts.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        whole: WholeMatrices,
        options: Mapping[str, Any],
    ) -> None:
        self.names, self.whole = names, whole
        self.whole_options = {key: value for key, value in options.items() if key not in MOMENTUM}
        momentum = {**MOMENTUM, **{key: options[key] for key in MOMENTUM if key in options}}
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0, **momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step; all ranks that share parts take it together."""
        updates = {}
        for group in self.param_groups:
            momentum = group["momentum"]
            for p in group["params"]:
                if p.grad is None:  # of the whole matrix, then, and on every rank
                    updates[self.names[p]] = torch.zeros_like(p)
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                kept = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                updates[self.names[p]] = p.grad.lerp(kept, momentum) if group["nesterov"] else kept
        directions = self.whole.map(updates, self._direction)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(directions[self.names[p]], alpha=group["lr"])

    def _direction(self, update: Tensor) -> Tensor:
        """What Muon adds to a matrix at a learning rate of 1."""
        with torch.enable_grad():
            p = nn.Parameter(torch.zeros_like(update))
        p.grad = update
        still = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        torch.optim.Muon([p], **{**still, **self.whole_options}).step()
        return p.detach()


MOMENTUM = {"momentum": 0.95, "nesterov": True}
"""Options of Muon that work number by number, and torch's defaults."""


def sharded_muon(
    groups: Sequence[dict[str, Any]],
    named: Mapping[str, tuple[Tensor, nn.Parameter]],
    mesh: Mesh | None,
    options: Mapping[str, Any],
) -> ShardedMuon:
    """Muon over groups of plain parameters; all ranks call it.

    Args:
        groups: of this rank's parts, with their learning rates and decays.
        named: by name, the parameter on the mesh, and this rank's part of it.
        mesh: of the job.
        options: of `torch.optim.Muon`.
    """
    shapes = {name: p.shape for name, (p, _) in named.items()}
    whole = WholeMatrices(shapes, {name: box_of(p) for name, (p, _) in named.items()}, mesh)
    return ShardedMuon(groups, {own: name for name, (_, own) in named.items()}, whole, options)
