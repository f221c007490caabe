"""Runs of a model whose experts lie over ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from seqbraid.train.config import CheckpointConfig, LogConfig, MeshConfig, StepConfig
from seqbraid.train.log import read_log
from tests.helpers.ranks import run
from tests.train.test_train import (  # noqa: F401  the fixture is found by its name
    _weights,
    config,
    furthest,
    logged,
    losses,
    shapes,
    train,
)

EXPERTS = MeshConfig(ring=2, ulysses=2, ep=2)


def test_the_curve_is_that_of_one_process_and_a_run_resumes_on_another_mesh(
    shapes: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    common: dict[str, Any] = {
        "model": "tiny:qwen3_vl_moe",
        "train": StepConfig(steps=4, batch_tokens=512, lr=1e-3),
        "checkpoint": CheckpointConfig(every=2, keep=2),
        "log": LogConfig(sinks=[], every=1000),
    }
    alone, whole, again, elsewhere = (tmp_path / name for name in ("alone", "whole", "again", "elsewhere"))
    run(train, 1, config(shapes, alone, **common))
    run(train, 4, config(shapes, whole, **common, mesh=EXPERTS), limit=240.0)
    assert furthest(losses(whole), losses(alone)) < 1e-5
    for step, one in zip(logged(whole), logged(alone), strict=True):
        assert step["expert_load_max"] == one["expert_load_max"] > 1
        assert one["expert_tokens_sent"] == 0 < step["expert_tokens_sent"] < 1

    common["resume"] = "step:2"
    for out in (again, elsewhere):
        shutil.copytree(whole, out)
    run(train, 4, config(shapes, again, **common, mesh=EXPERTS), limit=240.0)
    assert losses(again) == losses(whole) and _weights(again) == _weights(whole)
    assert [r["grad_norm"] for r in logged(again)] == [r["grad_norm"] for r in logged(whole)]
    run(train, 4, config(shapes, elsewhere, **common, mesh=MeshConfig(dp_shard=2, ulysses=2)), limit=240.0)
    assert furthest(losses(elsewhere), losses(whole)) < 1e-5
    for out in (again, elsewhere):
        assert [r["step"] for r in read_log(out / "log.jsonl") if r.get("event") == "resumed"] == [2]
