"""A slice of `make matrix`, and that it ends with status 1 where it must."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from seqbraid.verify.mutants import MUTANTS
from tests.verify import matrix
from tests.verify.random_models import NAMES, random_model

LLAMA = ["--families", "llama", "--models", "1", "--seeds", "1"]
SLICE = ["gpt2", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_vl", "qwen3_5_mtp"]


def test_a_slice_of_the_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--families", *SLICE, "--models", "1", "--seeds", "1", "--state", str(tmp_path / "state")]
    assert matrix.main(arguments) == 0, capsys.readouterr().out
    for found in matrix.read_state(tmp_path / "state").values():
        assert found.holds and len(found.mutants) >= 2


def test_a_case_on_two_ranks_and_its_defects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    assert matrix.main([*LLAMA, "--mesh", "ring=2", "--state", str(state)]) == 0, capsys.readouterr().out
    (found,) = matrix.read_state(state).values()
    assert found.key == "llama/0/0/ring=2" and len(found.mutants) == 6


def test_experts_over_two_ranks_and_their_defects(tmp_path: Path) -> None:
    state = tmp_path / "state"
    arguments = ["--families", "qwen3_moe", "llama", "--models", "4", "--seeds", "1", "--state", str(state)]
    assert matrix.main([*arguments, "--mesh", "ring=2,ep=2"]) == 0
    found = matrix.read_state(state)
    assert found and all(key.startswith("qwen3_moe") for key in found)
    assert any("a token at the wrong expert" in of_case.mutants for of_case in found.values())


def test_interleaved_stages_with_media_and_multi_token_prediction(tmp_path: Path) -> None:
    """Four micro-batches, of which one has no label."""
    state = tmp_path / "state"
    arguments = ["--families", "qwen3_5_media_mtp", "--models", "1", "--seeds", "1", "--state", str(state)]
    assert matrix.main([*arguments, "--mesh", "pp=2,stages=4"]) == 0
    assert list(matrix.read_state(state)) == ["qwen3_5_media_mtp/0/0/pp=2,stages=4"]


def test_a_run_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    state = tmp_path / "state"
    arguments = [*LLAMA[:2], "--models", "2", "--seeds", "2", "--state", str(state)]
    assert matrix.main(arguments) == 0
    lines = state.read_text().splitlines(keepends=True)
    assert [line.split('"')[3] for line in lines] == ["llama/0/0", "llama/1/0", "llama/0/1", "llama/1/1"]
    state.write_text("".join([*lines[:3], lines[3][:20]]))
    with patch.object(matrix, "run", side_effect=matrix.run) as run:
        assert matrix.main(arguments) == 0
    assert [call.args[0].key for call in run.call_args_list] == ["llama/1/1"]
    assert list(matrix.read_state(state)) == ["llama/0/0", "llama/1/0", "llama/0/1", "llama/1/1"]


def test_status_1_where_a_model_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mutant,) = (m for m in MUTANTS if m.name == "padding counted in the divisor")
    with mutant.switched_on():
        assert matrix.main([*LLAMA, "--state", str(tmp_path / "state")]) == 1
    assert "llama/0/0: " in capsys.readouterr().out


def test_status_1_where_a_defect_is_not_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harmless = matrix.Mutant("nothing", lambda: patch.object(matrix, "MISSED", matrix.MISSED), "llama")
    with patch.object(matrix, "MUTANTS", (harmless,)):
        assert matrix.main([*LLAMA, "--state", str(tmp_path / "state")]) == 1
    assert "not caught: ['nothing']" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_random_models_differ_in_size_and_not_by_seed(name: str) -> None:
    sizes = [
        [p.shape for p in random_model(name, *which)[0].parameters()] for which in ((0, 0), (0, 1), (1, 0))
    ]
    assert sizes[0] == sizes[1] != sizes[2]
