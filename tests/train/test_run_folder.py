"""A run's folder: one run at a time, nothing of anybody else written over, the same folder for all ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqbraid.train import lock, run_folder
from seqbraid.train.config import TrainConfig
from seqbraid.train.config_file import load_config, parse_config
from seqbraid.train.dry_run import dry_run
from seqbraid.train.lock import LOCK_FILE, Lock
from seqbraid.train.log import read_log
from tests.helpers.ranks import errors, run
from tests.helpers.runs import RING, config, train


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """A forked process that does something, says so, and then waits to be killed."""
    said, says = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            work()
            os.write(says, b"x")
            time.sleep(60)
        os._exit(0)
    os.close(says)
    assert os.read(said, 1) == b"x"
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path: Path) -> None:
    with child(lambda: setattr(Kept, "lock", Lock(tmp_path))) as pid:
        before = (tmp_path / LOCK_FILE).read_bytes()
        with pytest.raises(ValueError, match=f"is in use by another run: process {pid} on "):
            Lock(tmp_path)
        assert (tmp_path / LOCK_FILE).read_bytes() == before
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        ours = Lock(tmp_path)  # dead, though nobody has asked for its status yet
    ours.check()
    ours.release()
    assert list(tmp_path.iterdir()) == []


class Kept:
    """Keeps a child's lock alive."""


def test_another_process_of_the_same_number_does_not_hold_it(tmp_path: Path) -> None:
    with child(lambda: None) as pid:
        stale = {
            "machine": lock.machine(),
            "pid": pid,
            "started": "1",
            "token": "t",
            "host": "h",
            "since": "s",
        }
        (tmp_path / LOCK_FILE).write_text(json.dumps(stale))
        Lock(tmp_path).release()


