"""`seqbraid bench max-length`: the search finds the longest length, and few layers foretell all of them."""

from __future__ import annotations

import json
from bisect import bisect_right
from math import inf
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqbraid.bench.max_length import Limits, MaxLength, switches
from seqbraid.bench.search import longest
from seqbraid.bench.trial import Trial, with_layers
from seqbraid.cli import main
from seqbraid.models.tiny.decoders import tiny_config
from seqbraid.plan.memory import MemoryOptions

CPU = torch.device("cpu")


@given(
    fixed=st.integers(0, 10_000),
    slope=st.floats(0.01, 50),
    bend=st.floats(0, 1e-3),
    jump=st.integers(1, 200_000),
    limit=st.integers(0, 500_000),
    start=st.integers(1, 100_000),
    most=st.integers(64, 200_000),
    step=st.integers(1, 64),
)
def test_search_finds_the_longest_that_fits(
    fixed: int, slope: float, bend: float, jump: int, limit: int, start: int, most: int, step: int
) -> None:
    """Of anything that grows, whether it bends, jumps or cannot be run from somewhere on."""
    asked: list[int] = []

    def peak(tokens: int) -> float:
        asked.append(tokens)
        assert tokens % step == 0 and step <= tokens <= most
        return inf if tokens > 150_000 else fixed + slope * tokens + bend * tokens**2 + 1000 * (tokens > jump)

    found = longest(peak, limit, start, most, step)
    tried, asked = asked, []
    lengths = range(step, most // step * step + 1, step)
    fitting = lengths[: bisect_right(lengths, limit, key=peak)]
    if not fitting:
        assert found is None
    else:
        assert found in fitting
        assert found >= fitting[-1] - max(step, found // 100)
    assert len(tried) <= 2 * most.bit_length() + 4  # bisection alone: once


def search(config: object, layers: tuple[int, ...], limits: Limits) -> MaxLength:
    return MaxLength(config, torch.float32, CPU, layers, limits, lambda line: None)


def test_two_depths_foretell_the_whole_model() -> None:
    config = tiny_config("llama", num_hidden_layers=6, hidden_size=64, vocab_size=64)
    limits = Limits(device=5 << 20, host=1 << 40, most=256, step=32)
    found = search(config, (1, 2, 3), limits).find(MemoryOptions())
    assert found.tokens is not None and found.checked is not None
    assert found.tokens < limits.most and abs(found.checked[0]) < 0.02
    (whole,) = search(config, (), limits)._run((6,), found.tokens, MemoryOptions()) or []
    assert whole.peak == pytest.approx(found.peak, rel=0.02)
    assert [trial.layers for trial in found.trials] == [1, 2, 3]


def test_hosts_memory_ends_what_offload_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 × 4 bytes a token and layer for each of 3 layers: 768 bytes a token."""
    config = tiny_config("llama", num_hidden_layers=3, hidden_size=64)
    limits = Limits(device=1 << 40, host=768 * 1000, most=4096, step=8)
    monkeypatch.setattr(
        "seqbraid.bench.max_length.run_trial", lambda _, layers, tokens, *__: Trial(layers, tokens, 1, 1.0)
    )
    kept = search(config, (), limits).find(MemoryOptions("full", offload=True))
    assert kept.tokens is not None and kept.host_bytes <= limits.host
    assert kept.tokens == pytest.approx(1000, rel=0.02)
    assert search(config, (), limits).find(MemoryOptions("full")).tokens == 4096


def test_what_runs_out_of_memory_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: object, config: object, tokens: int) -> None:
        if tokens > 700:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("seqbraid.bench.trial._step", run)
    limits = Limits(device=1 << 40, host=1 << 40, most=1024, step=100)
    assert search(tiny_config("llama"), (), limits).find(MemoryOptions()).tokens == 700


def test_depths_keep_the_pattern_of_layers() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = tiny_config("qwen3_5", num_hidden_layers=12, layer_types=3 * kinds)
    assert with_layers(config, 4).layer_types == kinds
    assert with_layers(config, 4, 10_000).max_position_embeddings == 10_000
    assert config.num_hidden_layers == 12 and config.max_position_embeddings == 4096
    limits = Limits(1 << 30, 1 << 30)
    for layers in ((2, 4), (4,), (4, 6), (0, 4)):
        with pytest.raises(ValueError, match="each a multiple of 4"):
            search(config, layers, limits)
    with pytest.raises(ValueError, match="layers=16 is more than the model's 12"):
        search(config, (4, 16), limits)


def test_switches_that_there_are() -> None:
    found = switches(["none", "full"], [False, True], None)
    assert [(m.checkpointing, m.offload) for m in found] == [("none", False), ("full", False), ("full", True)]
    with pytest.raises(ValueError, match="checkpointing='ful' is unknown"):
        switches(["ful"], [False], None)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    command = [
        "bench",
        "max-length",
        "--model",
        "llama",
        "--dtype",
        "float32",
        "--step",
        "64",
        "--most",
        "256",
    ]
    assert main([*command, "--device-gib", "0.004", "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert 0 < found["tokens"] <= 256 and found["peak"] <= 0.004 * 2**30
    assert "the longest sequence in 0.004 GiB" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--device-gib", "0.0001"]) == 1
    assert "< 64" in capsys.readouterr().out
    assert main([*command, "--device-gib", "1", "--layers", "two"]) == 2
    assert "--layers 'two' is not a list of depths" in capsys.readouterr().err
    assert main(command) == 2
    assert "say with --device-gib" in capsys.readouterr().err
