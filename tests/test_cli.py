"""The commands, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqbraid.cli import main
from seqbraid.models.tiny.decoders import tiny_config


def test_layout_prints_a_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "row.svg"
    arguments = ["layout", "--lengths", "900,300,40", "--ring", "2", "--ulysses", "2", "--svg", str(svg)]
    assert main(arguments) == 0
    assert "310" in capsys.readouterr().out
    assert svg.read_text().lstrip().startswith("<svg")


def exchange_of(model: str, mesh: str, lengths: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `layout --model` says below the table of the ranks, in single spaces."""
    arguments = ["layout", "--lengths", lengths, "--policy", "zigzag", "--model", model, *mesh.split()]
    assert main(arguments) == 0
    return " ".join(capsys.readouterr().out.split("max/mean")[-1].split())


def test_layout_shows_what_experts_send(capsys: pytest.CaptureFixture[str]) -> None:
    """4 experts over 2 ranks, 2 for each of 200 tokens, of 32 channels of 2 bytes: half of them travel."""
    shown = exchange_of("qwen3_moe", "--ring 2 --ep 2", "400", capsys)
    assert "4 experts over 2 ranks, 2 for each token · 32 channels · bfloat16" in shown
    assert "0 200 12,800 25,600 1 200 12,800 25,600" in shown
    # Tensor parallel ranks send tokens of their own.
    shown = exchange_of("qwen3_moe", "--ring 2 --tp 2 --ep 2", "400", capsys)
    assert " ".join(f"{rank} 100 6,400 12,800" for rank in range(4)) in shown
    assert main(["layout", "--lengths", "400", "--model", "qwen3_moe", "--ep", "3"]) == 2
    assert "--ep 3 does not divide the 4 experts of qwen3_moe; use one of 1, 2, 4" in capsys.readouterr().err


def test_layout_shows_what_stages_send(capsys: pytest.CaptureFixture[str]) -> None:
    """200 tokens of a rank of 32 channels of 2 bytes; 4 experts have two sums each in float32."""
    assert "pp=2: each rank sends 12,800 bytes" in exchange_of("llama", "--ring 2 --pp 2", "400", capsys)
    assert "each rank sends 6,432 bytes" in exchange_of("qwen3_moe", "--ring 2 --tp 2 --pp 2", "400", capsys)


def test_layout_shows_what_gated_delta_layers_send(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """4 value heads of 8 × 8: S0 is 1 KiB in float32, and so is M."""
    shown = exchange_of("qwen3_5", "--ring 2", "400", capsys)
    assert "3 gated-delta layers · 2 × 8 keys, 4 × 8 values · bfloat16" in shown
    # There 200 tokens × 36 numbers of q, k, v, b and a, and back 200 × 16 of the outputs.
    assert "0 1,024 20,800 1 2,048 20,800 " in shown
    assert "state passing is used: its busiest rank sends 2,048 bytes, against 20,800" in shown
    shown = exchange_of("qwen3_5", "--ring 2", "16", capsys)
    assert "0 1,024 832 1 2,048 832 " in shown
    assert "head all-to-all is used: its busiest rank sends 832 bytes, against 2,048" in shown

    shown = exchange_of("qwen3_next", "--ring 2 --ulysses 2", "400", capsys)
    assert "0 3,072 – " in shown and "state passing is used: ring × ulysses = 4 does not divide 2" in shown
    assert "no sequence is split, so nothing is sent" in exchange_of("qwen3_5", "", "40,9", capsys)
    assert "llama has no gated-delta layers" in exchange_of("llama", "--ring 2", "40,9", capsys)

    tiny_config("qwen3_5_moe", dtype="float32").save_pretrained(tmp_path)
    assert "0 1,024 41,600 1 2,048 41,600 " in exchange_of(str(tmp_path), "--ring 2", "400", capsys)


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
        (["layout", "--lengths", "9", "--model", "no_such"], "nor a folder with a config.json"),
        (["verify", "--model", "no_such"], "neither a tiny model"),
        (["verify", "--model", "qwen3_5", "--gated-delta", "guess"], "use one of 'auto', 'states', 'heads'"),
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
    command += ["verify", "--model", "qwen3_5_text", "--ring", "2", "--gated-delta", "heads"]
    command += ["--lengths", "40,7,130", "--json", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=environment, capture_output=True)
    assert json.loads(out.read_text())["holds"]


COMMANDS = ["", "--help", "layout --help", "layout --lengths 900,30 --ring 2 --svg {svg}"]
COMMANDS += ["report {run} --out {page}"]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_needs_no_model_loads_neither_torch_nor_transformers(command: str, tmp_path: Path) -> None:
    """That is what makes it start in a moment."""
    run = tmp_path / "run"
    run.mkdir()
    line = json.dumps({"step": 1, "loss": 2.5})
    (run / "log.jsonl").write_text(line + "\n")
    paths = {"svg": str(tmp_path / "row.svg"), "run": str(run), "page": str(tmp_path / "page.html")}
    code = (
        "import contextlib, sys, seqbraid; from seqbraid.cli import main\n"
        "with contextlib.suppress(SystemExit): sys.argv[1:] and main(sys.argv[1:])\n"  # as help ends
        "heavy = {'torch', 'transformers', 'datasets', 'jsonargparse', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    arguments = command.format(**paths).split()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, timeout=60)


def test_public_names_are_loaded_when_asked_for() -> None:
    code = (
        "import sys, seqbraid as sb; assert set(sb.__all__) <= set(dir(sb)); "
        "sb.SequenceLayout([3]); assert 'torch' not in sys.modules; "
        "import seqbraid.plan.memory; assert callable(sb.parallelize); "
        "assert sb.MemoryOptions is seqbraid.plan.memory.MemoryOptions"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
