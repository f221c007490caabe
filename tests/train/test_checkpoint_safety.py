"""A checkpoint and a kill at any moment, a disk that is full, a folder that is gone."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from seqbraid import Mesh, parallelize
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.train.checkpoint import files
from seqbraid.train.checkpoint.checkpoints import CheckpointError, Checkpoints, Failed, Published
from tests.helpers import ranks
from tests.helpers.checkpoints import small_disk


def test_a_kill_at_any_system_call_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    script = [sys.executable, "-c", f"from {__name__} import sweep; sweep({str(tmp_path)!r})"]
    done = subprocess.run(script, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for outcomes in json.loads(done.stdout):
        # Old, old, …, new, new: never back, and both ends are there.
        assert outcomes == sorted(outcomes) and outcomes[0] == "1 old" and outcomes[-1] == "2 new"
        assert len(outcomes) > 25


CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


def sweep(folder: str) -> None:
    """For k = 1, 2, …: a forked process saves and kills itself at its k-th system call that changes files."""
    torch.set_num_threads(1)
    # A killed process leaves the page cache whole, so that memory serves as well as a disk, and is quicker.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else folder) as root:
        save_small(Path(root) / "first", 10, 1.0)
        print(json.dumps([sweep_one(Path(root), step) for step in (20, 10)]))


def sweep_one(root: Path, step: int) -> list[str]:
    outcomes = []
    for k in range(1, 1000):
        where = root / f"{step}-{k}"
        shutil.copytree(root / "first", where)
        child = os.fork()
        if not child:
            kill_at(k)
            save_small(where, step, 2.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        model = torch.nn.Linear(3, 2)
        checkpoints = Checkpoints(where, Mesh(), keep=1)
        path = checkpoints.last()
        assert path is not None, k
        state = checkpoints.load(path, model, None)
        values = set(model.weight.flatten().tolist())
        assert values == {state["value"]}, (k, state, values)
        save_small(where, 30, 3.0)  # the run goes on as if nothing had been
        assert checkpoints.last() == where / "step-00000030"
        assert sorted(path.name for path in where.iterdir()) == ["last", "step-00000030"], k
        outcomes.append("1 old" if state["value"] == 1.0 else "2 new")
        if status == 0:
            return outcomes
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    raise AssertionError("a save of more than a thousand calls")


def save_small(folder: Path, step: int, value: float) -> None:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    checkpoints = Checkpoints(folder, Mesh(), keep=1)
    checkpoints.save(step, model, None, {"value": value})
    checkpoints.finish()
    checkpoints._thread.shutdown()


def kill_at(k: int) -> None:
    """Make this process kill itself in the middle of its k-th call."""
    lock, count = threading.Lock(), 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if count == k:
                    if name == "write":
                        real(args[0], args[1][: len(args[1]) // 2])  # torn
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def fill_disk(folder: str, mounted: bool, on_error: Any) -> list[Any]:
    mesh = Mesh(dp_shard=2)
    small, large = (parallelize(tiny_model("llama", vocab_size=n), mesh) for n in (97, 16000))
    checkpoints = Checkpoints(Path(folder), mesh, on_error=on_error)
    checkpoints.save(1, small, None, {})
    events: list[Any] = checkpoints.finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if not mounted:  # the kernel's other way to refuse a write
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, limits[1]))
    try:
        checkpoints.save(2, large, None, {})
        try:
            while len(events) < 2:
                events += checkpoints.poll()
        except CheckpointError as error:
            events.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    leftovers = [path.name for path in Path(folder).iterdir()]
    last = checkpoints.last()
    assert last is not None
    checkpoints.load(last, small, None)
    checkpoints.save(3, small, None, {})
    return [last.name, sorted(leftovers), *events, *checkpoints.finish()]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_full_disk_stops_or_is_reported_on_every_rank(tmp_path: Path, on_error: str) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk) as mounted:
        reason = "No space left on device" if mounted else "File too large"
        results = ranks.run(fill_disk, 2, str(disk), mounted, on_error)
        assert results[0][1] == ["last", "step-00000001"]  # as seen by the rank that clears away
        for last, _, first, second, third in results:
            assert last == "step-00000001"
            assert isinstance(first, Published) and first.step == 1
            if on_error == "stop":
                assert "step 2 could not be written" in second and reason in second
            else:
                assert isinstance(second, Failed) and second.step == 2 and reason in second.reason
            assert isinstance(third, Published) and third.step == 3


def lose_the_folder(folder: str) -> str:
    mesh = Mesh(dp_shard=2)
    model = parallelize(tiny_model("llama"), mesh)
    checkpoints = Checkpoints(Path(folder) / "run", mesh)
    checkpoints.save(1, model, None, {})
    checkpoints.finish()
    if mesh.rank == 0:
        os.rename(Path(folder) / "run", Path(folder) / "elsewhere")
    checkpoints.save(2, model, None, {})
    checkpoints.finish()
    return "unreachable"


def test_a_missing_folder_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for error in ranks.errors(lose_the_folder, 2, str(tmp_path)):
        assert error.kind == "CheckpointError" and "No such file or directory" in error.message
    assert not (tmp_path / "run").exists()


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    parts = [b"abc", memoryview(bytes(range(256)) * 70_000), b""]
    record = files.write_file(tmp_path / "file", parts)
    data = (tmp_path / "file").read_bytes()
    assert data == b"".join(parts) and record == (len(data), zlib.crc32(data))
    assert files.read_record(tmp_path / "file") == record
