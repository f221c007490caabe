"""Runs: the same losses on any mesh and with any memory switch, and after any resume."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from seqbraid.mesh import Mesh
from seqbraid.plan.memory import MemoryOptions
from seqbraid.train.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    LoraConfig,
    MeshConfig,
    StepConfig,
    TrainConfig,
)
from seqbraid.train.log import current_records
from seqbraid.train.nonfinite import NonFiniteError
from seqbraid.train.setup import make_mesh
from seqbraid.train.trainer import Trainer
from tests.helpers.ranks import errors, run

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 30
SHORT = 5


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' data."""
    spec = importlib.util.spec_from_file_location("make_data", EXAMPLES / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("examples")
    module.main(folder)
    return folder / "shapes"


def config(shapes: Path, out: Path, **changes: Any) -> TrainConfig:
    """The Qwen3-VL example, with smaller rows."""
    base = TrainConfig(
        model="tiny:qwen3_vl",
        out=str(out),
        precision="float32",
        data=DataConfig(
            train=str(shapes / "train.jsonl"),
            media_root=str(shapes),
            row_tokens=256,
            workers=0,
            buffer_size=32,
        ),
        train=StepConfig(steps=STEPS, batch_tokens=512, lr=1e-3, schedule="constant"),
        log=LogConfig(sinks=[], every=1000),
    )
    return replace(base, **changes).check()


def train(config: TrainConfig) -> None:
    """A run on this rank."""
    Trainer(config, make_mesh(config)).run()


def logged(out: Path | str) -> list[dict[str, Any]]:
    """The steps of a run, as its log has them in the end."""
    return [record for record in current_records(Path(out) / "log.jsonl") if "loss" in record]


def losses(out: Path | str) -> list[float]:
    """Its loss curve."""
    return [record["loss"] for record in logged(out)]


def furthest(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference of two curves."""
    assert len(found) == len(wanted)
    return max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))


@pytest.fixture(scope="session")
def alone(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, evaluated on the way, with a checkpoint at each ten steps."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    data = replace(config(shapes, out).data, eval=str(shapes / "eval.jsonl"))
    step = replace(config(shapes, out).train, eval_every=10)
    run(train, 1, config(shapes, out, data=data, train=step, checkpoint=CheckpointConfig(every=10, keep=9)))
    return out


EVERYTHING = MemoryOptions(checkpointing="full", offload=True, mlp_tile=64, loss_chunk=32)
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ring=2 × ulysses=2": (STEPS, {"mesh": MeshConfig(ring=2, ulysses=2)}),
    "dp_shard=2 × ring=2, every memory switch": (
        SHORT,
        {"mesh": MeshConfig(dp_shard=2, ring=2), "memory": EVERYTHING},
    ),
    "ring=2 × tp=2, every memory switch": (SHORT, {"mesh": MeshConfig(ring=2, tp=2), "memory": EVERYTHING}),
}


@pytest.mark.parametrize("case", MESHES)
def test_the_loss_curve_is_that_of_one_process(shapes: Path, alone: Path, tmp_path: Path, case: str) -> None:
    steps, changes = MESHES[case]
    base = config(shapes, tmp_path / "run", **changes)
    run(train, 4, replace(base, train=replace(base.train, steps=steps)), limit=240.0)
    wanted = losses(alone)
    assert len(wanted) == STEPS and wanted[-1] < 0.95 * wanted[0]  # it learns, so that curves could differ
    assert furthest(losses(tmp_path / "run"), wanted[:steps]) < 1e-5


def test_evaluation_and_best(alone: Path) -> None:
    found = {record["step"]: record["eval_loss"] for record in logged(alone) if "eval_loss" in record}
    assert list(found) == [10, 20, 30]
    best = min(found, key=lambda step: found[step])
    assert (alone / "checkpoints" / "best").read_text().strip() == f"step-{best:08d}"
    assert (alone / "checkpoints" / "last").read_text().strip() == "step-00000030"


def test_a_run_resumes_bit_for_bit_and_on_another_mesh(shapes: Path, tmp_path: Path) -> None:
    every = CheckpointConfig(every=3)
    ring = {"mesh": MeshConfig(ring=2), "checkpoint": every}
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    run(
        train,
        2,
        config(shapes, whole, **ring, train=replace(config(shapes, whole).train, steps=9)),
        limit=240.0,
    )

    run(
        _train_and_stop,
        2,
        config(shapes, begun, **ring, train=replace(config(shapes, whole).train, steps=9)),
        4,
    )
    assert len(losses(begun)) == 4  # one step past the checkpoint, which the resumed run must do again
    elsewhere = tmp_path / "elsewhere"
    _copy(begun, elsewhere)
    run(
        train,
        2,
        config(shapes, begun, **ring, train=replace(config(shapes, whole).train, steps=9)),
        limit=240.0,
    )
    assert losses(begun) == losses(whole)
    assert [r["grad_norm"] for r in logged(begun)] == [r["grad_norm"] for r in logged(whole)]
    assert _weights(begun) == _weights(whole)

    changed = config(
        shapes,
        elsewhere,
        mesh=MeshConfig(dp_shard=2, ulysses=2),
        checkpoint=every,
        train=replace(config(shapes, whole).train, steps=9),
    )
    run(train, 4, changed, limit=240.0)
    assert furthest(losses(elsewhere), losses(whole)) < 1e-5


def _train_and_stop(config: TrainConfig, after: int) -> None:
    """Like a kill: no last checkpoint, nothing closed in order."""
    trainer = Trainer(config, make_mesh(config))
    step = trainer._after_step

    def stop(metrics: dict[str, float], asked: bool) -> None:
        step(metrics, asked)
        if trainer.step == after:
            trainer.checkpoints.finish()
            raise KeyboardInterrupt

    trainer._after_step = stop  # type: ignore[method-assign]
    try:
        trainer.run()
    except KeyboardInterrupt:
        return


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def _weights(out: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, by name and rank."""
    folder = out / "checkpoints" / (out / "checkpoints" / "last").read_text().strip()
    return {
        f"{path.name} {name}": tensor.view(-1).view(torch.uint8).numpy().tobytes()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_a_step_that_is_no_number_stops_before_the_update(shapes: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = errors(_train_poisoned, 2, config(shapes, out, mesh=MeshConfig(ring=2)), limit=60.0)
    for error in found:
        assert error.kind == NonFiniteError.__name__ and "step 3" in error.message, error
    assert len(losses(out)) == 2
    for rank in range(2):
        known = json.loads((out / "nonfinite/step-00000003" / f"rank{rank}.json").read_text())
        assert known["step"] == 3 and known["samples"] and ".jsonl:" in known["samples"][0][0]
        assert known["parameters_not_finite"]
        assert "batch0.input_ids" in load_file(out / "nonfinite/step-00000003" / f"rank{rank}.safetensors")
    assert not (out / "checkpoints").exists() or not list((out / "checkpoints").glob("step-*"))


def _train_poisoned(config: TrainConfig) -> None:
    trainer = Trainer(config, make_mesh(config))
    step = trainer._after_step

    def poison(metrics: dict[str, float], asked: bool) -> None:
        step(metrics, asked)
        if trainer.step == 2:
            with torch.no_grad():
                parameter = next(
                    p for n, p in trainer.model.named_parameters() if "layers.0" in n and "norm" in n
                )
                parameter.mul_(math.nan)

    trainer._after_step = poison  # type: ignore[method-assign]
    trainer.run()


def test_precisions_train(shapes: Path, alone: Path, tmp_path: Path) -> None:
    short = replace(config(shapes, tmp_path).train, steps=4)
    for precision in ("mixed", "bfloat16"):
        out = tmp_path / precision
        run(
            train,
            2,
            config(shapes, out, precision=precision, mesh=MeshConfig(ring=2), train=short),
            limit=120.0,
        )
        assert furthest(losses(out), losses(alone)[:4]) < 0.02


def test_lora_run_leaves_an_adapter(shapes: Path, tmp_path: Path) -> None:
    out, short = tmp_path / "run", replace(config(shapes, tmp_path).train, steps=4, lr=1e-2)
    lora = LoraConfig(rank=4, alpha=8)
    for precision in ("float32", "bfloat16"):
        run(
            train,
            2,
            config(
                shapes, out / precision, precision=precision, lora=lora, train=short, mesh=MeshConfig(ring=2)
            ),
            limit=120.0,
        )
        found = losses(out / precision)
        assert found[-1] < found[0]
        assert (out / precision / "adapter" / "adapter_model.safetensors").is_file()


def test_a_resume_that_would_mean_another_run_is_refused(shapes: Path, alone: Path, tmp_path: Path) -> None:
    here = Mesh(rank=0, world_size=1)
    for changes, message in (
        ({"model": "tiny:qwen3_5"}, "model"),
        ({"seed": 1}, "seed"),
        ({"precision": "mixed"}, "precision='float32', not 'mixed'"),
        ({"lora": LoraConfig(rank=4)}, "was trained with lora="),
        ({"freeze": ["vision"]}, r"freeze=\[\], not \['vision'\]"),
        ({"resume": "never"}, "resume is 'never'"),
        ({"data": replace(config(shapes, alone).data, row_tokens=512)}, "row_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(config(shapes, alone, **changes), here)
    with pytest.raises(ValueError, match="resume is 'must'"):
        Trainer(config(shapes, tmp_path / "none", resume="must"), here)
