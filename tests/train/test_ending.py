"""How runs end: what is finished is published, the status says what happened, and so does `ended.json`."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from seqbraid.data.stream.loader import StepData
from seqbraid.train.checkpoint import files
from seqbraid.train.config import CheckpointConfig, TrainConfig
from seqbraid.train.config_file import to_yaml
from seqbraid.train.ending import PREEMPTED, UNSAVED, write_failure
from seqbraid.train.run import train as train_command
from seqbraid.train.signals import POLITE, stop_on_signals
from seqbraid.train.trainer import Trainer
from tests.helpers.ranks import errors, run
from tests.helpers.runs import RING, config, everything, logged, train

AGENT = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"}


def ended(settings: TrainConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(settings.out) / "ended.json").read_text())
    return found


def command(
    settings: TrainConfig, environment: dict[str, str], signals: dict[int, tuple[int, signal.Signals]]
) -> tuple[int, str]:
    """`seqbraid train` on this rank: its status, and what it said. Signals by step: to which rank, which."""
    path = Path(f"{settings.out}.{os.environ['RANK']}.yaml")
    path.write_text(to_yaml(settings))
    begin = Trainer._step

    def send(trainer: Trainer, data: StepData) -> bool:
        rank, number = signals.get(trainer.step + 1, (-1, None))
        if trainer.mesh.rank == rank and number is not None:
            os.kill(os.getpid(), number)
        return begin(trainer, data)

    said = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(mock.patch.object(Trainer, "_step", send))
        stack.enter_context(redirect_stderr(said))
        return train_command([str(path)]), said.getvalue()


def test_each_signal_saves_and_has_a_status_of_its_own(folder: Path, tmp_path: Path) -> None:
    """One rank hears one, before step 2, 3, …: that step is the last of all."""
    whole = config(folder, tmp_path / "whole", train={"steps": 6}, mesh=RING)
    asked = config(folder, tmp_path / "asked", train={"steps": 6}, mesh=RING)
    run(train, 2, whole)
    for step, number in enumerate((signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM), start=2):
        environment = AGENT if number == signal.SIGTERM else {}  # the others: the same shell, again
        found = run(command, 2, asked, environment, {step: (step % 2, number)})
        assert [status for status, _ in found] == [PREEMPTED] * 2
        facts = ended(asked)
        assert (facts["reason"], facts["status"]) == ("preempted", PREEMPTED)
        assert (facts["step"], facts["signal"]) == (step, number.name)
        assert facts["checkpoint"] == f"step-{step:08d}" == published(asked)
        assert facts["checkpoint"] in found[0][1] and "stopped by" not in found[1][1]

    log = (tmp_path / "asked/log.jsonl").read_bytes()
    again = run(command, 2, asked, AGENT, {})  # torchrun starts it again: it stays stopped
    assert [status for status, _ in again] == [PREEMPTED] * 2 and "stays stopped" in again[0][1]
    assert (tmp_path / "asked/log.jsonl").read_bytes() == log and ended(asked) == facts
    # A restart of another torchrun, whose first attempt died before it came so far, is none of it.
    facts["agents"] = [agent + "0" for agent in facts["agents"]]
    (tmp_path / "asked/ended.json").write_text(json.dumps(facts))
    found = run(command, 2, asked, AGENT, {})
    assert [status for status, _ in found] == [0, 0]
    assert (ended(asked)["reason"], ended(asked)["step"]) == ("finished", 6)
    assert everything(asked) == everything(whole)


def published(settings: TrainConfig) -> str:
    return (Path(settings.out) / "checkpoints/last").read_text().strip()


def test_the_end_of_a_run_wins_over_a_signal(folder: Path, tmp_path: Path) -> None:
    short = config(folder, tmp_path / "run", train={"steps": 2})
    ((status, _),) = run(command, 1, short, {}, {2: (0, signal.SIGTERM)})
    assert status == 0 and ended(short)["reason"] == "finished"


class Run:
    stop, asked_by = False, None


@pytest.mark.parametrize("number", POLITE)
def test_the_second_ctrl_c_ends_the_process_at_once(number: signal.Signals) -> None:
    child = os.fork()
    if not child:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        asked = Run()
        with stop_on_signals(asked, says=True):
            for _ in range(2):
                os.kill(os.getpid(), number)
        os._exit(7 if asked.stop and asked.asked_by == number.name else 8)
    _, status = os.waitpid(child, 0)
    if number == signal.SIGINT:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT
    else:  # as a scheduler may send it twice
        assert os.WEXITSTATUS(status) == 7


def fail_after_a_save(settings: TrainConfig) -> None:
    """The save of step 2 is under way when all ranks raise after step 3."""
    after = Trainer._after_step

    def fail(trainer: Trainer, metrics: dict[str, float], asked: bool) -> None:
        if trainer.step == 3:
            assert not (Path(settings.out) / "checkpoints/last").exists()
            raise RuntimeError("the data is odd")
        after(trainer, metrics, asked)

    with mock.patch.object(Trainer, "_after_step", fail):
        train(settings)


def test_a_save_under_way_is_published_when_the_next_step_fails(folder: Path, tmp_path: Path) -> None:
    settings = config(folder, tmp_path / "run", mesh=RING, checkpoint=CheckpointConfig(every=2))
    assert {error.message for error in errors(fail_after_a_save, 2, settings)} == {"the data is odd"}
    assert published(settings) == "step-00000002"
    assert files.is_complete(tmp_path / "run/checkpoints/step-00000002")
    facts = ended(settings)
    assert (facts["reason"], facts["status"], facts["step"]) == ("failed", 1, 3)
    assert facts["error"] == "RuntimeError: the data is odd"


@contextmanager
def full_from(step: int) -> Any:
    """No file of a checkpoint of this step or a later one can be written."""
    write = files.write_file

    def refuse(path: Path, parts: Any) -> Any:
        if "step-" in path.parent.name and int(path.parent.name[5:13]) >= step:
            raise OSError(28, "No space left on device")
        return write(path, parts)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(files, "write_file", refuse))
        yield


def command_on_a_full_disk(settings: TrainConfig, step: int) -> tuple[int, str]:
    with full_from(step):
        return command(settings, {}, {})


def test_a_disk_that_stays_full_is_said_each_time_and_is_no_success(folder: Path, tmp_path: Path) -> None:
    careless = CheckpointConfig(every=1, on_error="continue")
    settings = config(folder, tmp_path / "run", mesh=RING, checkpoint=careless)
    found = run(command_on_a_full_disk, 2, settings, 3)
    assert [status for status, _ in found] == [UNSAVED] * 2
    said = found[0][1]
    for step in (3, 4):
        assert f"the checkpoint of step {step} COULD NOT BE WRITTEN" in said
    assert said.count("the last one is step-00000002") == 2 and "could not be saved" in said
    assert len(logged(settings, "loss")) == 4
    facts = ended(settings)
    assert (facts["reason"], facts["status"], facts["checkpoint"]) == ("unsaved", UNSAVED, "step-00000002")
    assert [status for status, _ in run(command, 2, settings, {}, {})] == [0, 0]
    assert published(settings) == "step-00000004"


def test_the_rank_that_fails_first_is_written_down_without_hard_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    for place in (tmp_path / "with", tmp_path / "without"):
        place.mkdir()
        for rank in (1, 0):
            write_failure(place, rank, 5, RuntimeError(f"of rank {rank}"))
        assert [path.name for path in place.iterdir()] == ["ended.json"]
        facts = json.loads((place / "ended.json").read_text())
        assert (facts["rank"], facts["step"], facts["error"]) == (1, 5, "RuntimeError: of rank 1")
        assert facts["checkpoint"] is None
        (place / "checkpoints").mkdir()
        (place / "checkpoints/last").write_text(
            "step-00000004\n"
        )  # published by the first rank on its way out
        write_failure(place, 0, 5, RuntimeError("of rank 0"))
        later = json.loads((place / "ended.json").read_text())
        assert later == {**facts, "checkpoint": "step-00000004"}
        monkeypatch.setattr(os, "link", refuses)
