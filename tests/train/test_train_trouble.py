"""What goes wrong on one rank ends all, with its reason."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqbraid.ops.kernels import KernelOptions
from seqbraid.train.config import (
    LogConfig,
    MeshConfig,
    TrainConfig,
)
from seqbraid.train.nonfinite import NonFiniteError
from seqbraid.train.trainer import Trainer
from tests.helpers.ranks import errors
from tests.helpers.runs import (
    RING,
    config,
    logged,
    train,
    train_with,
)


def _without_model(config: TrainConfig) -> None:
    train(replace(config, model="/no/model") if os.environ["RANK"] == "1" else config)


def _without_data(config: TrainConfig) -> None:
    missing = replace(config, data=replace(config.data, train="/no/data.jsonl"))
    train(missing if os.environ["RANK"] == "1" else config)


def _with_other_steps(config: TrainConfig) -> None:
    other = replace(config, train=replace(config.train, steps=3))
    train(other if os.environ["RANK"] == "1" else config)


def _with_a_full_disk(config: TrainConfig) -> None:
    def fill(trainer: Trainer) -> None:
        def write(record: Any) -> None:
            raise OSError("no space left")

        if trainer.step == 2:
            trainer.news.sinks._write = write  # type: ignore[method-assign]

    train_with(config, fill)


TROUBLE: dict[str, tuple[Callable[[TrainConfig], None], dict[str, Any], str]] = {
    "a model that one rank cannot find": (_without_model, {}, "/no/model"),
    "data that one rank cannot find": (_without_data, {}, "/no/data.jsonl"),
    "a setting of one rank": (_with_other_steps, {}, "train.steps=3"),
    "a sink that the first rank opens": (train, {"log": LogConfig(sinks=["nowhere"])}, "nowhere"),
    "a log that the first rank writes": (_with_a_full_disk, {}, "no space left"),
    "a folder that the first rank makes": (train, {"out": "/proc/none"}, "/proc/none"),
    "attention that is not installed": (
        train,
        {"kernels": KernelOptions(attention="flash_attention_3")},
        "flash_attention_3",
    ),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_trouble_of_one_rank_ends_all(folder: Path, tmp_path: Path, case: str) -> None:
    begin, changes, message = TROUBLE[case]
    for error in errors(begin, 2, replace(config(folder, tmp_path / "run", mesh=RING), **changes)):
        assert message in error.message


def test_held_out_data_that_is_missing_is_refused_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    blind = config(folder, tmp_path / "run")
    blind = replace(blind, data=replace(blind.data, eval="/no/eval.jsonl"))
    assert "/no/eval.jsonl" in errors(train, 1, blind)[0].message
    assert not (tmp_path / "run/log.jsonl").exists()


def test_gradients_in_float32_sums_are_looked_at_too(folder: Path, tmp_path: Path) -> None:
    narrow = config(folder, tmp_path / "run", precision="bfloat16")
    assert errors(train_with, 1, narrow, _poison)[0].kind == NonFiniteError.__name__
    known = json.loads((tmp_path / "run/nonfinite/step-00000002/rank0.json").read_text())
    assert known["gradients_not_finite"]


def test_weights_that_an_update_made_infinite_are_not_saved(folder: Path, tmp_path: Path) -> None:
    """The loss of the step was finite; only what is saved shows it."""
    step = {"steps": 1, "lr": 1e39, "schedule": "constant", "warmup": 0}
    for precision, mesh, ranks in (("float32", RING, 2), ("bfloat16", MeshConfig(), 1)):
        wild = config(folder, tmp_path / precision, train=step, precision=precision, mesh=mesh)
        for error in errors(train, ranks, wild):
            assert error.kind == NonFiniteError.__name__ and "is not finite" in error.message
        assert math.isfinite(logged(wild, "loss")[0])
        assert not list(tmp_path.glob(f"{precision}/checkpoints/step-*"))


def _poison(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(math.nan)


TOLD_TO_END = """
import os, signal, time
from tests.helpers.toy import ListSource, ToyEncoder, make_loader, records

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
settings = {"row_tokens": 32, "rows_per_step": 1, "epochs": 2, "workers": 2}
loader = make_loader(ListSource(records(37)), ToyEncoder, **settings)
next(loader)
os.killpg(0, signal.SIGTERM)
time.sleep(0.5)
assert asked and len(list(loader)) > 10
loader.close()
print("done")
"""


def test_workers_outlive_a_sigterm_that_goes_to_all_processes_of_a_job() -> None:
    """As torchrun and schedulers send it: the run needs a step more before it saves and stops."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run(
        [sys.executable, "-c", TOLD_TO_END],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert found.stdout.strip() == "done", found.stderr
