"""A run's checkpoint as stock transformers loads it, with a model card."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from ...data.media.processor import load_processor
from ..export import ExportReport, export
from ..setup import TINY
from ..weights import checkpoint_folder
from .card import write_card
from .load import load_checkpoint


def export_checkpoint(
    run_folder: Path, checkpoint: str | int, out: Path, dtype: torch.dtype | None = None
) -> ExportReport:
    """Write the model of a run's checkpoint (`last`, `best` or a step): weights, config, generation config,
    tokenizer and processor, and a model card (`README.md`) with the run's curves.
    """
    found = load_checkpoint(run_folder, checkpoint)
    source = None if found.run.model.startswith(TINY) else checkpoint_folder(found.run.model)
    card = partial(write_card, run_folder=run_folder, trained=found)
    processor = load_processor(run_folder / "model")
    report = export(found.model, source, out, processor, dtype, beside=card)
    assert report is not None
    return report
