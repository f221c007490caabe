"""Weights that the first rank has read are those of all ranks, tied ones and unsaved buffers too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from seqbraid import Mesh, pack, parallelize
from seqbraid.data.tiny import tiny_training_model
from seqbraid.distributed.weights import spread_weights
from seqbraid.models.parts import plain_name
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions
from tests.helpers import ranks

CPU = torch.device("cpu")


def model_of(family: str, seed: int = 0, on_meta: bool = False) -> Any:
    """The stock model, or only its shapes."""
    model = tiny_training_model(family, seed, torch.float32)[0]
    if on_meta:
        model.to("meta")
        model.tie_weights()
    return model


def differing(family: str, axes: dict[str, int]) -> list[str]:
    """On one rank: tensors that are not those of the first rank's model, and a step that is not its step."""
    mesh, source = Mesh(**axes), model_of(family)
    memory = MemoryOptions(checkpointing="full")
    spread = parallelize(model_of(family, on_meta=True), mesh, memory=memory)
    spread_weights(spread, source if mesh.rank == 0 else None, CPU)
    found = {
        plain_name(name): x.full_tensor() if isinstance(x, DTensor) else x
        for name, x in (*spread.model.named_parameters(), *spread.model.named_buffers())
    }
    wanted = dict([*source.named_parameters(), *source.named_buffers()])
    assert found.keys() == wanted.keys()
    wrong = [name for name, x in wanted.items() if not torch.equal(x, found[name])]

    own = parallelize(source, mesh, memory=memory)
    batch = pack(random_samples((30, 7, 12), 64), source.config, mesh)
    for model in (own, spread):
        model(batch).loss.backward()
    gradients = (dict(model.model.named_parameters()) for model in (own, spread))
    for name, (mine, theirs) in _pairs(*gradients).items():
        if mine.grad is None or theirs.grad is None:
            wrong += [] if mine.grad is theirs.grad else [f"the gradient of {name}"]
        elif not torch.equal(mine.grad.to_local(), theirs.grad.to_local()):
            wrong.append(f"the gradient of {name}")
    return wrong


def _pairs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    assert first.keys() == second.keys()
    return {name: (first[name], second[name]) for name in first}


@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "ring": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_omni"])  # the first has tied embeddings
def test_all_ranks_have_the_first_ranks_weights(family: str, axes: dict[str, int]) -> None:
    assert ranks.run(differing, 4, family, axes) == [[]] * 4


@pytest.mark.parametrize("axes", [{"ring": 4, "ep": 2}, {"dp_replicate": 2, "ring": 2, "ep": 2}])
def test_and_of_experts_over_ranks(axes: dict[str, int]) -> None:
    assert ranks.run(differing, 4, "qwen3_5_moe_text", axes) == [[]] * 4


def refused(case: str) -> str:
    """On one rank: what is said of weights that cannot be spread."""
    mesh = Mesh(ring=2)
    shell = parallelize(model_of("qwen3", on_meta=case != "weights"), mesh)
    source = model_of("qwen3" if case != "other model" else "llama")
    try:
        spread_weights(shell, source if case == "two sources" or mesh.rank == 0 else None, CPU)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two sources", "only the first rank"),
        ("weights", "already has weights"),
        ("other model", "do not match"),
    ],
)
def test_what_does_not_fit_is_refused_by_all(case: str, message: str) -> None:
    assert all(message in said for said in ranks.run(refused, 2, case))
