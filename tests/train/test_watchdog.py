"""What hangs is said, with the rank and the step, and ends; a signal is answered wherever the run waits."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.distributed import TCPStore

from seqbraid.comm.heartbeat import RankStatus
from seqbraid.data.stream.workers import Workers
from seqbraid.train.config import MeshConfig, TimeoutConfig, TrainConfig
from seqbraid.train.setup import make_mesh
from seqbraid.train.stuck import Rank, describe_ranks, laggards
from seqbraid.train.trainer import Trainer
from seqbraid.train.watchdog import watched
from tests.helpers.ranks import errors, run
from tests.train.test_run_export import config, examples  # noqa: F401

LIMIT_S = 4.0


def settings(data: Path, out: Path, timeouts: TimeoutConfig, **changes: Any) -> TrainConfig:
    """Six steps of two ranks."""
    base = config(data, out, "tiny:qwen3", mesh=MeshConfig(ring=2), timeouts=timeouts)
    train = replace(base.train, steps=6)
    return replace(base, train=train, data=replace(base.data, **changes))


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """What this process writes to its standard error, also past Python, goes into a file."""
    before, file = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(file)


def at_forward(trainer: Trainer, number: int, do: Callable[[], None]) -> None:
    """Do something in the middle of a forward, the first of which has the number 1."""
    count = iter(range(1, 1000))
    layer = next(module for module in trainer.model.modules() if isinstance(module, nn.Linear))
    layer.register_forward_pre_hook(lambda *_: do() if next(count) == number else None)


def stuck_in_forward() -> None:
    time.sleep(120)


def stop_self() -> None:
    """SIGSTOP; who stops cannot end by itself, so that is left to another."""
    subprocess.Popen(["sh", "-c", f"sleep {3 * LIMIT_S}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def train_with(config: TrainConfig, rank: int, do: Callable[[], None] | None) -> int:
    """A run in which one rank does something in its second forward."""
    with stderr_to(Path(config.out).with_suffix(".txt")), watched(config) as watchdog:
        mesh = make_mesh(config)
        watchdog.join(mesh)
        trainer = Trainer(config, mesh, watchdog.where)
        if mesh.rank == rank and do is not None:
            at_forward(trainer, 2, do)
        trainer.run()
    return trainer.step


@pytest.mark.parametrize(
    ("do", "said"),
    [(stuck_in_forward,
      "is holding up the run: step 2, forward and backward of micro-batch 1 of 1, at stuck_in_"),
     (stop_self, "has sent no heartbeat for")],
)  # fmt: skip
def test_a_rank_that_hangs_in_its_forward_is_named(
    examples: Path,  # noqa: F811
    tmp_path: Path,
    do: Callable[[], None],
    said: str,
) -> None:
    now = settings(examples, tmp_path / "run", TimeoutConfig(step=LIMIT_S))
    assert [error.kind for error in errors(train_with, 2, now, 1, do, limit=150.0)] == ["EOFError"] * 2
    text = (tmp_path / "run.txt").read_text()
    (line,) = [line for line in text.splitlines() if "timeouts.step=4): " in line]
    assert "rank 1 (host " in line and said in line and "step 2, forward and backward" in line
    assert "rank 0 waits in step 2, forward and backward of micro-batch 1 of 1: " in line
    assert "seqbraid/comm/" in line.split("rank 0 waits")[1]
    assert "the last checkpoint that all ranks have written, published or not. Stacks" in line
    ended = json.loads((tmp_path / "run" / "ended.json").read_text())
    assert (ended["reason"], ended["step"]) == ("failed", 1) and "rank 1 (host " in ended["error"]
    stacks = {path.name for path in (tmp_path / "run" / "hang").glob("stacks-*")}
    assert "stacks-rank-0.txt" in stacks
    assert ("stacks-rank-1.txt" in stacks) == (do is stuck_in_forward)
    assert (tmp_path / "run" / "hang" / "flight-rank-0").stat().st_size > 0
    assert "train_with" in (tmp_path / "run" / "hang" / "stacks-rank-0.txt").read_text()


def test_torchs_flight_recorder_is_switched_on_unless_the_user_has_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a group is made: NCCL's recorder reads the environment when it begins."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    names += ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    for own in ({}, {names[1]: "7", names[2]: "0", names[4]: "elsewhere"}):
        with mock.patch.dict(os.environ):
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(own)
            with watched(config(tmp_path, tmp_path / "run", "tiny:qwen3")):
                found = {name: os.environ.get(name) for name in names}
        files = str(tmp_path / "run" / "hang" / "flight-rank-")
        assert found == (
            {**dict.fromkeys(names), **own}
            if own
            else {names[0]: "2000", names[1]: None, names[2]: "1", names[3]: files, names[4]: None}
        )


class Endless:
    """An encoder that never comes back."""

    def length(self, record: Any) -> int:
        while True:
            time.sleep(0.01)

    encode = length


def train_without_workers(config: TrainConfig, asked: bool) -> None:
    """A run that tokenizes in its training thread."""
    with stderr_to(Path(config.out).with_suffix(".txt")), watched(config) as watchdog:
        mesh = make_mesh(config)
        trainer = Trainer(config, mesh, watchdog.where)
        tasks = trainer.loader._workers._tasks  # type: ignore[union-attr]
        vars(tasks)["encoder"] = Endless()
        if asked:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        trainer.run()


@pytest.mark.parametrize(
    ("limits", "said"),
    [(TimeoutConfig(loader=2.0), "timeouts.loader=2"), (TimeoutConfig(stop=1.0), "timeouts.stop=1")],
    ids=str,
)
def test_a_sample_that_never_ends_ends_a_run_without_workers(
    examples: Path,  # noqa: F811
    tmp_path: Path,
    limits: TimeoutConfig,
    said: str,
) -> None:
    now = replace(settings(examples, tmp_path / "run", limits, workers=0), mesh=MeshConfig())
    asked = limits.loader != 2.0
    assert [e.kind for e in errors(train_without_workers, 1, now, asked, limit=100.0)] == ["EOFError"]
    (line,) = [line for line in (tmp_path / "run.txt").read_text().splitlines() if f"({said}): " in line]
    assert "step 1, waiting for data, at length (" in line


def interrupt_and_hang() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(120)


def test_sigterm_ends_a_run_that_is_stuck_in_a_collective(examples: Path, tmp_path: Path) -> None:  # noqa: F811
    now = settings(examples, tmp_path / "run", TimeoutConfig(stop=2.0))
    found = errors(train_with, 2, now, 1, interrupt_and_hang, limit=150.0)
    assert [error.kind for error in found] == ["EOFError"] * 2
    text = (tmp_path / "run.txt").read_text()
    assert "asked to stop, but there was no progress for 2 s (timeouts.stop=2)" in text


def train_until_stopped(config: TrainConfig) -> tuple[int, str]:
    """A run of which rank 0's worker stops after two steps, and which then gets a SIGTERM there alone."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with watched(config) as watchdog:
        mesh = make_mesh(config)
        watchdog.join(mesh)
        trainer = Trainer(config, mesh, watchdog.where)
        step = trainer._step

        def then_stop(data: Any) -> bool:
            stop = step(data)
            if trainer.step == 2 and mesh.rank == 0:
                workers = trainer.loader._workers
                assert isinstance(workers, Workers)
                os.kill(workers._workers[0].process.pid or 0, signal.SIGSTOP)
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return stop

        trainer._step = then_stop  # type: ignore[method-assign]
        trainer.run()
    return trainer.step, (Path(config.out) / "checkpoints" / "last").read_text().strip()


