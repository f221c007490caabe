"""What others wrote (names of files, errors of templates) is shown by the console, never obeyed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from seqbraid.cli import main
from seqbraid.data.tiny import tiny_training_model
from seqbraid.printable import show_error

CLEAR = "\x1b[2J"
"""What wipes a terminal."""
SHOWN = "\\x1b[2J"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and data in a folder with a name that wipes terminals."""
    found = tmp_path_factory.mktemp("files") / f"of{CLEAR}others\x9b1A"
    for part in tiny_training_model("qwen3", 0, torch.float32):
        part.save_pretrained(found / "model")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]
    long = [turns[0], {**turns[1], "content": "so " * 100}]
    lines = [*[{"messages": turns}] * 4, {"messages": turns, f"key{CLEAR}": 1}, {"messages": long}]
    (found / f"a{CLEAR}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def command(folder: Path, **changes: Any) -> list[str]:
    options = {
        "model": folder / "model", "out": folder / "run", "data.train": folder / f"a{CLEAR}.jsonl",
        "data.row_tokens": 64, "data.workers": 0, "train.batch_tokens": 64, "train.steps": 1,
        "precision": "float32", "log.sinks": "", "data.over_long": "drop", **changes,
    }  # fmt: skip
    return ["train", *(f"--{name}={value}" for name, value in options.items())]


def test_what_a_run_says_is_escaped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as outside of pytest
    assert main(command(folder, **{"data.on_bad_sample": "skip"})) == 0
    logging.getLogger("seqbraid.train").warning("a logger says %s", CLEAR)
    said = "".join(capfd.readouterr())
    parts = {
        "loading the model": f"of{SHOWN}others\\x9b1A",
        "skipped a bad sample": f"a{SHOWN}.jsonl:5: the record has the unknown key 'key{SHOWN}'",
        "dropped it": f"a{SHOWN}.jsonl:6",
        "seqbraid export": f"of{SHOWN}others\\x9b1A",
        "a logger says": SHOWN,
    }
    for line, shown in parts.items():
        assert shown in next(found for found in said.splitlines() if line in found), said
    assert "\x1b" not in said and "\x9b" not in said


def test_what_a_refusal_says_is_escaped(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template = folder / "model" / "chat_template.jinja"
    before = template.read_text()
    template.write_text("{{ raise_exception('no \x1b[2J here') }}")
    asked = command(folder, out=tmp_path / "run")
    assert main(asked) == 2
    template.write_text(before)
    assert main([*asked, f"--data.train={tmp_path}/no{CLEAR}.jsonl"]) == 2
    assert main([*asked, f"--train.schedule=no{CLEAR}"]) == 2
    assert main([*asked, "--dry-run", "--data.on_bad_sample=skip"]) == 0
    said = "".join(capfd.readouterr())
    for line in (
        f"no {SHOWN} here",
        f"no{SHOWN}.jsonl",
        f"train.schedule=no{SHOWN}",
        "samples cannot be used",
    ):
        assert line in said
    assert "\x1b" not in said and "\x9b" not in said


def test_a_traceback_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError(f"no{CLEAR}")
    show_error(RuntimeError, error, None)
    assert capsys.readouterr().err == f"RuntimeError: no{SHOWN}\n"
