"""The norm of the whole gradient, whatever meshes its parts lie on, and clipping by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..mesh import Mesh
from ..models.braided import BraidedModel
from ..models.tensor_parts import own_part


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor], mesh: Mesh) -> float:
    """The norm of the whole gradient, over all parameters and all ranks that hold parts of it.

    Ranks of `dp_replicate` hold the same parts, so they are not added. Experts over ranks lie on another mesh
    than the rest, but each number of theirs is on one rank of a replica as well.
    """
    device = gradients[0].device if gradients else mesh.device_type  # of a stage that learns nothing
    square = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        square += torch.linalg.vector_norm(own_part(gradient), dtype=torch.float32).double().square()
    mesh.sum_over_parts(square)
    return float(square.sqrt())


def counted(model: BraidedModel, gradients: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Of gradients by parameter those that this rank counts: a weight of two stages, on the first."""
    copy = model.parts.head.weight if model.copies else None
    return [gradient for parameter, gradient in gradients.items() if parameter is not copy]


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], norm: float, largest: float | None) -> None:
    """Scale the whole gradient down to the largest norm that is allowed."""
    if largest is not None and norm > largest:
        torch._foreach_mul_([own_part(gradient) for gradient in gradients], largest / norm)


def clip_grad_norm_(model: BraidedModel, largest: float) -> float:
    """For loops of your own: clip the gradients of a model on any mesh, and give their norm before.

    `torch.nn.utils.clip_grad_norm_` raises where parameters lie on several meshes, as with `ep`.

    >>> model = seqbraid.parallelize(seqbraid.models.tiny.decoders.tiny_model("qwen3_moe"))
    >>> batch = seqbraid.pack([{"input_ids": [5, 6, 7]}], model.model.config)
    >>> model(batch).loss.backward()
    >>> norm = clip_grad_norm_(model, largest=0.1)
    >>> norm > 0.1, round(clip_grad_norm_(model, largest=0.1), 4)
    (True, 0.1)
    """
    gradients: dict[Tensor, Tensor] = {p: p.grad for p in model.parameters() if p.grad is not None}
    norm = gradient_norm(counted(model, gradients), model.mesh)
    clip_gradients(list(gradients.values()), norm, largest)
    return norm
