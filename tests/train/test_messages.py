"""What the command line says of a run that is finished, of one that was, and of an export."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from seqbraid.cli import main
from seqbraid.train.config import LogConfig, MeshConfig, to_yaml
from tests.train.test_run_export import config, examples  # noqa: F401


def test_a_run_says_how_it_ended_and_that_it_was_finished(
    examples: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config(examples, out, "tiny:qwen3")))
    assert main(["train", str(path)]) == 0
    said = capfd.readouterr().err
    assert "finished after step 2; the last checkpoint is step-00000002" in said
    assert f"seqbraid export {out} --out DIR" in said and "already finished" not in said
    assert "loading the model tiny:qwen3" in said
    assert main(["train", str(path)]) == 0
    assert "It was already finished: nothing was trained" in capfd.readouterr().err
    assert main(["export", str(out), "--out", str(tmp_path / "model")]) == 0
    printed = capfd.readouterr().out
    assert f"wrote {tmp_path / 'model'}: " in printed and "float32, in 1 file\n" in printed
    assert main(["train", str(path), "--dry-run", "--log.sinks=wandbb"]) == 2
    assert "unknown sink 'wandbb'" in capfd.readouterr().err


@pytest.mark.parametrize("sink", ["wandb", "mlflow", "trackio"])
def test_a_sink_without_its_package_is_refused_before_anything_is_made(
    sink: str,
    examples: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, sink, None)  # as where it is not installed
    settings = replace(config(examples, tmp_path / "run", "tiny:qwen3"), log=LogConfig(sinks=sink))
    (tmp_path / "run.yaml").write_text(to_yaml(settings))
    for more in ([], ["--dry-run"]):
        assert main(["train", str(tmp_path / "run.yaml"), *more]) == 2
        (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("seqbraid")]
        assert f"the sink {sink!r} needs its package" in said
        assert said.endswith(f"pip install 'seqbraid[{sink}]'") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"RANK": "1"}, "has RANK='1' but no WORLD_SIZE; start with torchrun"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE='2' but no RANK; start with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks count from 0 to WORLD_SIZE"),
        ({"RANK": "", "WORLD_SIZE": "two"}, "not whole numbers"),
    ],
)
def test_half_of_what_a_launcher_sets_is_refused_in_one_line(
    known: dict[str, str],
    message: str,
    examples: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    settings = config(examples, tmp_path / "run", "tiny:qwen3", mesh=MeshConfig(dp_shard=-1))
    (tmp_path / "run.yaml").write_text(to_yaml(settings))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("seqbraid")]
    assert said.startswith("seqbraid train: the environment has ") and message in said
    assert not (tmp_path / "run").exists()
