"""A model that was trained, from a run's checkpoint or an exported folder, in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ...data.media.processor import load_processor
from ...distributed.api import parallelize
from ...mesh import Mesh
from ...models.braided import BraidedModel
from ..checkpoint.checkpoints import Checkpoints
from ..config import TrainConfig
from ..config_file import load_config
from ..setup import adapted_weights, attach_configured_mtp, make_model
from ..weights import empty_model, load_stock

WAY_OUT = "give another one as --checkpoint"


class Trained(NamedTuple):
    """A run's model at one of its checkpoints."""

    model: BraidedModel
    run: TrainConfig
    state: dict[str, Any]
    """What the checkpoint says of the run."""
    path: Path
    """The checkpoint."""


@dataclass(frozen=True)
class Usable:
    """A stock model that can answer, and what makes its tokens."""

    model: PreTrainedModel
    processor: Any
    """Or tokenizer."""
    name: str
    image_options: dict[str, int]
    """How large pictures were in training, where the run says so."""


def load_checkpoint(run_folder: Path, checkpoint: str | int) -> Trained:
    """The model of a run's checkpoint (`last`, `best` or a step).

    The run's folder knows the rest: `model/` has the config and the processor, `config.yaml` the checkpoint
    that the run started from and its adapters.
    """
    path = checkpoint_path(run_folder, checkpoint)
    run = load_config(run_folder / "config.yaml")
    if run.lora.rank:  # the checkpoint has the adapters alone
        model = make_model(run)
    else:
        dtype_of_run = torch.bfloat16 if run.precision == "bfloat16" else torch.float32
        model = empty_model(run_folder / "model", dtype_of_run)
        attach_configured_mtp(run, model, weights=False)
    mesh = Mesh()
    braided = parallelize(model, mesh)
    checkpoints = Checkpoints(
        run_folder / "checkpoints",
        mesh,
        base=adapted_weights(run),
        way_out=f"{WAY_OUT}{_published(path.parent)}",
    )
    state = checkpoints.load(path, braided, None)
    return Trained(braided, run, state, path)


def load_usable(folder: Path, checkpoint: str | int | None, device: torch.device) -> Usable:
    """What a folder has, ready to answer.

    Args:
        folder: of a run, of an export, or any checkpoint of stock transformers.
        checkpoint: of a run: `last` (the default), `best` or a step.
        device: where the model goes.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{str(folder)!r} is not a folder; give a run's (`out` of its config) or an export's"
        )
    if (folder / "checkpoints").is_dir():
        found = load_checkpoint(folder, "last" if checkpoint is None else checkpoint)
        model, data = found.model.release(), found.run.data
        dtype = torch.float32 if found.run.precision == "float32" else torch.bfloat16
        pixels = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
        given = {key: value for key, value in pixels.items() if value is not None}
        processor, name = load_processor(folder / "model"), f"{folder.name}, {found.path.name}"
        return Usable(model.to(device, dtype).eval(), processor, name, given)
    if checkpoint is not None:
        raise ValueError(
            f"{folder} is not a run's folder, so it has no checkpoint {checkpoint!r}; leave it out"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has neither checkpoints (a run's folder) nor a config.json (an export's folder)"
        )
    stock = load_stock(folder, device=device).model.eval()
    return Usable(stock, load_processor(folder), folder.name, {})


def checkpoint_path(run_folder: Path, checkpoint: str | int) -> Path:
    """The folder of a run's checkpoint, by `last`, `best` or a step."""
    folder = run_folder / "checkpoints"
    name = str(checkpoint)
    if name in ("last", "best"):
        if not (folder / name).is_file():
            raise ValueError(f"{run_folder} has no {name!r} checkpoint{_published(folder)}")
        named = (folder / name).read_text(encoding="utf-8", errors="replace").strip()
        if Path(named).name != named or not (folder / named).is_dir():
            raise ValueError(
                f"{folder / name} names {named!r}, which is not there{_published(folder)}; "
                "give one of these as --checkpoint"
            )
        name = named
    elif name.isdecimal():
        name = f"step-{int(name):08d}"
    if Path(name).name != name or not (folder / name).is_dir():
        raise ValueError(f"{run_folder} has no checkpoint {checkpoint!r}{_published(folder)}")
    return folder / name


def _published(folder: Path) -> str:
    steps = sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*") if p.name[5:].isdecimal())
    return f"; it has {', '.join(map(str, steps))}" if steps else "; it has none"
