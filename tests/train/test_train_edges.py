"""Runs at their edges: uneven steps, epochs, frozen parts, every way to stop, trouble on one rank."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqbraid.train.checkpoint import files as checkpoint_files
from seqbraid.train.config import (
    CheckpointConfig,
    LoraConfig,
    MeshConfig,
    TrainConfig,
)
from seqbraid.train.log import read_log
from seqbraid.train.trainer import Trainer
from tests.helpers.ranks import errors, run
from tests.helpers.runs import (
    DATA_RANKS,
    RING,
    ROW,
    assert_same_curves,
    config,
    everything,
    logged,
    said,
    shown,
    train,
    train_with,
    write,
)

# --- the same run


UNEVEN = {"steps": None, "epochs": 2, "clip_norm": 0.05, "weight_decay": 0.1}


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_epochs_in_uneven_steps_are_those_of_one_process(folder: Path, tmp_path: Path, model: str) -> None:
    """Data ranks without a row, a last step of fewer rows, clipping, copies of shards; evaluated last."""
    write(folder / "uneven.jsonl", [said(number) for number in range(44)])  # the last step has one row
    alone = config(folder, tmp_path / "alone", "uneven", UNEVEN, evaluated=True, model=f"tiny:{model}")
    run(train, 1, alone)
    assert len(logged(alone, "eval_loss")) == 1
    steps, labels = len(logged(alone, "loss")), logged(alone, "label_tokens")
    assert labels[-1] < 0.5 * labels[0] and min(logged(alone, "grad_norm")) > 0.05
    for number, mesh in enumerate([DATA_RANKS, MeshConfig(dp_replicate=2, dp_shard=2)]):
        many = replace(alone, out=str(tmp_path / f"many{number}"), mesh=mesh)
        run(train, 2 + 2 * number, many)
        assert_same_curves(many, alone)
        assert (Path(many.out) / "checkpoints" / "best").read_text().strip() == f"step-{steps:08d}"


@pytest.mark.parametrize("frozen", [[], ["vision"], ["language_model"]], ids=str)
def test_steps_with_and_without_media_are_those_of_one_process(
    folder: Path, tmp_path: Path, frozen: list[str]
) -> None:
    """Whole steps have no picture, so that a tower without a gradient on some mesh would be left unmoved."""
    mixed = config(folder, tmp_path / "alone", "mixed", {"steps": 6}, model="tiny:qwen3_vl", freeze=frozen)
    mixed = replace(mixed, data=replace(mixed.data, shuffle=False, buffer_size=1))
    run(train, 1, mixed)
    for name, mesh in (("data", DATA_RANKS), ("ring", RING)):
        other = replace(mixed, out=str(tmp_path / name), mesh=mesh)
        run(train, 2, other)
        assert_same_curves(other, mixed)


def test_evaluation_changes_no_bit_of_the_training(folder: Path, tmp_path: Path) -> None:
    plain = config(folder, tmp_path / "plain", mesh=DATA_RANKS)
    seen = config(folder, tmp_path / "seen", evaluated=True, train={"eval_every": 1}, mesh=DATA_RANKS)
    run(train, 2, plain)
    run(train, 2, seen)
    assert len(logged(seen, "eval_loss")) == 4
    assert everything(seen)[:3] + everything(seen)[4:] == everything(plain)[:3] + everything(plain)[4:]


# --- stopped and resumed


def _kill(trainer: Trainer) -> None:
    if trainer.step == 4:
        trainer.checkpoints.finish()
        raise RuntimeError("killed")


def _ask_one_rank_to_stop(trainer: Trainer) -> None:
    if trainer.step == 2 and trainer.mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


ADAPTED = LoraConfig(rank=4, dropout=0.1)
RUNS: dict[str, dict[str, Any]] = {
    "epochs": {"train": {"steps": None, "epochs": 2}},
    "bfloat16": {"precision": "bfloat16", "train": {"steps": 6, "weight_decay": 0.1}},
    "mixed": {"precision": "mixed", "mesh": RING, "train": {"steps": 6}},
    "LoRA": {"precision": "bfloat16", "mesh": RING, "lora": ADAPTED, "train": {"steps": 6}},
}


@pytest.mark.parametrize("case", RUNS)
def test_a_killed_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path, case: str) -> None:
    every = CheckpointConfig(every=2)
    whole = config(folder, tmp_path / "whole", **{"mesh": DATA_RANKS, "checkpoint": every, **RUNS[case]})
    killed = replace(whole, out=str(tmp_path / "killed"))
    run(train, 2, whole)
    assert {error.message for error in errors(train_with, 2, killed, _kill)} == {"killed"}
    run(train, 2, killed)
    assert everything(killed) == everything(whole)


def test_sigterm_to_one_rank_saves_on_all_and_the_run_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path
) -> None:
    """Nothing is evaluated for a signal: who sent it does not wait, and the other run has not either."""
    whole = config(folder, tmp_path / "whole", evaluated=True, train={"steps": 6}, mesh=RING)
    asked = replace(whole, out=str(tmp_path / "asked"))
    run(train, 2, whole)
    run(train_with, 2, asked, _ask_one_rank_to_stop)
    assert len(logged(asked, "loss")) == 3 and not logged(asked, "eval_loss")
    assert (tmp_path / "asked/checkpoints/last").read_text().strip() == "step-00000003"
    run(train, 2, asked)
    assert everything(asked) == everything(whole)


def test_a_longer_run_has_its_own_rates_and_a_refused_one_leaves_the_folder(
    folder: Path, tmp_path: Path
) -> None:
    linear = {"schedule": "linear", "warmup": 0, "lr": 0.1}
    begun = config(folder, tmp_path / "run", train={**linear, "steps": 2})
    run(train, 1, begun)
    run(train, 1, replace(begun, train=replace(begun.train, steps=4)))
    assert logged(begun, "lr") == pytest.approx([0.1, 0.05, 0.05, 0.025])
    assert logged(begun, "what") == [
        (
            "train.steps is 4, was 2: the learning rate schedule is stretched, so the learning rate may jump "
            "at step 3"
        )
    ]
    before = (tmp_path / "run/config.yaml").read_bytes()
    assert "seed=1" in errors(train, 1, replace(begun, seed=1))[0].message
    assert (tmp_path / "run/config.yaml").read_bytes() == before


def test_bad_samples_are_listed_once_whatever_happens(folder: Path, tmp_path: Path) -> None:
    """Two steps are of one sample that cannot be decoded, as its rank sees; one is past the checkpoint."""
    records = [shown(n, "cut.png" if n in (1, 3) else f"{n % 4}.png") for n in range(8)]
    write(folder / "bad.jsonl", records)
    whole = config(folder, tmp_path / "alone", "bad", {"batch_tokens": ROW}, model="tiny:qwen3_vl")
    data = replace(whole.data, on_bad_sample="skip", eval=whole.data.train, shuffle=False, buffer_size=1)
    whole = replace(whole, data=data, train=replace(whole.train, steps=6, eval_every=3))
    run(train, 1, whole)
    every = CheckpointConfig(every=3)
    killed = replace(whole, out=str(tmp_path / "killed"), mesh=DATA_RANKS, checkpoint=every)
    errors(train_with, 2, killed, _kill)
    assert len((tmp_path / "killed/bad_samples.jsonl").read_text().splitlines()) == 2
    run(train, 2, killed)
    assert_same_curves(killed, whole)
    for out in (whole.out, killed.out):
        for name in ("bad_samples.jsonl", "bad_eval_samples.jsonl"):
            lines = (Path(out) / name).read_text().splitlines()
            assert [json.loads(line)["where"] for line in lines] == ["bad.jsonl:2", "bad.jsonl:4"]


def test_a_run_goes_back_to_a_step_and_past_a_damaged_checkpoint(folder: Path, tmp_path: Path) -> None:
    whole = config(folder, tmp_path / "run", mesh=RING, checkpoint=CheckpointConfig(every=1, keep=9))
    run(train, 2, whole)
    wanted, log = everything(whole), (tmp_path / "run/log.jsonl").read_bytes()
    newest = tmp_path / "run/checkpoints/step-00000004/rank-00001.safetensors"
    saved_bytes = newest.read_bytes()
    newest.write_bytes(saved_bytes[:-1] + bytes([saved_bytes[-1] ^ 1]))
    for error in errors(train, 2, whole):
        assert "the checksum of" in error.message and "resume=latest-intact" in error.message
    for path in (tmp_path / "run/checkpoints").glob("step-*"):
        (path / "rank-00001.safetensors").rename(path / "lost")
    for error in errors(train, 2, whole):  # not one is whole: nothing begins anew
        assert "rank-00001.safetensors is missing" in error.message, error
    assert (tmp_path / "run/log.jsonl").read_bytes() == log
    for path in (tmp_path / "run/checkpoints").glob("step-*"):
        (path / "lost").rename(path / "rank-00001.safetensors")
    run(train, 2, replace(whole, resume="latest-intact"))
    assert everything(whole) == wanted
    run(train, 2, replace(whole, resume="step:2"))
    assert everything(whole) == wanted
    assert (tmp_path / "run/log.jsonl").read_bytes().startswith(log)
    back = [r["step"] for r in read_log(tmp_path / "run/log.jsonl") if r.get("event") == "resumed"]
    assert back == [3, 2]


def _late(number: int) -> dict[str, Any]:
    """A conversation whose first answer stands behind the end of a row."""
    turns = said(number)["messages"]
    return {"messages": [turns[0] | {"content": "What is the number? " * (50 + number)}, turns[1]]}


def test_a_step_without_a_label_is_skipped_and_said_on_any_mesh_and_after_a_resume(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It counts as a step, so that the rates of the others are those of their numbers."""
    write(folder / "late.jsonl", [_late(n) if n in (1, 3) else said(n) for n in range(6)])
    linear = {"batch_tokens": ROW, "steps": 6, "schedule": "linear", "warmup": 0, "lr": 0.1}
    whole = config(folder, tmp_path / "alone", "late", linear)
    data = replace(whole.data, over_long="truncate", shuffle=False, buffer_size=1)
    whole = replace(whole, data=data, checkpoint=CheckpointConfig(every=2))
    train(whole)
    assert "step 2 is skipped: none of its 0 tokens has a label" in capfd.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "alone/log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 3, 5, 6]
    assert [record["step"] for record in records if record.get("event") == "skipped"] == [2, 4]
    assert logged(whole, "lr") == pytest.approx([0.1 * (1 - n / 6) for n in (0, 2, 4, 5)])
    killed = replace(whole, out=str(tmp_path / "killed"), mesh=DATA_RANKS)
    errors(train_with, 2, killed, _kill)
    run(train, 2, killed)
    assert_same_curves(killed, whole)


