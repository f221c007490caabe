"""Short runs of the trainers of transformers and TRL, in one process and on ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from transformers import EvalPrediction, TrainingArguments, default_data_collator

from seqbraid import Mesh
from seqbraid.data.tiny import tiny_training_model
from seqbraid.integrations.transformers import Trainer

ROW = 128
LR = 3e-3

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # TRL would report its use


@contextmanager
def as_torchrun_starts() -> Iterator[None]:
    """What accelerate asks of the environment; it keeps what it found first, but a rank of the pool is one of
    two and then one of four.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": world_size}
    with patch.dict(os.environ, found if world_size != "1" else {}):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield


def tokens(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Records of token ids, the first two without a label."""
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(5, 60, count).tolist():
        ids = (3 + 377 * rng.random(length) ** 3).astype(int).tolist()  # some are frequent, which is learnt
        found.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return found


def arguments(out: Path | str, kind: type[TrainingArguments] = TrainingArguments, **changes: Any) -> Any:
    """Quiet ones, on the CPU, with AdamW at a constant rate."""
    settings: dict[str, Any] = {
        "learning_rate": LR, "lr_scheduler_type": "constant", "use_cpu": True, "logging_steps": 1, "seed": 0,
        "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 1, "save_strategy": "no",
    }  # fmt: skip
    return kind(str(out), **{**settings, **changes})


def perplexity(found: EvalPrediction) -> dict[str, float]:
    """From what `compute_metrics` is given."""
    scores, labels = found.predictions, found.label_ids
    assert (scores[labels == -100] == 0).all()
    return {"perplexity": float(np.exp(-scores.sum() / (labels != -100).sum()))}


def trainer(model: Any, args: Any, records: list[dict[str, Any]], **options: Any) -> Trainer:
    """Over tokenized records."""
    return Trainer(
        model, args, train_dataset=Dataset.from_list(records), data_collator=default_data_collator, **options
    )


def curve(trainer: Any, key: str) -> list[float]:
    return [record[key] for record in trainer.state.log_history if key in record]


@as_torchrun_starts()
def on_mesh(
    sizes: dict[str, int], out: str, records: int, resumed: bool = False, **changes: Any
) -> tuple[list[float], list[float], list[float], list[float]]:
    """A packed run, evaluated and saved; and if asked for, its second half again from a checkpoint."""
    train, held_out = tokens(records), Dataset.from_list(tokens(6, seed=2))
    options: dict[str, Any] = {
        "mesh": Mesh(**sizes), "row_tokens": ROW, "compute_metrics": perplexity,
        "eval_dataset": {"all": held_out, "few": held_out.select(range(3))},
    }  # fmt: skip
    steps = {"max_steps": 30, "save_strategy": "steps", "save_steps": 15}
    evaluation = {"eval_strategy": "steps", "eval_steps": 30, "per_device_eval_batch_size": 2}
    args = arguments(out, **steps, **evaluation, **changes)
    model, tokenizer = tiny_training_model("qwen3", seed=0)
    first = trainer(model, args, train, processing_class=tokenizer, **options)
    first.train()
    first.save_model()
    again = None
    if resumed:
        other, _ = tiny_training_model("qwen3", seed=7)
        args = arguments(out, **steps, **changes)
        again = trainer(other, args, train, mesh=Mesh(**sizes), row_tokens=ROW)
        again.train(resume_from_checkpoint=str(Path(out) / "checkpoint-15"))
    evaluated = [curve(first, f"eval_{name}")[-1] for name in ("all_loss", "few_loss", "all_perplexity")]
    losses = curve(first, "loss")
    return losses, curve(first, "grad_norm"), evaluated, losses if again is None else curve(again, "loss")
