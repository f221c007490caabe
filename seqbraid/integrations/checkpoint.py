"""The sharded state beside a stock checkpoint, and the stock checkpoint of a model on a mesh."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..comm.consensus import raised_by_all
from ..models.braided import BraidedModel
from ..models.tensor_parts import own_part
from ..train.checkpoint.checkpoints import Checkpoints
from ..train.lora import has_lora, save_adapter

STATE = "seqbraid"
"""The folder of a checkpoint that holds the parts of all ranks."""


WAY_OUT = "give the folder of another checkpoint as resume_from_checkpoint"


class ShardedState:
    """Model and optimizer of a run, as they lie on its ranks, within the folders of its checkpoints."""

    def __init__(self, model: BraidedModel) -> None:
        self.model = model
        self._base = frozen_weights(model) if has_lora(model.model) else None

    def save(self, folder: Path, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Write it; all ranks call it, and it is on the disk when they return."""
        self._checkpoints(folder).save(step, self.model, optimizer, {})

    def load(self, folder: Path, optimizer: torch.optim.Optimizer | None) -> None:
        """Fill the model, and the optimizer if it is given, from a checkpoint of any mesh."""
        checkpoints = self._checkpoints(folder)
        checkpoints.load(self.check(folder), self.model, optimizer)

    def check(self, folder: Path) -> Path:
        """Where the state of a checkpoint is; refused where there is none."""
        found = self._checkpoints(folder).last()
        if found is None:
            raise ValueError(
                f"{folder} has no complete {STATE}/ folder, so training cannot go on from it: it was saved "
                "with save_only_model=True, by another trainer, or not to the end"
            )
        return found

    def _checkpoints(self, folder: Path) -> Checkpoints:
        mesh = self.model.mesh
        return Checkpoints(folder / STATE, mesh, keep=1, asynchronous=False, base=self._base, way_out=WAY_OUT)


@torch.no_grad()
def frozen_weights(model: BraidedModel) -> str:
    """What identifies the weights that are not trained, on any mesh: sums of bits, which no order rounds."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    frozen = [(name, p) for name, p in model.model.named_parameters() if not p.requires_grad]
    bits = [own_part(p).contiguous().view(sizes[p.dtype.itemsize]) for _, p in frozen]
    sums = [x.sum(dtype=torch.int64) for x in bits]
    total = model.mesh.sum_over_parts(torch.stack(sums)) if sums else torch.zeros(0)
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in frozen]
    return f"{zlib.crc32(repr((shapes, total.tolist())).encode()):08x}"


def save_weights(model: BraidedModel, folder: Path, beside: Callable[[Path], None]) -> None:
    """Write what stock `from_pretrained` loads, or an adapter; then the first rank writes `beside`."""
    mesh = model.mesh
    with raised_by_all(mesh.cpu_group):
        if mesh.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
    if has_lora(model.model):
        _save_adapter(model, folder)
    else:
        model.save_pretrained(folder)
    with raised_by_all(mesh.cpu_group):
        if mesh.rank == 0:
            beside(folder)


def _save_adapter(model: BraidedModel, folder: Path) -> None:
    """Into a folder that may hold other things, as the output folder of a run does."""
    fresh = folder / "adapter.new"
    save_adapter(model, fresh, base_name=getattr(model.model, "name_or_path", None) or None)
    with raised_by_all(model.mesh.cpu_group):
        if model.mesh.rank == 0:
            for file in fresh.iterdir():
                file.replace(folder / file.name)
            fresh.rmdir()


def read_beside(path: Path) -> Any:
    """What was saved with torch beside the parts; a ValueError where it cannot be read."""
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # of a damaged zip file, or of pickle
        raise ValueError(
            f"{path} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}; {WAY_OUT}"
        ) from None


def save_beside(folder: Path, processor: Any, args: Any) -> None:
    """Tokenizer or processor, and the training arguments, as the stock Trainer writes them."""
    if processor is not None:
        processor.save_pretrained(folder)
    torch.save(args, folder / "training_args.bin")
