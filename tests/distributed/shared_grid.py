"""Meshes and families of tp and ep that the tests of this folder leave out: `make matrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import (
    test_experts,
    test_experts_state,
    test_tensor,
    test_tensor_lora,
    test_tensor_state,
)

TENSOR: list[test_tensor.Case] = [
    ("llama", {}, {"tp": 2}, {}),
    ("llama", {"num_key_value_heads": 1}, {"ring": 2, "tp": 2}, {}),
    ("qwen3", {"num_key_value_heads": 4}, {"tp": 2}, {"micro_batches": 3}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": False}, {"tp": 4}, {}),
    ("qwen3", {}, {"ulysses": 2, "tp": 2}, {}),
    ("qwen3", {}, {"dp_shard": 2, "ring": 2, "tp": 2}, {}),
    ("gemma3", {}, {"tp": 2}, {}),
    ("qwen3_moe", {}, {"tp": 4}, {"micro_batches": 3}),
    ("qwen3_next", {}, {"tp": 2}, {}),
    ("qwen3_5", {}, {"tp": 2}, {"micro_batches": 3}),
    ("qwen3_5", {}, {"ring": 2, "tp": 2}, {"gated_delta": "states"}),
]
TENSOR_MEDIA = [
    ("qwen3_vl", {"tp": 2}),
    ("qwen3_5", {"tp": 2}),
    ("qwen3_5_moe", {"dp_shard": 2, "tp": 2}),
]
SWITCHES: list[test_tensor.Switches] = [
    (family, options, axes)
    for family in ("llama", "qwen3_vl", "qwen3_5_moe")
    for options, axes in (
        ({"checkpointing": "full", "offload": True, "mlp_tile": 7}, {"dp_shard": 1, "ring": 2, "tp": 2}),
        ({"checkpointing": "selective", "offload": True, "mlp_tile": 5}, {"tp": 2}),
        ({"checkpointing": "full", "reduce_gradients": "once"}, {"tp": 2}),
        ({"checkpointing": "selective", "loss_chunk": 9}, {"ring": 2, "tp": 2}),
    )
]
EXPERTS: list[tuple[str, dict[str, int], int]] = [
    ("qwen3_moe", {"dp_shard": 2, "ep": 2}, 3),
    ("qwen3_moe", {"dp_shard": 4, "ep": 4}, 1),
    ("qwen3_moe", {"ring": 2, "ep": 2}, 3),
    ("qwen3_moe", {"ulysses": 2, "ep": 2}, 3),
    ("qwen3_moe", {"dp_shard": 2, "ring": 2, "ep": 2}, 3),
    ("qwen3_moe", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 3),
    ("qwen3_moe", {"dp_shard": 2, "ring": 2, "ulysses": 2, "ep": 4}, 1),
    ("qwen3_moe", {"tp": 2, "ep": 2}, 3),
    ("qwen3_moe", {"ring": 2, "tp": 2, "ep": 4}, 1),
    ("qwen3_moe", {"dp_shard": 2, "ring": 2, "tp": 2, "ep": 2}, 3),
    ("qwen3_moe", {"dp_replicate": 2, "ulysses": 2, "tp": 2, "ep": 2}, 3),
    ("qwen3_next", {"ring": 2, "ep": 2}, 1),
    ("deepseek_v3", {"ring": 2, "ep": 2}, 1),
    ("mixtral", {"ring": 2, "ep": 2}, 1),
    ("mixtral", {"dp_shard": 2, "ring": 2, "ep": 4}, 2),
    ("gpt_oss", {"ulysses": 2, "ep": 2}, 1),
    ("gpt_oss", {"dp_shard": 2, "tp": 2, "ep": 2}, 1),
    ("olmoe", {"ring": 2, "ep": 2}, 1),
    ("qwen3_5_moe", {"dp_shard": 2, "tp": 2, "ep": 2}, 1),
]
CHECKPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"checkpointing": "full", "offload": True}),
    ("qwen3_moe", {"reduce_gradients": "once"}),
    ("qwen3_moe", {"checkpointing": "full"}),
    ("qwen3_next", {"checkpointing": "selective", "reduce_gradients": "once"}),
]
STATES: list[test_tensor_state.Case] = [
    ("qwen3", {"ring": 2, "tp": 2}, [{"dp_shard": 2, "ulysses": 2}, {"ring": 2, "tp": 2}]),
    ("qwen3_5", {"dp_shard": 2, "ulysses": 2}, [{"ring": 2, "tp": 2}]),
    ("qwen3_5", {"ring": 2, "tp": 2}, [{"ring": 2, "tp": 2}]),
]


@pytest.mark.parametrize("case", TENSOR, ids=str)
def test_cut_equals_each_sample_alone(case: test_tensor.Case) -> None:
    test_tensor.test_cut_equals_each_sample_alone(case)


@pytest.mark.parametrize(("family", "mesh"), TENSOR_MEDIA, ids=str)
def test_media_are_shared_out_over_tp_as_well(family: str, mesh: dict[str, int]) -> None:
    test_tensor.test_media_are_shared_out_over_tp_as_well(family, mesh)


@pytest.mark.parametrize("case", SWITCHES, ids=str)
def test_no_switch_for_memory_changes_a_gradient(case: test_tensor.Switches) -> None:
    test_tensor.test_no_switch_for_memory_changes_a_gradient(case)


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_gradients_with_experts_over_ranks(case: tuple[str, dict[str, int], int]) -> None:
    test_experts.test_gradients_are_stocks(case)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_omni"])
def test_media_families(family: str) -> None:
    test_experts.test_media_families(family, {"dp_shard": 2, "ring": 2, "ep": 2})


@pytest.mark.parametrize(("picks", "experts"), [(1, [0]), (2, [1, 2])])
def test_some_experts_get_all_tokens_and_others_none(picks: int, experts: list[int]) -> None:
    test_experts.test_some_experts_get_all_tokens_and_others_none(picks, experts)


def test_in_float64() -> None:
    test_experts.test_in_float64("qwen3_moe", {"ring": 2, "ep": 2})


@pytest.mark.parametrize(("family", "memory"), CHECKPOINTS, ids=str)
def test_micro_batches_and_checkpoints(family: str, memory: dict[str, Any]) -> None:
    test_experts.test_micro_batches_and_checkpoints(family, memory)


@pytest.mark.parametrize("axes", [{"dp_shard": 2, "ep": 2}, {"ring": 4, "ep": 2}], ids=str)
def test_each_part_of_the_gradient_counts_once_and_is_stepped_on(axes: dict[str, int]) -> None:
    test_experts_state.test_each_part_of_the_gradient_counts_once_and_is_stepped_on(axes)


def test_what_one_mesh_saves_another_loads(tmp_path: Path) -> None:
    there = {"dp_replicate": 2, "ring": 2, "ep": 2}
    test_experts_state.test_what_one_mesh_saves_another_loads(tmp_path, there, [{}])


@pytest.mark.parametrize("case", STATES, ids=str)
def test_a_run_goes_on_from_tp_on_another_mesh_and_the_same(
    tmp_path: Path, case: test_tensor_state.Case
) -> None:
    test_tensor_state.test_a_run_goes_on_from_tp_on_another_mesh_and_the_same(tmp_path, case)


def test_adapters_are_saved_and_go_on_anywhere(tmp_path: Path) -> None:
    there, here = test_tensor_lora.SAVED
    test_tensor_lora.test_adapters_are_saved_and_go_on_anywhere(tmp_path, here[0], [there])
