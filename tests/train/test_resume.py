"""Which checkpoint a run goes on from: damage is said, no finished save is lost, leftovers stop nobody."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seqbraid import Mesh
from seqbraid.train.checkpoint import publish
from seqbraid.train.checkpoint.checkpoints import Checkpoints
from tests.helpers import ranks


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, Mesh(), keep=9)
    for step in steps:
        checkpoints.save(step, filled(step), None, {"step": step})
    checkpoints.finish()
    return checkpoints


def filled(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def resumed(checkpoints: Checkpoints, resume: str) -> int:
    """The step that the weights are of after a resume."""
    path, model = checkpoints.last(resume), filled(0)
    assert path is not None
    state = checkpoints.load(path, model, None)
    assert all(bool((p == state["step"]).all()) for p in model.parameters())
    checkpoints.set_back(path, resume)
    return int(state["step"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a truncated file": (lambda root: os.truncate(root / "step-00000009/rank-00000.safetensors", 9), "has 9"),
    "a missing file": (lambda root: (root / "step-00000009/state.json").unlink(), "state.json is missing"),
    "a missing manifest": (lambda root: (root / "step-00000009/complete.json").unlink(), "complete.json is"),
    "a missing folder": (lambda root: (root / "step-00000009").rename(root / "aside"), "'step-00000009', wh"),
    "a torn pointer": (lambda root: os.truncate(root / "last", 7) or flip(root / "step-00000009/state.json"),
                       "last names 'step-00'"),
    "a flipped byte": (lambda root: flip(root / "step-00000009/rank-00000.safetensors"), "the checksum of"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_auto_stops_at_damage_and_latest_intact_falls_back(tmp_path: Path, case: str) -> None:
    break_it, message = DAMAGE[case]
    checkpoints = saved(tmp_path, 3, 6, 9)
    break_it(tmp_path)
    for resume in ("auto", "must"):
        with pytest.raises(ValueError, match=message) as caught:
            resumed(checkpoints, resume)
        assert "resume=latest-intact" in str(caught.value)
    if (tmp_path / "step-00000009").exists():
        with pytest.raises(ValueError, match="step-00000009"):
            resumed(checkpoints, "step:9")
    assert resumed(checkpoints, "latest-intact") == 6
    assert resumed(checkpoints, "auto") == 6  # a restart goes on from there
    assert resumed(checkpoints, "step:3") == 3


def test_where_none_is_intact_nothing_begins_anew(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3, 6)
    for name in ("step-00000003", "step-00000006"):
        (tmp_path / name / "rank-00000.safetensors").unlink()
    for resume in ("auto", "must", "latest-intact", "step:3"):
        with pytest.raises(ValueError, match=r"rank-00000\.safetensors is missing"):
            checkpoints.last(resume)
    with pytest.raises(ValueError, match="resume is 'never'"):
        checkpoints.last("never")
    with pytest.raises(ValueError, match="step-00000005 is missing"):
        checkpoints.last("step:5")
    empty = Checkpoints(tmp_path / "none", Mesh())
    assert [empty.last(resume) for resume in ("auto", "never", "latest-intact")] == [None] * 3


def test_a_restart_by_torchrun_does_not_go_back_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    checkpoints = saved(tmp_path, 3, 6)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resumed(checkpoints, "step:3") == 3  # the first attempt has died before it was there
    checkpoints.save(4, filled(4), None, {"step": 4})
    checkpoints.finish()
    assert resumed(checkpoints, "step:3") == 4
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert resumed(checkpoints, "step:3") == 3  # the command is given again


def intact_on_two_ranks(folder: str) -> tuple[str, str]:
    checkpoints = Checkpoints(Path(folder), Mesh(dp_shard=2))
    found, newest = checkpoints.last("latest-intact"), checkpoints.last()
    assert found is not None and newest is not None
    return found.name, newest.name


def test_ranks_share_the_reading_and_agree(tmp_path: Path) -> None:
    for name in ("complete.json", "rank-00000.safetensors", "state.json", "index.json"):
        root = tmp_path / name
        saved(root, 3, 6)
        flip(root / "step-00000006" / name)
        if name != "complete.json":  # which auto reads as well
            wanted = [("step-00000003", "step-00000006")] * 2
            assert ranks.run(intact_on_two_ranks, 2, str(root)) == wanted
        else:
            assert all("is damaged" in e.message for e in ranks.errors(intact_on_two_ranks, 2, str(root)))


def test_what_cannot_be_removed_is_named_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS with files that are open elsewhere: `.nfs…` cannot be deleted, its folder can be renamed."""
    saved(tmp_path, 3)
    unlink = os.unlink

    def busy(path: Any, *args: Any, **kwargs: Any) -> None:
        if ".nfs" in os.fspath(path):
            raise OSError(16, "Device or resource busy", path)
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", busy)
    for leftover in ("step-00000003.old", "step-00000006.tmp", "step-00000006.gone"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / ".nfs0001").touch()
    (tmp_path / "step-00000004").write_text("stray")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-00000005.gone").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step-00000007.tmp").symlink_to(tmp_path / "nowhere")
    with caplog.at_level(logging.WARNING):
        again = Checkpoints(tmp_path, Mesh(), keep=1)
        assert resumed(again, "auto") == 3
    for name in ("step-00000003.old", "step-00000006.tmp", "step-00000006.gone", "step-00000004"):
        assert name in caplog.text
    for step in (3, 4, 6, 7, 6):
        again.save(step, filled(step), None, {"step": step})
    again.finish()
    assert resumed(again, "auto") == 6
    assert (tmp_path / "elsewhere").is_dir()
    assert not list(tmp_path.glob("step-*.tmp")) and not (tmp_path / "step-00000005.gone").is_symlink()


