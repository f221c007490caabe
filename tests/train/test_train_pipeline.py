"""Runs of a model that is cut into pipeline stages."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import seqbraid as sb
from seqbraid.comm.whereabouts import Whereabouts
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.train.config import CheckpointConfig, LogConfig, MeshConfig, StepConfig, TrainConfig
from seqbraid.train.lora import LoraOptions, add_lora, save_adapter
from seqbraid.train.setup import make_mesh
from seqbraid.train.trainer import Trainer
from tests.helpers.ranks import errors, run
from tests.train.test_train import (  # noqa: F401  the fixture is found by its name
    _train_and_stop,
    _weights,
    config,
    furthest,
    logged,
    losses,
    shapes,
    train,
)

STAGES, RING = MeshConfig(pp=2), MeshConfig(ring=2)


def test_the_curve_is_that_of_one_process_and_a_run_goes_on_with_a_ring_and_back(
    shapes: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """With pictures, whose encoder the first stage alone has."""
    common: dict[str, Any] = {
        "model": "tiny:qwen3_vl",
        "train": StepConfig(steps=6, batch_tokens=768, lr=1e-3, clip_norm=0.5),
        "checkpoint": CheckpointConfig(every=2),
        "log": LogConfig(sinks=[], every=1000),
    }
    alone, whole, begun, elsewhere = (tmp_path / name for name in ("alone", "whole", "begun", "elsewhere"))
    run(train, 1, config(shapes, alone, **common))
    run(train, 2, config(shapes, whole, **common, mesh=STAGES))
    assert furthest(losses(whole), losses(alone)) < 1e-5
    norms = [[record["grad_norm"] for record in logged(folder)] for folder in (whole, alone)]
    assert furthest(*norms) < 1e-4
    for record in logged(whole):
        assert 0 <= record["pipeline_bubble"] < 1
        stages = [record[f"pipeline_stage_{number}_s"] for number in (0, 1)]
        assert min(stages) > 0
        # Both ranks' steps are about as long: what is left of them was waiting.
        assert max(stages) < record["step_s"] and sum(stages) < 2 * record["step_s"]

    run(_train_and_stop, 2, config(shapes, begun, **common, mesh=STAGES), 2)
    shutil.copytree(begun, elsewhere)
    run(train, 2, config(shapes, begun, **common, mesh=STAGES))
    assert losses(begun) == losses(whole) and _weights(begun) == _weights(whole)
    run(_train_and_stop, 2, config(shapes, elsewhere, **common, mesh=RING), 4)
    run(train, 2, config(shapes, elsewhere, **common, mesh=STAGES))
    assert furthest(losses(elsewhere), losses(whole)) < 1e-5


def failing(settings: TrainConfig, rank: int) -> None:
    """A layer of one rank raises in the second step."""
    trainer = Trainer(settings, make_mesh(settings))
    layer: Any = trainer.model.parts.layers[0].module

    def fail(*_: Any) -> None:
        if trainer.step == 1 and trainer.mesh.rank == rank:
            raise RuntimeError("the layer is odd")

    layer.register_forward_pre_hook(fail)
    trainer.run()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_inside_a_stage_ends_all_with_its_reason(
    shapes: Path,  # noqa: F811
    tmp_path: Path,
    rank: int,
) -> None:
    """The first stage waits for gradients, the last one for hidden states."""
    settings = config(shapes, tmp_path / "run", model="tiny:qwen3_vl", mesh=STAGES)
    found = errors(failing, 2, settings, rank)
    assert found[rank].message == "the layer is odd"
    assert found[1 - rank].message == f"rank {rank} stopped: RuntimeError: the layer is odd"
    ended = json.loads((tmp_path / "run/ended.json").read_text())
    assert (ended["reason"], ended["step"]) == ("failed", 1)
    assert "RuntimeError: the layer is odd" in ended["error"]


def count_moves(config: TrainConfig) -> int:
    """How often a run says that something went forward in a stage; its loader says so as well."""
    said: list[str] = []
    with mock.patch.object(Whereabouts, "moves", lambda _: said.append(sys._getframe(1).f_code.co_filename)):
        train(config)
    return sum(Path(name).name == "pipeline.py" for name in said)


def test_the_watchdog_hears_of_each_micro_batch_on_each_stage(shapes: Path, tmp_path: Path) -> None:  # noqa: F811
    """Else a step of many would have to be done within the limit for one."""
    step = StepConfig(steps=2, batch_tokens=4 * 256, lr=1e-3)
    log = LogConfig(sinks=[], every=1000)
    settings = config(shapes, tmp_path / "run", model="tiny:qwen3_vl", train=step, log=log, mesh=STAGES)
    rows = step.batch_tokens // settings.data.row_tokens
    assert rows > 2
    assert run(count_moves, 2, settings) == [2 * 2 * rows] * 2  # forward and backward, in two steps


def kept(folder: Path) -> None:
    """A tied model on three stages of layers, its adapters too, written as stock code loads them."""
    model = sb.parallelize(tiny_model("qwen3", num_hidden_layers=4), sb.Mesh(pp=2))
    model.save_pretrained(folder / "model")
    adapted = tiny_model("qwen3", num_hidden_layers=4)
    add_lora(adapted, LoraOptions(2), seed=1)
    save_adapter(sb.parallelize(adapted, sb.Mesh(pp=2)), folder / "adapter", base_name="base")


def test_what_is_written_has_each_tensor_once(tmp_path: Path) -> None:
    run(kept, 2, tmp_path)
    stock = tiny_model("qwen3", num_hidden_layers=4)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == dict(stock.named_parameters()).keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in stock.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    adapted = tiny_model("qwen3", num_hidden_layers=4)
    add_lora(adapted, LoraOptions(2), seed=1)
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == sum("lora_" in name for name, _ in adapted.named_parameters()) > 0
