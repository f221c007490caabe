"""What a step was looking at when its loss or its gradient was no number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..models.batch import PackedBatch
from ..models.braided import BraidedModel
from .optimizer import local


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is infinite or not a number."""


def write_step(
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
    return bool(local(x.detach()).isfinite().all())
