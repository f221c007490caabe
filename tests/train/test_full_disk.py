"""A disk that fills up under a run: it stops or goes on as asked, and never loses the checkpoint it had."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from seqbraid.train.checkpoint.checkpoints import Checkpoints, Failed
from seqbraid.train.config import CheckpointConfig, MeshConfig, TrainConfig
from seqbraid.train.config_file import to_yaml
from seqbraid.train.log import Sinks
from seqbraid.train.news import News
from seqbraid.train.run import train as train_command
from seqbraid.train.setup import make_mesh
from seqbraid.train.trainer import Trainer
from tests.helpers.checkpoints import published, small_disk
from tests.helpers.ranks import errors, run
from tests.train.test_run_export import config, examples  # noqa: F401
from tests.train.test_train import losses, train

STEPS, FULL_AFTER, FREE_AFTER = 6, 2, 4


def settings(data: Path, out: Path, on_error: Any, **changes: Any) -> TrainConfig:
    """Two ranks, and a checkpoint after every step, of which the small disk holds two but not three."""
    base = config(data, out, "tiny:qwen3", mesh=MeshConfig(ring=2), **changes)
    checkpoint = CheckpointConfig(every=1, keep=1, on_error=on_error)
    return replace(base, train=replace(base.train, steps=STEPS), checkpoint=checkpoint)


def train_on_a_full_disk(config: TrainConfig) -> int:
    """The disk is full after `FULL_AFTER` steps, and `FREE_AFTER` steps later has space again."""
    trainer = Trainer(config, make_mesh(config))
    step, ballast = trainer._after_step, Path(config.out) / "checkpoints" / "ballast"

    def fill_and_free(metrics: dict[str, float], asked: bool) -> None:
        step(metrics, asked)
        if trainer.step not in (FULL_AFTER, FREE_AFTER):
            return
        trainer._report(trainer.checkpoints.finish())  # so that it is certain which checkpoints fail
        if trainer.mesh.rank == 0 and trainer.step == FULL_AFTER:
            fill(ballast)
        elif trainer.mesh.rank == 0:
            ballast.unlink()

    trainer._after_step = fill_and_free  # type: ignore[method-assign]
    trainer.run()
    return trainer.step


def fill(path: Path) -> None:
    """Take all space that is left."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def events(out: str) -> list[tuple[str, int]]:
    records = map(json.loads, (Path(out) / "log.jsonl").read_text().splitlines())
    return [(record["event"], record["step"]) for record in records if "event" in record]


def resumed_step(config: TrainConfig) -> int:
    return Trainer(config, make_mesh(config)).step


def test_a_run_on_a_disk_that_fills_up(examples: Path, tmp_path: Path) -> None:  # noqa: F811
    outs = {name: tmp_path / name for name in ("continue", "stop")}
    for out in outs.values():
        out.mkdir()
    going_on = settings(examples, outs["continue"], "continue")
    with small_disk(outs["continue"] / "checkpoints") as mounted:
        if not mounted:
            pytest.skip("a file system cannot be mounted here")
        assert run(train_on_a_full_disk, 2, going_on) == [STEPS, STEPS]
        assert len(losses(going_on.out)) == STEPS
        wanted = [("checkpoint", 1), ("checkpoint", 2), ("checkpoint failed", 3), ("checkpoint failed", 4)]
        assert events(going_on.out) == [*wanted, ("checkpoint", 5), ("checkpoint", 6)]
        log = (outs["continue"] / "log.jsonl").read_text()
        assert log.count("No space left on device") == 2
        assert published(outs["continue"] / "checkpoints") == [6]

    stopping = settings(examples, outs["stop"], "stop")
    with small_disk(outs["stop"] / "checkpoints"):
        folder = outs["stop"] / "checkpoints"
        for error in errors(train_on_a_full_disk, 2, stopping, limit=60.0):
            assert error.kind == "CheckpointError", error
            assert "step 3 could not be written" in error.message and "No space left" in error.message
        assert published(folder) == [2] and (folder / "last").read_text() == "step-00000002\n"
        assert not list(folder.glob("*.tmp"))
        assert run(resumed_step, 2, stopping) == [2, 2]  # reading needs no space
        (folder / "ballast").unlink()
        run(train, 2, stopping)
        assert losses(stopping.out) == losses(going_on.out)  # as if nothing had been


