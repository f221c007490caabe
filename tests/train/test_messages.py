"""What the command line says of a run that is finished, of one that was, and of an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqbraid.cli import main
from seqbraid.train.config import to_yaml
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
    assert f"seqbraid export {out} --out DIR" in said and "finished before" not in said
    assert "reading the model tiny:qwen3" in said
    assert main(["train", str(path)]) == 0
    assert "It had been finished before: nothing was trained" in capfd.readouterr().err
    assert main(["export", str(out), "--out", str(tmp_path / "model")]) == 0
    printed = capfd.readouterr().out
    assert f"wrote {tmp_path / 'model'}: " in printed and "float32, in 1 file\n" in printed
    assert main(["train", str(path), "--dry-run", "--log.sinks=wandbb"]) == 2
    assert "unknown sink 'wandbb'" in capfd.readouterr().err
