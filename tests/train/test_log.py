"""The log of a run and its other sinks: every digit kept, nothing of a killed run's future, no harm done."""

from __future__ import annotations

import io
import json
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from seqbraid.train.log import LOG_FILE, Sinks, check_sinks, current_records, open_sinks, read_log
from seqbraid.train.log_file import LogError
from seqbraid.train.metrics import StepCounts, StepMeter, peak_memory
from seqbraid.train.trackers import TRACKERS


def quiet() -> Console:
    return Console(file=io.StringIO())


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def records(folder: Path) -> list[dict[str, Any]]:
    return list(read_log(folder / LOG_FILE))


def test_every_bit_of_a_float_is_read_back(tmp_path: Path) -> None:
    drawn = random.Random(0)
    values = [drawn.uniform(-1, 1) * 10.0 ** drawn.randint(-300, 300) for _ in range(200)]
    sinks = open_sinks(tmp_path, [], console=quiet())
    for step, value in enumerate(values):
        sinks.log(step, {"loss": value})
        assert len(records(tmp_path)) == step + 1, "each line is on disk at once"
    sinks.log(200, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    sinks.close()
    found = records(tmp_path)
    assert [record["loss"] for record in found[:200]] == values
    assert math.isnan(found[200]["loss"])
    assert (found[200]["grad_norm"], found[200]["lr"]) == (math.inf, -math.inf)
    for line in (tmp_path / LOG_FILE).read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert abs(found[-1]["time"] - time.time()) < 60


def test_a_resumed_run_appends_and_what_it_does_again_counts(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, [], console=quiet())
    for step in range(1, 6):
        sinks.log(step, {"loss": float(step)})
        sinks.event("checkpoint", path=f"step-{step}")
    sinks.close()
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write('{"step": 2, "loss": 0.12')  # killed in the middle of a line
    before = (tmp_path / LOG_FILE).read_bytes()
    again = open_sinks(tmp_path, [], resume_step=4, console=quiet())
    again.log(4, {"loss": 40.0})
    again.close()
    assert (tmp_path / LOG_FILE).read_bytes().startswith(before + b"\n"), "nothing is taken back"
    found = [(r["step"], r.get("loss", r.get("event"))) for r in current_records(tmp_path / LOG_FILE)]
    kept = [(step, what) for step in range(1, 4) for what in (float(step), "checkpoint")]
    assert found == [*kept, (3, "resumed"), (4, 40.0)]
    assert len(records(tmp_path)) == 10 + 2
    open_sinks(tmp_path, [], resume_step=1, console=quiet()).close()
    (only,) = current_records(tmp_path / LOG_FILE)
    assert (only["step"], only["event"]) == (0, "started over") and len(records(tmp_path)) == 13
    assert [path.name for path in tmp_path.iterdir()] == [LOG_FILE]


class FullDisk:
    """A file of a disk that has room for so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        done: int = self.file.write(data[: self.room])
        self.room -= done
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_lines_that_a_full_disk_does_not_take_are_kept_where_the_run_is_to_go_on(tmp_path: Path) -> None:
    console = quiet()
    sinks = open_sinks(tmp_path, [], console=console, keeps=True)
    assert sinks.file is not None
    disk = sinks.file._file = FullDisk(sinks.file._file, 100)  # type: ignore[assignment]
    for step in range(1, 9):
        disk.room += 400 if step == 7 else 0  # enough for what waits, and for a part of the next line
        sinks.log(step, {"loss": step / 3})
    assert said(console).count("log.jsonl CANNOT BE WRITTEN (No space left on device); its lines are") == 2
    assert not (tmp_path / LOG_FILE).read_bytes().endswith(b"\n")
    disk.room = 10_000
    sinks.close()
    assert [record["loss"] for record in records(tmp_path)] == [step / 3 for step in range(1, 9)]

    sinks = open_sinks(tmp_path / "to the end", [], console=console, keeps=True)
    assert sinks.file is not None
    sinks.file._file = FullDisk(sinks.file._file, 0)  # type: ignore[assignment]
    sinks.log(1, {"loss": 1.0})
    sinks.event("checkpoint failed")
    sinks.close()
    assert "2 lines of" in said(console) and "COULD NOT BE WRITTEN, and are lost" in said(console)

    sinks = open_sinks(tmp_path / "stops", [], console=console)
    assert sinks.file is not None
    sinks.file._file = FullDisk(sinks.file._file, 10)  # type: ignore[assignment]
    with pytest.raises(LogError, match=r"log.jsonl cannot be written: No space left on device"):
        sinks.log(1, {"loss": 1.0})
    sinks.close()


def test_a_last_line_without_its_end_stays_a_line(tmp_path: Path) -> None:
    (tmp_path / LOG_FILE).write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}')
    sinks = open_sinks(tmp_path, [], resume_step=3, console=quiet())
    sinks.log(3, {"loss": 3.0})
    sinks.close()
    assert [record["loss"] for record in records(tmp_path) if "loss" in record] == [1.0, 2.0, 3.0]


def test_tensorboard_reads_what_was_logged_and_not_what_was_lost(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(tmp_path, "tensorboard", {"train": {"lr": 1e-5}}, console=quiet())
    for step in range(5):
        sinks.log(step, {"loss": 5.0 - step, "eval_loss": 9.0})
    sinks.close()
    time.sleep(1.1)  # event files are named by the second, and read in the order of their names
    sinks = open_sinks(tmp_path, "tensorboard", resume_step=3, console=quiet())
    sinks.log(3, {"loss": 0.5})
    sinks.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(0, 5), (1, 4), (2, 3), (3, 0.5)]
    assert len(board.Scalars("eval/loss")) == 3
    assert "config/text_summary" in board.Tags()["tensors"]


class FakeService(ModuleType):
    """Takes the calls of a service's package, and breaks when told to."""

    def __init__(self, breaks: str) -> None:
        super().__init__("wandb")
        self.breaks, self.ids, self.logged = breaks, list[str](), list[dict[str, Any]]()

    def init(self, **options: Any) -> Any:
        self._may_break("init")
        self.ids.append(options["id"])
        return SimpleNamespace(log=self.log, finish=self.finish, define_metric=lambda *_, **__: None)

    def log(self, values: dict[str, Any]) -> None:
        self._may_break("log")
        self.logged.append(values)

    def finish(self) -> None:
        self._may_break("finish")

    def _may_break(self, when: str) -> None:
        if when == self.breaks:
            raise ConnectionError("the network is down")


@pytest.mark.parametrize("breaks", ["nothing", "init", "log", "finish"])
def test_a_sink_that_fails_is_named_once_and_training_goes_on(
    breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, console = FakeService(breaks), quiet()
    monkeypatch.setitem(sys.modules, "wandb", service)
    sinks = open_sinks(tmp_path, "wandb", console=console)
    for step in range(3):
        sinks.log(step, {"loss": 1.0})
    sinks.close()
    assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]
    assert said(console).count("the network is down") == (breaks != "nothing")
    assert [values["step"] for values in service.logged] == (
        [0, 1, 2] if breaks in ("nothing", "finish") else []
    )
    if breaks == "nothing":
        open_sinks(tmp_path, "wandb", resume_step=2, console=console).close()
        assert len(service.ids) == 2 and service.ids[0] == service.ids[1], "a resumed run is the same run"


def test_missing_packages_and_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "trackio", "torch.utils.tensorboard.writer"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("wandb", "mlflow", "trackio"):
        with pytest.raises(ValueError, match=rf"pip install 'seqbraid\[{name}\]'"):
            open_sinks(tmp_path, name, console=quiet())
    console = quiet()
    sinks = open_sinks(tmp_path, "tensorboard", console=console)
    sinks.log(0, {"loss": 1.0})
    sinks.close()
    assert len(records(tmp_path)) == 1 and "seqbraid[train]" in said(console)
    with pytest.raises(ValueError, match="tensorboard, wandb, mlflow, trackio"):
        open_sinks(tmp_path, "tensorbord", console=quiet())


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sinks = Sinks()
    sinks.log(0, {"loss": 1.0})
    sinks.event("checkpoint")
    sinks.close()
    assert not list(tmp_path.iterdir())


def test_the_console_has_a_bar_or_lines(tmp_path: Path) -> None:
    plain = quiet()
    sinks = open_sinks(tmp_path / "a", [], console=plain, total_steps=10, every=4)
    for step in range(1, 11):
        sinks.log(step, {"loss": 2.5, "lr": 1e-5, "tokens_per_s": 12345.0})
    sinks.close()
    lines = said(plain).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/10", "step 4/10", "step 8/10", "step 10/10"]
    assert all("loss 2.5000" in line and "12,345 tok/s" in line and "ETA 0:00:00" in line for line in lines)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    sinks = open_sinks(tmp_path / "b", [], console=terminal, total_steps=10)
    sinks.log(5, {"loss": 2.5})
    sinks.close()
    assert "50%" in said(terminal) and "loss 2.5000" in said(terminal)


def test_the_meter_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    facts = {"loss": 2.0, "grad_norm": 0.5, "lr": 1e-3}
    counted = StepCounts(900, 300, physical=1000, flops=4e6)
    meter = StepMeter(devices=4, peak=1e6)
    now[0] = 102.0
    found = meter.step(replace(counted, correct=150), **facts, data_wait_s=0.1)
    assert found["step_s"] == 2.0
    assert found["tokens_per_s"] == 450.0 and found["tokens_per_s_per_device"] == 112.5
    assert found["mfu"] == 0.5 and found["accuracy"] == 0.5
    assert found["padding"] == pytest.approx(0.1) and "fill" not in found
    now[0] = 102.5
    found = meter.step(StepCounts(900, 300, 1000), **facts, data_wait_s=0.1, fill=0.75, epoch=1.5)
    assert (found["step_s"], found["fill"], found["epoch"]) == (0.5, 0.75, 1.5)
    now[0] = 110.0
    meter.start()  # an evaluation took 7.5 s
    now[0] = 111.0
    found = meter.step(replace(counted, physical=0), **facts, data_wait_s=0.0)
    assert found["step_s"] == 1.0 and found["padding"] == 0.0 and "accuracy" not in found
    assert "mfu" not in StepMeter(4).step(counted, **facts, data_wait_s=0.0)
    assert all(type(value) is float for value in found.values())
    with pytest.raises(ValueError, match="devices=0"):
        StepMeter(0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process's peak in /proc")
def test_memory_is_the_peak_of_the_process() -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = int(status["VmHWM"].split()[0])
    assert peak_memory(torch.device("cpu")) == pytest.approx(1024 * kib, rel=0.02)
    found = StepMeter(1).step(StepCounts(1, 1, 1), loss=1.0, grad_norm=1.0, lr=1.0, data_wait_s=0.0)
    assert found["memory_gib"] == pytest.approx(kib / 2**20, rel=0.02)


def test_an_installed_package_brings_a_sink_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "site" / "mine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[seqbraid.sinks]\nmine = mine_sinks:File\ngone = no_such_module:File\nwandb = mine_sinks:File\n"
    )
    (tmp_path / "site" / "mine_sinks.py").write_text(
        "class File:\n"
        "    def __init__(self, folder, config, resume_step):\n"
        "        self.file = open(folder / 'mine.txt', 'a')\n"
        "        print(config['train'], resume_step, file=self.file)\n"
        "    def log(self, step, metrics):\n"
        "        print(step, metrics['loss'], file=self.file)\n"
        "    def close(self):\n"
        "        self.file.close()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    check_sinks("mine")
    sinks = open_sinks(tmp_path / "run", "mine", {"train": "t"}, resume_step=4, console=quiet())
    sinks.log(4, {"loss": 0.25})
    sinks.close()
    assert (tmp_path / "run" / "mine.txt").read_text() == "t 4\n4 0.25\n"
    with pytest.raises(ValueError, match="'gone' needs its package"):
        check_sinks("gone")
    assert isinstance(TRACKERS["wandb"][0], type) and "mine_sinks" not in str(TRACKERS["wandb"][0])
    with pytest.raises(ValueError, match=r"use any of .*, mine, .* entry point group 'seqbraid\.sinks'"):
        check_sinks("minne")