def command(settings: TrainConfig, full_from: int) -> tuple[int, str]:
    """`seqbraid train` on this rank, on a disk that others fill up from a step on."""
    path = Path(f"{settings.out}.{os.environ['RANK']}.yaml")
    path.write_text(to_yaml(settings))
    after = Trainer._after_step

    def fill_first(trainer: Trainer, metrics: dict[str, float], asked: bool) -> None:
        if trainer.step >= full_from and trainer.mesh.rank == 0:
            fill(Path(settings.out) / "ballast")
        after(trainer, metrics, asked)

    said = io.StringIO()
    with mock.patch.object(Trainer, "_after_step", fill_first), redirect_stderr(said):
        return train_command([str(path)]), said.getvalue()


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_disk_that_is_full_to_the_end_holds_the_log_too(
    on_error: str,
    examples: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder, steps = tmp_path / "disk" / "run", 16  # of which the log is longer than a page of the disk
    now = settings(examples, folder, on_error)
    now = replace(now, train=replace(now.train, steps=steps))
    with small_disk(tmp_path / "disk", "1500k") as mounted:
        if not mounted:
            pytest.skip("a file system cannot be mounted here")
        (status, said), (other, _) = run(command, 2, now, 3)
        logged = losses(folder)
        assert not list(folder.glob("ended.json.*"))
    if on_error == "continue":
        assert (status, other) == (74, 74) and len(logged) == steps
        assert (
            said.count("COULD NOT BE WRITTEN (rank 0") >= 2
            and "log.jsonl CANNOT BE WRITTEN (No space" in said
        )
        assert f"step {steps} is done but could not be saved; the last checkpoint is step-000000" in said
    else:
        assert status == 1 and other in (1, 2) and "Traceback" not in said
        # Whichever of the two comes first.
        assert re.search(
            r"seqbraid train: .*(log.jsonl cannot|step \d could not) be written: .*No space", said
        )


def test_the_best_of_a_run_may_fail_too(examples: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "run"
    out.mkdir()
    # Little is trained, so that the disk holds the newest, the best and one that is being written.
    base = settings(examples, out, "continue", freeze=["re:layers"])
    base = replace(base, data=replace(base.data, eval=str(examples / "ledgers" / "eval.jsonl")))
    base = replace(base, train=replace(base.train, eval_every=1, lr=1e-3))
    now = replace(base, checkpoint=replace(base.checkpoint, asynchronous=False))
    with small_disk(out / "checkpoints") as mounted:
        if not mounted:
            pytest.skip("a file system cannot be mounted here")
        assert run(train_on_a_full_disk, 2, now) == [STEPS, STEPS]
        found = events(now.out)
        assert [step for event, step in found if event == "checkpoint failed"] == [3, 4]
        assert [step for event, step in found if event == "checkpoint"] == [1, 2, 5, 6]
        assert (out / "checkpoints" / "best").read_text() == "step-00000006\n"
        mesh = make_mesh(replace(now, mesh=MeshConfig()))
        assert Checkpoints(out / "checkpoints", mesh).last() == out / "checkpoints" / "step-00000006"


def test_a_best_that_could_not_be_saved_is_none(examples: Path, tmp_path: Path) -> None:  # noqa: F811
    alone = config(examples, tmp_path, "tiny:qwen3")
    trainer = Trainer(alone, make_mesh(alone))
    trainer.news = News(Sinks(), None)
    before, best = {"step": 2, "eval_loss": 1.5}, {"step": 3, "eval_loss": 1.25}
    trainer.best.before, trainer.best.now = before, best
    trainer._report([Failed(2, "the disk is full")])
    assert trainer.best.now == best
    trainer._report([Failed(3, "the disk is full")])
    assert trainer.best.now == before
    trainer.loader.close()