def test_a_symlink_to_a_checkpoint_is_one_and_is_retired_as_a_link(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saved(root, 3)
    (root / "step-00000003").rename(tmp_path / "step-00000003")
    (root / "step-00000003").symlink_to(tmp_path / "step-00000003")
    checkpoints = Checkpoints(root, Mesh(), keep=1)
    assert resumed(checkpoints, "auto") == 3
    checkpoints.save(6, filled(6), None, {"step": 6})
    checkpoints.finish()
    assert sorted(path.name for path in root.iterdir()) == ["last", "step-00000006"]
    assert (tmp_path / "step-00000003" / "complete.json").is_file()


def test_a_finished_save_is_published_on_the_way_out_or_by_the_next_start(tmp_path: Path) -> None:
    for way in ("leave", "killed"):
        root = tmp_path / way
        checkpoints = saved(root, 3)
        checkpoints.save(6, filled(6), None, {"step": 6})
        checkpoints.mark_best(6)
        checkpoints._thread.shutdown()  # it is written, and nobody has asked since
        assert not (root / "step-00000006").exists()
        if way == "leave":
            checkpoints.leave()
            assert (root / "last").read_text() == "step-00000006\n"
        assert resumed(Checkpoints(root, Mesh()), "auto") == 6
        assert (root / "best").read_text() == "step-00000006\n"
        names = sorted(path.name for path in root.iterdir())
        assert names == ["best", "last", "step-00000003", "step-00000006"]


def leave_two(folder: str, one_is_gone: bool) -> None:
    mesh = Mesh(dp_shard=2)
    checkpoints = Checkpoints(Path(folder), mesh)
    checkpoints.save(6, filled(6), None, {"step": 6})
    if not (one_is_gone and mesh.rank == 1):
        checkpoints.leave(patience_s=1.0)


def test_no_rank_is_asked_on_the_way_out(tmp_path: Path) -> None:
    ranks.run(leave_two, 2, str(tmp_path / "all"), False)
    assert resumed(Checkpoints(tmp_path / "all", Mesh()), "auto") == 6
    ranks.run(leave_two, 2, str(tmp_path / "gone"), True, limit=10.0)  # its file may be there or not


def test_a_save_that_one_rank_has_not_finished_is_not_published(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    fresh = tmp_path / "step-00000006.tmp"
    fresh.mkdir()
    text = '{"state": {}, "optimizer": null, "base": null, "world_size": 2}'
    publish.write_part(fresh, 0, [b""], text)
    assert resumed(Checkpoints(tmp_path, Mesh()), "auto") == 3
    assert not fresh.exists()
