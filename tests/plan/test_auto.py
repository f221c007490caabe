"""`memory.checkpointing=auto`: the first setting whose estimate fits, with what was passed over said."""

from __future__ import annotations

import pytest
import torch

from seqbraid import MemoryOptions, Mesh, parallelize
from seqbraid.plan.auto import RESERVE, EstimateInputs, choose_checkpointing, fit
from seqbraid.plan.estimate import memory_estimate
from seqbraid.plan.pipeline import PipelineOptions
from tests.plan.test_estimate import medium

ROW = 1 << 20


def takes(memory: MemoryOptions) -> int:
    """What a step takes, by the estimate."""
    with torch.device("meta"):
        return memory_estimate(medium("llama"), Mesh(), memory, "float32", row_tokens=ROW).total


def choose(step_bytes: int, memory: MemoryOptions | None = None):  # type: ignore[no-untyped-def]
    """On a device that has just so many bytes for a step."""
    device = int(step_bytes / (1 - RESERVE)) + 1
    with torch.device("meta"):
        model = medium("llama")
    step = EstimateInputs(model, Mesh(), "float32", ROW)
    return choose_checkpointing(step, memory or MemoryOptions("auto"), device)


def test_the_first_that_fits_is_chosen_and_not_one_byte_earlier() -> None:
    none, selective, full = (takes(MemoryOptions(kind)) for kind in ("none", "selective", "full"))
    assert none > selective > full
    for size, expected in (
        (none, "none"), (none - 10, "selective"), (selective, "selective"), (selective - 10, "full"),
    ):  # fmt: skip
        found = choose(size)
        assert found.checkpointing == expected and found.advice is None
    assert str(choose(none - 10)).startswith("memory.checkpointing=auto is 'selective'")
    assert f"'none' would take {none / 2**30:.1f}" in str(choose(none - 10))


def test_where_nothing_fits_the_smallest_change_is_named() -> None:
    full = takes(MemoryOptions("full"))
    offloaded = takes(MemoryOptions("full", offload=True))
    found = choose(full - 10)
    assert found.checkpointing == "full" and found.advice == "set memory.offload=true"
    tiled = choose(offloaded - 10)
    assert tiled.advice == "set memory.offload=true and memory.mlp_tile=4096"
    assert choose(1000).advice == (
        "shorten data.row_tokens, or share the row or the parameters among more ranks"
    )


def test_offload_moves_what_checkpoints_keep_so_that_there_are_some() -> None:
    found = choose(1 << 60, MemoryOptions("auto", offload=True))
    assert found.checkpointing == "selective"


def test_a_step_is_compared_as_its_pipeline_has_it() -> None:
    with torch.device("meta"):
        model, mesh = medium("llama"), Mesh(pp=2, rank=0, world_size=2)
    found = []
    for pipeline in (PipelineOptions(stages=[1, 2]), PipelineOptions(stages=[2, 1])):
        step = EstimateInputs(model, mesh, "float32", ROW, pipeline=pipeline)
        estimate = memory_estimate(model, mesh, None, "float32", row_tokens=ROW, pipeline=pipeline)
        found.append(fit(step, MemoryOptions(), 1 << 60).estimate)
        assert found[-1] == step.estimate(MemoryOptions()).total == estimate.total
    assert found[0] != found[1]


def test_parallelize_knows_no_row_and_refuses() -> None:
    model = medium("llama")
    with pytest.raises(ValueError, match="checkpointing='auto' is chosen by seqbraid train"):
        parallelize(model, memory=MemoryOptions("auto"))
    assert model.config._attn_implementation == "sdpa"
