"""Switches of a run: any optimizer on any mesh and after a resume, spikes, early stopping, a profile."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqbraid.cli import main
from seqbraid.plan.auto import RESERVE
from seqbraid.train import recompute
from seqbraid.train.config import CheckpointConfig, MeshConfig, TrainConfig
from seqbraid.train.config_file import parse_config
from seqbraid.train.log import current_records
from tests.helpers.ranks import run
from tests.helpers.runs import DATA_RANKS, RING, ROW, assert_same_curves, config, everything, logged, train

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")

MOMENTUM = {"optimizer": "torch.optim.SGD", "optimizer_options": {"momentum": 0.9}, "lr": 0.3}
MUON = {"optimizer": "torch.optim.Muon", "lr": 0.01}
GROUPS = [{"match": "embed", "lr": 3e-4}, {"match": "norm", "weight_decay": 0.1}]


def events(found: TrainConfig, kind: str) -> list[dict[str, Any]]:
    return [r for r in current_records(Path(found.out) / "log.jsonl") if r.get("event") == kind]


def train_all(settings: list[TrainConfig]) -> None:
    for one in settings:
        train(one)


@pytest.mark.parametrize("name", ["momentum", "muon"])
def test_an_optimizer_is_the_same_on_any_mesh_and_after_a_resume(
    folder: Path, tmp_path: Path, name: str
) -> None:
    settings = {**(MOMENTUM if name == "momentum" else MUON), "groups": GROUPS, "weight_decay": 0.01}
    moe = {"model": "tiny:qwen3_moe"} if name == "muon" else {}
    kept = CheckpointConfig(every=2, keep=9)

    def job(out: str, mesh: MeshConfig, **changes: Any) -> TrainConfig:
        return config(folder, tmp_path / out, train=settings, mesh=mesh, checkpoint=kept, **moe, **changes)

    alone, begun = job("alone", MeshConfig()), job("begun", RING)
    train(alone)
    experts = MeshConfig(dp_shard=2, ep=2) if moe else DATA_RANKS
    run(train_all, 2, [begun, job("experts", experts)])
    whole = everything(begun)
    for other in (begun, job("experts", experts)):
        if name == "momentum":
            assert_same_curves(other, alone)
        else:  # Muon makes steps of one size out of 16 bits of the gradient, however small it is
            assert logged(other, "loss") == pytest.approx(logged(alone, "loss"), rel=2e-3)
        assert logged(other, "lr") == logged(alone, "lr")
    assert logged(alone, "loss")[-1] < logged(alone, "loss")[0]
    assert logged(alone, "lr_group0") == pytest.approx(
        [x * 3e-4 / settings["lr"] for x in logged(alone, "lr")]
    )

    run(train_all, 2, [replace(begun, resume="step:2"), replace(job("experts", experts), resume="step:2")])
    assert everything(begun) == whole
    elsewhere = replace(job("begun", MeshConfig()), resume="step:2")
    train(elsewhere)  # from two ranks to one
    assert logged(elsewhere, "loss") == pytest.approx(logged(alone, "loss"), rel=2e-3 if moe else 1e-5)
    with pytest.raises(ValueError, match=r"was trained with train\.optimizer='torch\.optim"):
        train(replace(elsewhere, train=replace(elsewhere.train, optimizer="torch.optim.Adam")))


def test_another_state_of_the_same_optimizer_is_refused(folder: Path, tmp_path: Path) -> None:
    first = config(folder, tmp_path / "run", train={"steps": 1})
    train(first)
    step = replace(first.train, steps=2, optimizer_options={"amsgrad": True})
    with pytest.raises(
        ValueError, match="keeps exp_avg, exp_avg_sq, step for a parameter, this one exp_avg, exp"
    ):
        train(replace(first, train=step))


def test_spikes_are_skipped_alike_on_every_mesh_and_after_a_resume(folder: Path, tmp_path: Path) -> None:
    """So close to the median that some steps of an ordinary run are above it."""
    step = {"steps": 22, "batch_tokens": ROW, "skip_spikes": 1.001, "clip_norm": None, "lr": 1e-5}

    def job(out: str, **changes: Any) -> TrainConfig:
        kept = CheckpointConfig(every=18, keep=9)
        return config(folder, tmp_path / out, train=step, checkpoint=kept, **changes)

    alone, split = job("alone"), job("split", mesh=RING)
    train(alone)
    run(train, 2, split)
    skipped = [record["step"] for record in events(alone, "skipped")]
    assert 0 < len(skipped) < 6 and min(skipped) > 16
    norms, counts = logged(alone, "grad_norm"), logged(alone, "spikes")
    for number in range(16, 22):
        middle = sorted(norms[:number])[(number - 1) // 2], sorted(norms[:number])[number // 2]
        assert (number + 1 in skipped) == (norms[number] > 1.001 * sum(middle) / 2)
        assert counts[number] == sum(step <= number + 1 for step in skipped)
    assert [record["step"] for record in events(split, "skipped")] == skipped
    assert_same_curves(split, alone)
    before = everything(alone)
    train(replace(alone, resume="step:18"))
    assert everything(alone) == before


def test_a_run_stops_early_keeps_the_best_and_stays_stopped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"steps": 9, "lr": 0.0, "eval_every": 1, "patience": 2, "best_metric": "eval_accuracy"}
    found = config(folder, tmp_path / "run", train=step, evaluated=True)
    train(found)
    assert logged(found, "step")[-1] == 3  # the first is the best, and two are no better
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "best").read_text().strip() == "step-00000001"
    assert (checkpoints / "last").read_text().strip() == "step-00000003"
    (said,) = events(found, "stopped early")
    assert said["step"] == 3 and "2 evaluations without a better eval_accuracy" in said["reason"]
    assert json.loads((tmp_path / "run" / "ended.json").read_text())["reason"] == "finished"
    train(found)  # resumed
    assert logged(found, "step")[-1] == 3
    train(replace(found, train=replace(found.train, patience=3)))
    assert logged(found, "step")[-1] == 4
    with pytest.raises(ValueError, match=r"train\.patience=2 but data\.eval names no file"):
        config(folder, tmp_path / "run", train={"patience": 2})


def test_a_profile_has_the_operators_of_the_chosen_steps(folder: Path, tmp_path: Path) -> None:
    run(train, 2, config(folder, tmp_path / "run", train={"profile": "2-3", "steps": 3}, mesh=RING))
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / "profile" / f"steps-2-3-rank-{rank}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert any("aten::mm" in name or "aten::linear" in name for name in names)
        assert sum("Optimizer.step" in name for name in names) >= 2
    for wrong in ("0", "3-2", "a", "1-2-3"):
        with pytest.raises(ValueError, match=r"train\.profile=.* is no step, such as 12"):
            config(folder, tmp_path / "run", train={"profile": wrong})


def test_a_step_that_may_not_fit_is_said_with_the_smallest_change_that_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = config(folder, tmp_path / "run", train={"steps": 1})
    model = recompute.make_model(found, weights=False)
    mesh, device = recompute.Mesh(), recompute.torch.device("cpu")
    needed = recompute.fit_here(found, model, mesh, device, 1 << 40).estimate
    less = replace(found, memory=replace(found.memory, checkpointing="selective"))
    enough = recompute.fit_here(less, model, mesh, device, 1 << 40).estimate
    assert enough < needed
    monkeypatch.setattr(recompute, "device_bytes", lambda _: int(enough / (1 - RESERVE)) + 1)
    train(found)
    (said,) = events(found, "memory")
    assert "which may be too much: set memory.checkpointing=selective" in said["what"]

    options = ["--dry-run", f"--model={found.model}", f"--out={tmp_path / 'dry'}", "--train.steps=1"]
    options += [f"--data.train={found.data.train}", "--train.batch_tokens=192", "--data.row_tokens=192"]
    options += ["--precision=float32", "--train.optimizer=torch.optim.Muon", "--train.skip_spikes=10"]
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["train", *options]) == 0
    shown = capsys.readouterr().out
    assert "Optimizer: torch.optim.Muon(adjust_lr_fn=match_rms_adamw)" in shown and "by AdamW" in shown
    assert "skips steps whose gradient norm is above 10 × the median" in shown
    assert "Compared with the memory of this host, without a GPU: a step takes an estimated" in shown
    for refused in (options, options[1:]):  # a run does so before it reads the model's weights
        assert main(["train", *refused, "--train.optimizer=torch.optim.Adafactor"]) == 2
        said = capsys.readouterr().err
        assert "keeps 'row_var' of shape" in said and "loading the model" not in said


def test_the_configuration_in_the_docs_is_one_that_runs(folder: Path, tmp_path: Path) -> None:
    section = PAGE.split("\n## Optimizer\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (tmp_path / "config.yaml").write_text(block)
    plain = config(folder, tmp_path / "run", evaluated=True)
    options = [f"--model={plain.model}", f"--out={plain.out}", f"--data.train={plain.data.train}"]
    options += [f"--data.eval={plain.data.eval}", "--data.row_tokens=192", "--train.batch_tokens=192"]
    found = parse_config([str(tmp_path / "config.yaml"), *options, "--train.steps=2", "--data.workers=0"])[0]
    assert found.train.optimizer == "torch.optim.Muon" and found.train.patience == 5
    assert [group["match"] for group in found.train.groups] == ["embed_tokens", r"layers\.0\."]
    train(replace(found, log=plain.log))
    assert logged(found, "lr_group0")[0] == pytest.approx(logged(found, "lr")[0] / 10)
