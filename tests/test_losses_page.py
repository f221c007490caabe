"""The examples of docs/losses.md run as they stand, over ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import seqbraid as sb
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from tests.helpers.ranks import run

PAGE = (Path(__file__).parents[1] / "docs" / "losses.md").read_text(encoding="utf-8")


def on_a_rank() -> dict[str, float]:
    mesh = sb.Mesh(ring=2)
    model, reference, teacher = (
        sb.parallelize(tiny_model(name, seed=n), mesh) for n, name in enumerate(("llama", "llama", "qwen3"))
    )
    loss, sample, weighted, backward, references = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    ids = torch.arange(1, 41)
    scope: dict[str, Any] = {
        "sb": sb,
        "torch": torch,
        "mesh": mesh,
        "model": model,
        "config": model.model.config,
        "reference": reference,
        "teacher": teacher,
        "ids": ids,
        "labels": ids,
        "num_tokens": 39,
        "old": torch.full((40,), -4.0),
        "gains": torch.linspace(-1, 1, 40),
        "weights": torch.linspace(0, 1.5, 40),
    }
    exec(sample, scope)
    scope["micro_batches"] = [[scope["sample"]], [scope["sample"]] * 2]
    exec(loss, scope)
    own = scope["out"]
    scope["batch"] = scope["batches"][0]
    exec(backward, scope)
    batch = sb.pack(random_samples([30, 7], 97), model.model.config, mesh)
    scope["batches"] = [batch]
    exec(references, scope)
    kl = scope["out"]
    exec(weighted, scope)
    return {
        "ratio": float(own.metrics["ratio"] / own.label_tokens),
        "loss": float(own.mean_loss),
        "entropy": float(scope["found"].entropy.mean()),
        "kl": float(kl.mean_loss),
        "weighted": float(scope["out"].divisor),
    }


def test_the_examples_run_as_they_stand() -> None:
    first, second = run(on_a_rank, 2)
    assert {**first, "entropy": 0} == {**second, "entropy": 0}
    assert all(value == value and value != 0 for value in first.values())
    assert first["kl"] > 0 and first["weighted"] != 39