def test_a_lock_of_another_machine_is_watched_for_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WATCH_S", 0.6)
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    monkeypatch.setattr(lock, "machine", lambda: "elsewhere")
    theirs = Lock(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(lock, "WATCH_S", 0.6)
    with pytest.raises(ValueError, match="is in use by another run"):
        Lock(tmp_path)
    theirs._released.set()  # killed: it does not beat, and does not clear up
    time.sleep(0.1)
    ours = Lock(tmp_path)
    with pytest.raises(ValueError, match="considered this run dead"):
        theirs.check()  # it was stopped for a while, perhaps
    theirs.release()
    ours.check()
    ours.release()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who finds a lock that is not written yet waits for a sign of life.
    monkeypatch.setattr(lock, "WATCH_S", 9.0)
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    for name in ("stale", "none"):
        root = tmp_path / name
        root.mkdir()
        if name == "stale":
            stale = {"machine": lock.machine(), "pid": 1, "started": "no", "token": "t"}
            (root / LOCK_FILE).write_text(json.dumps(stale))
        pids, start = [], time.monotonic() + 0.3
        for number in range(8):
            pid = os.fork()
            if not pid:
                time.sleep(max(0.0, start - time.monotonic()))
                try:
                    held = Lock(root)
                    (root / f"won-{number}").touch()
                    while len(list(root.glob("lost-*"))) < 7 and time.monotonic() < start + 60.0:
                        time.sleep(0.05)  # while the others come
                    held.check()
                    held.release()
                except ValueError:
                    (root / f"lost-{number}").touch()
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        assert len(list(root.glob("won-*"))) == 1 and len(list(root.glob("lost-*"))) == 7


def test_a_lock_that_another_took_in_the_meantime_is_left_to_it(tmp_path: Path) -> None:
    """Both have found the same stale lock; one was quicker."""
    theirs, late = Lock(tmp_path), object.__new__(Lock)
    late.path, late.token = theirs.path, "late"
    late._set_aside("stale")
    theirs.check()
    assert json.loads(theirs.path.read_text())["token"] == theirs.token
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    theirs.release()


def test_a_folder_that_holds_other_things_is_refused_untouched(folder: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "log.jsonl", "model/config.json", "notes/a.txt"):
        out = tmp_path / name.replace("/", "-")
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("mine")
        before = sorted(out.rglob("*"))
        for error in errors(train, 2, config(folder, out, mesh=RING)):
            assert f"holds {name.split('/')[0]} and is not a run" in error.message
        assert sorted(out.rglob("*")) == before and (out / name).read_text() == "mine"


def test_an_out_that_is_no_folder_is_named_on_every_rank_and_by_a_dry_run(
    folder: Path,
    tmp_path: Path,
) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    for out, what in ((file / "a" / "run", f"{file} is a file"), (file, f"{file} is a file"),
                      (link / "run", f"{link} is a broken link")):  # fmt: skip
        said = re.escape(f"out={str(out)!r} cannot be used: {what}, not a folder; give another")
        for error in errors(train, 2, config(folder, out, mesh=RING)):
            assert error.kind == "ValueError" and re.fullmatch(f"(rank 0 stopped: )?{said}", error.message)
        with pytest.raises(ValueError, match=f"^{said}$"):
            dry_run(config(folder, out))
    assert sorted(tmp_path.iterdir()) == [file, link] and file.read_text() == "mine"


def test_a_dry_run_refuses_an_out_that_holds_other_things(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt and is not a run of seqbraid"):
        dry_run(config(folder, tmp_path))
    if os.geteuid():  # nothing is closed to root
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="closed cannot be written to"):
            dry_run(config(folder, tmp_path / "closed" / "run"))
        (tmp_path / "closed").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_is_nobodys_is_no_reason_to_refuse(folder: Path, tmp_path: Path) -> None:
    short = config(folder, tmp_path / "run", train={"steps": 1})
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".gitignore").write_text("*")
    run(train, 1, short)
    text = (tmp_path / "run/config.yaml").read_bytes()
    run(train, 1, short)
    assert (tmp_path / "run/config.yaml").read_bytes() == text
    longer = replace(short, train=replace(short.train, steps=2, lr=0.02))
    run(train, 1, longer)
    events = [e for e in read_log(tmp_path / "run/log.jsonl") if e.get("event") == "changed"]
    assert [event["what"].partition(" is ")[0] for event in events] == ["train.steps", "train.lr"]
    assert all("the learning rate" in event["what"] for event in events)
    assert (tmp_path / "run/config.1.yaml").read_bytes() == text
    assert load_config(tmp_path / "run/config.yaml") == longer
    # One that says the same in other words, as who edited it gave it, stays as it is.
    (tmp_path / "run/config.yaml").write_bytes(b"# mine\n" + (tmp_path / "run/config.yaml").read_bytes())
    run(train, 1, longer)
    assert (tmp_path / "run/config.yaml").read_bytes().startswith(b"# mine\n")
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def _with_a_folder_of_its_own(settings: TrainConfig) -> None:
    run_folder.SEEN_S = 0.3
    rank = os.environ["RANK"]
    train(replace(settings, out=f"{settings.out}{rank}"))


def test_a_folder_that_is_not_shared_is_found_at_the_start(folder: Path, tmp_path: Path) -> None:
    for error in errors(_with_a_folder_of_its_own, 2, config(folder, tmp_path / "run", mesh=RING)):
        assert "rank 1 on " in error.message and "one folder shared by all ranks" in error.message
    assert not (tmp_path / "run0" / LOCK_FILE).exists()


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"out": "~/runs/a", "model": "~/m", "data.train": "~/a.jsonl", "data.media_root": "~"}
    more = ["--train.steps=1", "--train.batch_tokens=8192"]
    found: Any = parse_config([*(f"--{name}={value}" for name, value in options.items()), *more])[0]
    assert (found.out, found.model) == (f"{tmp_path}/runs/a", f"{tmp_path}/m")
    assert (found.data.train, found.data.media_root) == (f"{tmp_path}/a.jsonl", str(tmp_path))
