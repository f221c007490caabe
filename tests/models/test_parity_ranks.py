"""Split over ranks equals the stock model on each sample alone, through the public surface."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from seqbraid import Mesh
from seqbraid.layout import row_to_dense, samples_from_dense
from seqbraid.models.tiny.decoders import tiny_config, tiny_model
from seqbraid.models.tiny.samples import LENGTHS, random_samples
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from seqbraid.verify.reference import Measurement
from tests.helpers import ranks
from tests.helpers.references import stored

CASES = [("llama", 1, 2), ("llama", 2, 2), ("llama", 4, 2), ("qwen3", 4, 1), ("qwen3", 1, 4)]
CASES += [("qwen3_moe", 2, 1), ("qwen3_moe", 2, 2), ("qwen3_moe", 2, 4)]
"""Family, ring and ulysses; `ranks_grid.py` has the others."""

LONG = (*LENGTHS, 1000)


class Prepared(NamedTuple):
    """A model, as it is built, its samples, and what stock makes of them."""

    family: str
    changes: dict[str, Any]
    samples: list[dict[str, Any]]
    references: list[Measurement]

    def model(self) -> PreTrainedModel:
        return tiny_model(self.family, **self.changes)


def prepared(
    family: str,
    lengths: tuple[int, ...],
    ignored: str = "some",
    rows: list[list[int]] | None = None,
    **changes: Any,
) -> str:
    """The stock measurements of a case. Where routers have no loss, it is all the same which samples share a
    row.
    """
    if not getattr(tiny_config(family, **changes), "output_router_logits", False):
        rows = None

    def make() -> tuple[Any, ...]:
        samples = random_samples(lengths, 97, seed=3, ignored=ignored)
        references = stock_references(tiny_model(family, **changes), samples, rows)
        return tuple(Prepared(family, changes, samples, references))

    return stored(make, family, lengths, ignored, rows, sorted(changes.items()))


def load(path: str) -> Prepared:
    return Prepared(*torch.load(path, weights_only=False))


def verdicts(path: str, mesh: dict[str, int], cases: list[dict[str, Any]]) -> list[Any]:
    """On one rank: whether each case holds, and its worst quantity."""
    stock, ours = load(path), Mesh(**mesh)
    found = []
    for case in cases:
        parity = check_parity(stock.model(), stock.samples, ours, references=stock.references, **case)
        found.append((parity.holds, parity.worst))
    return found


def assert_holds(
    family: str,
    mesh: dict[str, int],
    cases: list[dict[str, Any]],
    lengths: tuple[int, ...],
    ignored: str = "some",
    rows: list[list[int]] | None = None,
    **changes: Any,
) -> None:
    path = prepared(family, lengths, ignored, rows, **changes)
    world_size = math.prod(size for axis, size in mesh.items() if axis != "ep")
    for per_rank in ranks.run(verdicts, world_size, path, mesh, cases):
        for case, (holds, worst) in zip(cases, per_rank, strict=True):
            assert holds, (case, worst)


def dense(family: str, ring: int, ulysses: int) -> Any:
    lengths = (40, 7, 64, 1, 33)
    ids = torch.randint(1, 97, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    batch = row_to_dense(ids, lengths, fill=0, side="left")
    parity = check_parity(
        tiny_model(family), samples_from_dense(batch, (batch > 0).int()), Mesh(ring=ring, ulysses=ulysses)
    )
    return parity.holds, parity.worst


@pytest.mark.parametrize(("family", "ring", "ulysses"), CASES)
def test_split_equals_each_sample_alone(family: str, ring: int, ulysses: int) -> None:
    names = ["zigzag", "balanced"] + (["contiguous"] if ring == 1 else [])
    cases = [{"policy": name} for name in names]
    assert_holds(family, {"ring": ring, "ulysses": ulysses}, cases, LONG)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_a_dense_batch(ring: int, ulysses: int) -> None:
    for holds, worst in ranks.run(dense, ring * ulysses, "llama", ring, ulysses):
        assert holds, worst


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_windows_and_sinks_under_ulysses(family: str) -> None:
    assert_holds(family, {"ulysses": 2}, [{"policy": "balanced"}, {"policy": "zigzag"}], LENGTHS)


@pytest.mark.parametrize(("family", "micro_batches"), [("llama", 1), ("qwen3_moe", 3)])
def test_data_ranks_and_accumulation(family: str, micro_batches: int) -> None:
    """2 × 2 × 2 ranks; micro-batches of different label counts, some without a label on some ranks; the loss
    of routers is that of the stock model on each row.
    """
    mesh = {"dp_shard": 2, "ring": 2, "ulysses": 2}
    lengths = (30, 64, 5, 1, 1, 2, 100, 17, 40, 64, 3, 130)
    rows = rows_of(len(lengths), 2, micro_batches) if family == "qwen3_moe" else None
    assert_holds(family, mesh, [{"micro_batches": micro_batches}], lengths, "whole", rows)


def test_replicas_of_shards() -> None:
    assert_holds("qwen3_5", {"dp_replicate": 2, "dp_shard": 2}, [{}], LENGTHS, num_key_value_heads=1)