def test_sigterm_saves_while_the_loader_waits(examples: Path, tmp_path: Path) -> None:  # noqa: F811
    now = settings(examples, tmp_path / "run", TimeoutConfig(), workers=1, prefetch_steps=0)
    assert run(train_until_stopped, 2, now, limit=200.0) == [(2, "step-00000002")] * 2


def test_ranks_that_never_come_are_named(examples: Path, tmp_path: Path) -> None:  # noqa: F811
    """The first of two ranks is started alone; torchrun's store is there."""
    environment = {"RANK": "0", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "127.0.0.1"}
    server = TCPStore("127.0.0.1", 0, is_master=True)
    environment |= {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    settings = [
        "--model=tiny:qwen3",
        f"--out={tmp_path / 'run'}",
        f"--data.train={examples}/ledgers/train.jsonl",
    ]
    settings += ["--train.steps=1", "--train.batch_tokens=8192", "--timeouts.start=3"]
    command = [sys.executable, "-m", "seqbraid", "train", *settings]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    first = next(line for line in done.stderr.splitlines() if "The run ends at timeouts.start=3" in line)
    assert "rank 0 of 3 (host " in first and "waits for ranks 1, 2 to join: not started, dead, or " in first
    assert f"the job's store at 127.0.0.1:{server.port}" in first


def seen(step: int = 5, waits: bool = True, stalled_s: float = 9.0) -> RankStatus:
    return RankStatus("a", 7, step, "the update", stalled_s, "all_gather (x.py:1)", waits, 1, 0.0)


def test_who_lags() -> None:
    waiting, busy = Rank(seen(), None), Rank(seen(waits=False), None)
    assert laggards({0: waiting, 1: busy, 2: waiting}) == [1]
    assert laggards({0: waiting, 1: busy, 2: Rank(seen(), 7.0), 3: Rank(None, 9.0)}) == [2, 3]
    assert laggards({0: waiting, 1: Rank(seen(step=4), None)}) == [1]
    assert laggards({0: waiting, 1: waiting}) == []
    assert laggards({0: busy}) == [0]
    assert laggards({0: busy, 1: busy}) == []
    text = describe_ranks({0: waiting, 1: waiting})
    assert text.startswith("ranks 0, 1 wait in step 5, the update: all_gather (x.py:1); no rank is behind")
    assert "no rank is behind: their collectives do not match" in text
    text = describe_ranks({0: busy, 1: busy})
    assert "none of them waits for another" in text and "collectives" not in text
    assert describe_ranks({0: waiting, 1: Rank(None, 9.0)}).startswith("rank 1 has never sent a heartbeat; ")
