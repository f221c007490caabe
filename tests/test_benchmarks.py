"""No benchmark rots: each starts, and those that `make bench` runs, or that are quick, run in small."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
PARTS = {"gpu_time", "step_cases", "step_profile", "step_ways"}
"""What others are made of."""
SCRIPTS = sorted({path.stem for path in FOLDER.glob("[!_]*.py")} - PARTS)
SMALL = {
    "balance": "--rows 2 --row-tokens 32768 --ring 2",
    "experts": "--tokens 64 --hidden 32 --intermediate 16 --experts 8 --picks 2 --repeats 1",
    "loss_memory": "--tokens 256 --vocabulary 512 --hidden 16",
    "media_balance": "--images 8 --rows 2",
    # A layer has more parameters than tokens × hidden: no reason to refuse.
    "memory_per_rank": "--tokens 256 --hidden 32 --layers 2 --ranks 2",
    "mtp_meshes": "--lengths 9 4 1",
    "packing": "--samples 2000 --row-tokens 4096 --repeats 1 --no-trl",
    "shared_decoding": "--videos 1 --pictures 2 --repeats 1",
}


def start(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python benchmarks/name.py …`, which has the folder itself on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    importlib.import_module(f"benchmarks.{name}").main()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "loss_kernels" and find_spec("triton") is None:
        pytest.skip("it times Triton's kernels")
    with pytest.raises(SystemExit) as ended:
        start(name, ["--help"], monkeypatch)
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_in_a_small_form(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(name, SMALL[name].split(), monkeypatch)
    assert re.search(r"\d", capsys.readouterr().out)


def test_everything_that_make_bench_runs_is_run_here() -> None:
    makefile = (FOLDER.parent / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"benchmarks/(\w+)\.py", makefile)) <= set(SMALL)