def test_a_run_without_a_label_stops(folder: Path, tmp_path: Path) -> None:
    write(folder / "no_label.jsonl", [_late(n) for n in range(6)])
    found = config(folder, tmp_path / "run", "no_label", {"batch_tokens": ROW})
    found = replace(found, data=replace(found.data, over_long="truncate"))
    assert "nothing was trained: 4 samples have no label among" in errors(train, 1, found)[0].message
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    of_epochs = replace(found, out=f"{found.out}s", train=replace(found.train, steps=None, epochs=1))
    for error in errors(train, 2, replace(of_epochs, mesh=DATA_RANKS)):
        assert "6 have no label in the part that a row holds: raise row_tokens" in error.message


def test_a_best_that_cannot_be_written_does_not_stop_a_run_that_goes_on(folder: Path, tmp_path: Path) -> None:
    careless = CheckpointConfig(asynchronous=False, on_error="continue")
    wanted = config(folder, tmp_path / "run", train={"eval_every": 1}, evaluated=True, checkpoint=careless)
    run(_without_space, 1, wanted)
    assert len(logged(wanted, "loss")) == 4 and "no space left" in str(logged(wanted, "reason"))


def _without_space(config: TrainConfig) -> None:
    def write(*_: Any) -> None:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "write_file", write)
        train(config)
