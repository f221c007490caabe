"""Runs with `memory.checkpointing=auto`: by the smallest device, said, and kept by a resume."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from seqbraid.plan.auto import RESERVE
from seqbraid.plan.estimate import memory_estimate
from seqbraid.plan.memory import MemoryOptions
from seqbraid.train import recompute
from seqbraid.train.config import MeshConfig, TrainConfig
from seqbraid.train.dry_run import dry_run
from seqbraid.train.log import read_log
from seqbraid.train.setup import make_mesh, make_model
from seqbraid.train.trainer import Trainer
from tests.helpers.ranks import run
from tests.helpers.runs import config, said, write

AUTO = MemoryOptions("auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts."""
    found = tmp_path_factory.mktemp("data")
    write(found / "text.jsonl", [said(number) for number in range(40)])
    return found


def device_for(config: TrainConfig, checkpointing: str) -> int:
    """The bytes of a device on which just this fits."""
    memory = replace(AUTO, checkpointing=checkpointing)  # type: ignore[arg-type]
    model = make_model(config, weights=False)
    rows = config.data.row_tokens
    return 1 + int(
        memory_estimate(model, make_mesh(config), memory, "float32", row_tokens=rows).total / (1 - RESERVE)
    )


def train(config: TrainConfig, bytes_of_rank: list[int]) -> tuple[str, list[str]]:
    """Train on devices of these sizes: what was chosen, and what the log says of it."""
    mesh = make_mesh(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "device_bytes", lambda device: bytes_of_rank[mesh.rank])
        trainer = Trainer(config, mesh)
        trainer.run()
    records = read_log(Path(config.out) / "log.jsonl")
    return trainer.checkpointing, [str(x["what"]) for x in records if x.get("event") == "chosen"]


def checkpointed(model: torch.nn.Module) -> bool:
    """Whether some layer is computed again in the backward."""
    return any("CheckpointedDecoderLayer" in repr(vars(m).get("forward")) for m in model.modules())


def test_the_smallest_device_decides_for_all_ranks(folder: Path, tmp_path: Path) -> None:
    job = config(folder, tmp_path / "run", train={"steps": 1}, memory=AUTO, mesh=MeshConfig(ring=2))
    found = run(small_beside_large, 2, job)
    assert {chosen for chosen, _ in found} == {"full"}
    assert found[0][1][0].startswith("memory.checkpointing=auto is 'full'"), found[0][1]


def small_beside_large(job: TrainConfig) -> tuple[str, list[str]]:
    return train(job, [1 << 40, device_for(job, "full")])


def test_a_resume_keeps_what_was_chosen_for_the_same_mesh(folder: Path, tmp_path: Path) -> None:
    def job(steps: int, ring: int = 1) -> TrainConfig:
        settings = {"steps": steps, "schedule": "constant"}
        return config(folder, tmp_path / "run", train=settings, memory=AUTO, mesh=MeshConfig(ring=ring))

    chosen, said_first = train(job(1), [device_for(job(1), "selective")])
    assert chosen == "selective" and "'none' would take" in said_first[0]
    chosen, said_then = train(job(2), [1 << 40])
    assert chosen == "selective" and said_then[-1] == (
        "memory.checkpointing=auto is 'selective', as in the run so far"
    )
    chosen, said_last = run(train, 2, job(3, ring=2), [1 << 40] * 2)[0]
    assert chosen == "none" and said_last[-1].startswith("memory.checkpointing=auto is 'none'")


def test_the_chosen_layers_are_computed_again(folder: Path, tmp_path: Path) -> None:
    for checkpointing, expected in (("none", False), ("full", True)):
        job = config(folder, tmp_path / checkpointing, train={"steps": 1}, memory=AUTO)
        with pytest.MonkeyPatch.context() as patch:
            size = device_for(job, checkpointing)
            patch.setattr(recompute, "device_bytes", lambda device, size=size: size)
            trainer = Trainer(job, make_mesh(job))
        assert checkpointed(trainer.model) == expected
        trainer.run()


def test_a_dry_run_shows_the_choice(folder: Path, tmp_path: Path) -> None:
    job = config(folder, tmp_path / "run", memory=AUTO)
    console = Console(file=io.StringIO(), width=300)
    dry_run(job, console)
    shown: Any = console.file
    assert "memory.checkpointing=auto is 'none'" in shown.getvalue()
