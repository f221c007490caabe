"""The commands, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqbraid.cli import main


def test_layout_prints_a_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "row.svg"
    arguments = ["layout", "--lengths", "900,300,40", "--ring", "2", "--ulysses", "2", "--svg", str(svg)]
    assert main(arguments) == 0
    assert "310" in capsys.readouterr().out
    assert svg.read_text().lstrip().startswith("<svg")


def test_verify_writes_every_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["verify", "--model", "qwen3_5", "--json", str(out)]) == 0
    assert "holds" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["holds"] and {"loss", "logits"} < {line["name"] for line in result["lines"]}
    assert all(line["error"] <= 10 * line["floor"] for line in result["lines"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layout", "--lengths", "9,0"], "lengths[1]=0"),
        (["layout", "--lengths", "9", "--policy", "spiral"], "balanced, contiguous, zigzag"),
        (["verify", "--model", "no_such"], "neither a tiny family"),
    ],
)
def test_bad_arguments_are_told_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_verify_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "seqbraid",
    ]
    command += ["verify", "--model", "llama", "--ring", "2", "--lengths", "40,7,130", "--json", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=environment, capture_output=True)
    assert json.loads(out.read_text())["holds"]
