"""Defects that only several ranks can have: each is caught, and without it the same check holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.verify.mutants import RANK_MUTANTS, stale_context
from seqbraid.verify.parity import check_parity
from seqbraid.verify.tensor_mutants import TENSOR_MUTANTS
from seqbraid.verify.verdict import ALLOWANCE, Parity
from tests.helpers import ranks
from tests.models.test_parity_ranks import load, prepared

REFUSED = {"sliced twice": "is it sharded already", "tie lost": "the parameter 'lm_head.weight' was absent"}
"""Defects that a step sees before it sends anything, and what it says of them."""

LENGTHS = (1, 63, 130, 257, 40)


def caught(path: str, name: str) -> Any:
    """On one rank: what the check says with the defect (the ratio, or a refusal), and without it."""
    (mutant,) = (m for m in (*RANK_MUTANTS, *TENSOR_MUTANTS) if m.name == name)
    mesh = Mesh(**mutant.mesh)
    stock = load(path)

    def check() -> Parity:
        # One rank of a row has the sequences whole, which windows want.
        policy = "zigzag" if mesh.sequence_size > 1 else "balanced"
        return check_parity(stock.model(), stock.samples, mesh, policy=policy, references=stock.references)

    with mutant.switched_on():
        try:
            mutated: Any = check().worst.ratio
        except ValueError as error:
            mutated = str(error)
    return mutated, check().holds


@pytest.mark.parametrize("mutant", (*RANK_MUTANTS, *TENSOR_MUTANTS), ids=lambda mutant: mutant.name)
def test_rank_mutant_is_caught(mutant: Any) -> None:
    path = prepared(mutant.check, LENGTHS)
    for mutated, healthy in ranks.run(caught, mutant.world_size, path, mutant.name):
        assert healthy
        if mutant.name in REFUSED:
            assert REFUSED[mutant.name] in mutated
        else:
            assert mutated > 10 * ALLOWANCE


def gradient_with_evaluation_between() -> torch.Tensor:
    stock = tiny_model("llama")
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    model = sb.parallelize(stock, Mesh(rank=0, world_size=1))
    batch, other = (
        sb.pack(random_samples(n, 97), stock.config, model.mesh) for n in ((40, 70, 3), (100, 13))
    )
    out = model(batch)
    with torch.no_grad():
        model(other)
    out.loss.backward()
    return torch.cat([p.grad.flatten() for p in stock.parameters()])


def test_a_stale_context_in_recomputation_is_caught() -> None:
    right = gradient_with_evaluation_between()
    with stale_context():
        wrong = gradient_with_evaluation_between()
    assert (wrong - right).norm() > 1e-2 * right.norm()
    assert torch.equal(gradient_with_evaluation_between(), right)
