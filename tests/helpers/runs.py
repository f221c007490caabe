"""Configurations of short runs on the CPU, and what such runs leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from seqbraid.train.config import (
    DataConfig,
    LogConfig,
    MeshConfig,
    StepConfig,
    TrainConfig,
)
from seqbraid.train.log import current_records
from seqbraid.train.setup import make_mesh
from seqbraid.train.trainer import Trainer

DATA_RANKS, RING = MeshConfig(dp_shard=2), MeshConfig(ring=2)


ROW = 192


def said(number: int) -> dict[str, Any]:
    """A conversation of some ten to eighty tokens."""
    question = f"How many are {number} and {number * 7 % 13}? " + "Read the digits. " * (number % 5)
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"The answer is {number}."},
        ]
    }


def shown(number: int, image: str) -> dict[str, Any]:
    """One about a picture."""
    messages = [
        {"role": "user", "content": "<image>What is in the picture?"},
        {"role": "assistant", "content": f"The number is {number}."},
    ]
    return {"messages": messages, "images": [image]}


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def config(
    folder: Path,
    out: Path,
    data: str = "text",
    train: dict[str, Any] | None = None,
    evaluated: bool = False,
    **changes: Any,
) -> TrainConfig:
    """Three rows to a step, which two data ranks cannot share evenly."""
    base = TrainConfig(
        model="tiny:qwen3",  # its embeddings are its head
        out=str(out),
        precision="float32",
        data=DataConfig(
            train=str(folder / f"{data}.jsonl"),
            eval=str(folder / "eval.jsonl") if evaluated else [],
            media_root=str(folder),
            row_tokens=ROW,
            workers=0,
            buffer_size=8,
        ),
        train=StepConfig(**{"steps": 4, "batch_tokens": 3 * ROW, "lr": 3e-3, **(train or {})}),
        log=LogConfig(sinks=[], every=1000),
    )
    return replace(base, **changes).check()


def train(config: TrainConfig) -> None:
    """A run on this rank."""
    Trainer(config, make_mesh(config)).run()


def train_with(config: TrainConfig, after: Callable[[Trainer], None]) -> None:
    """A run in which something happens before each step is logged."""
    trainer = Trainer(config, make_mesh(config))
    step = trainer._after_step

    def both(metrics: dict[str, float], asked: bool) -> None:
        after(trainer)
        step(metrics, asked)

    trainer._after_step = both  # type: ignore[method-assign]
    trainer.run()


def logged(config: TrainConfig, key: str) -> list[float]:
    return [record[key] for record in current_records(Path(config.out) / "log.jsonl") if key in record]


def saved(config: TrainConfig) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, by name and rank."""
    checkpoints = Path(config.out) / "checkpoints"
    paths = sorted((checkpoints / (checkpoints / "last").read_text().strip()).glob("*.safetensors"))
    tensors = {f"{path.name} {name}": x for path in paths for name, x in load_file(path).items()}
    return {name: x.reshape(-1).view(torch.uint8).numpy().tobytes() for name, x in tensors.items()}


def everything(config: TrainConfig) -> tuple[Any, ...]:
    """What two runs that are the same bit for bit have in common."""
    return (*(logged(config, key) for key in ("loss", "grad_norm", "lr", "eval_loss")), saved(config))


def assert_same_curves(found: TrainConfig, wanted: TrainConfig) -> None:
    for key in ("loss", "grad_norm", "lr", "tokens", "label_tokens", "epoch", "eval_loss"):
        assert logged(found, key) == pytest.approx(logged(wanted, key), rel=1e-5), key
