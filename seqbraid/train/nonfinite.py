"""What a step was looking at when its loss or its gradient was no number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors.torch import save_file
from torch import nn

from ..comm.consensus import gather_objects
from ..data.stream.loader import StepData
from ..mesh import Mesh
from ..models.batch import PackedBatch
from ..models.braided import BraidedModel
from ..models.output import StepOutput
from ..models.tensor_parts import own_part
from .optimizers.partwise import PartwiseOptimizer


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is infinite or not a number."""


def refuse_not_finite(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, step: int, lr: float
) -> None:
    """On every rank, before a checkpoint of what one rank holds would be written."""
    found = first_not_finite(model, optimizer)
    names = [name for name in gather_objects(mesh.cpu_group, found) if name]
    if names:
        raise NonFiniteError(
            f"after step {step} {names[0]} is not finite, so no checkpoint of this step is written; try a "
            f"lower train.lr (now {lr}) or a longer train.warmup. Checkpoints of earlier steps are kept"
        )


def first_not_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The first trained parameter, or entry of the optimizer, that is not finite on this rank; empty if none.

    One number leaves the device, whatever the size of the model.
    """
    named, numbers = {}, {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            named[name] = own_part(parameter.detach())
            for entry, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    named[f"{name}, {entry} of the optimizer"] = own_part(value)
                elif isinstance(value, float):
                    numbers[f"{name}, {entry} of the optimizer"] = value
    if odd := [name for name, value in numbers.items() if not math.isfinite(value)]:
        return odd[0]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for x in named.values():
        by_device.setdefault(x.device, []).append(x.isfinite().all())
    if all(bool(torch.stack(found).all()) for found in by_device.values()):
        return ""
    return next(name for name, x in named.items() if not x.isfinite().all())


class StepFound(NamedTuple):
    """What a step came to."""

    step: int
    output: StepOutput
    grad_norm: float


def stop_non_finite(
    folder: Path,
    rank: int,
    model: BraidedModel,
    optimizer: PartwiseOptimizer,
    data: StepData,
    found: StepFound,
) -> NoReturn:
    """Write what this rank was looking at, and end the run."""
    folder = folder / "nonfinite" / f"step-{found.step:08d}"
    assert found.output.batch_losses is not None
    losses = found.output.batch_losses.tolist()
    facts = {"step": found.step, "grad_norm": repr(found.grad_norm), "samples": data.where}
    gradients = optimizer.gradients()
    _write_step(folder, rank, model, gradients, data.prepared.batches, losses, facts)
    raise NonFiniteError(
        f"step {found.step}: loss {sum(losses)}, gradient norm {found.grad_norm}; nothing was updated. "
        f"What each rank was computing is in {folder}"
    )


def _write_step(
    folder: Path,
    rank: int,
    model: BraidedModel,
    gradients: Mapping[torch.Tensor, torch.Tensor],
    batches: Sequence[PackedBatch],
    losses: Sequence[float],
    facts: dict[str, Any],
) -> None:
    """This rank's part of the step: its tokens as safetensors, and what is known of it as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"batch{i}.{name}": getattr(batch, name).cpu().contiguous()
        for i, batch in enumerate(batches)
        for name in ("input_ids", "targets", "positions")
    }
    for i, batch in enumerate(batches):
        for j, media in enumerate(batch.media.own if batch.media is not None else ()):
            tensors[f"batch{i}.media{j}.{media.item.kind}"] = media.payload.cpu().contiguous()
    save_file(tensors, folder / f"rank{rank}.safetensors")
    bad = [name for name, p in model.named_parameters() if p in gradients and not _finite(gradients[p])]
    weights = [name for name, p in model.named_parameters() if not _finite(p)]
    known = {
        **facts,
        "losses": [repr(loss) for loss in losses],
        "lengths": [list(batch.layout.lengths) for batch in batches],
        "parameters_not_finite": weights,
        "gradients_not_finite": bad,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _finite(x: torch.Tensor) -> bool:
    return bool(own_part(x.detach()).isfinite().all())
