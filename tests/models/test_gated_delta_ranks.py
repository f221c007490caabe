"""Hybrids of gated-delta and softmax layers, split over ranks by either exchange, equal the stock model on
each sample alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid import Mesh, SequenceLayout
from seqbraid.models.batch import PackedBatch
from seqbraid.models.braided import BraidedModel
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import LENGTHS, random_samples
from seqbraid.verify.parity import compare
from seqbraid.verify.reference import Measurement
from tests.helpers import ranks
from tests.models.test_parity_ranks import assert_holds, load, prepared

FAMILIES = ["qwen3_5", "qwen3_next", "qwen3_5_moe"]
METHODS = ("states", "heads")
CASES = [(family, 2, 2) for family in FAMILIES]
CASES += [("qwen3_next", 2, 1), ("qwen3_5_moe", 1, 2), ("qwen3_5", 4, 1)]
"""Family, ring and ulysses; `ranks_grid.py` has the others."""

EIGHT = [("qwen3_next", "states", 4), ("qwen3_5_moe", "heads", 8)]
"""Family, exchange and number of key heads, on eight ranks."""

RAGGED = (*LENGTHS, 300)


def heads(num_key: int, num_value: int) -> dict[str, int]:
    """Three gated-delta layers with these heads to one softmax layer with 16 query and 2 KV heads."""
    softmax = {"num_attention_heads": 16, "num_key_value_heads": 2}
    return softmax | {"linear_num_key_heads": num_key, "linear_num_value_heads": num_value}


def cases_of(methods: tuple[str, ...], policies: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"gated_delta": method, "policy": policy} for method in methods for policy in policies]


@pytest.mark.parametrize(("family", "ring", "ulysses"), CASES)
def test_split_equals_each_sample_alone(family: str, ring: int, ulysses: int) -> None:
    policies = ("zigzag", "balanced", *(["contiguous"] if ring == 1 else []))
    mesh = {"ring": ring, "ulysses": ulysses}
    assert_holds(family, mesh, cases_of(METHODS, policies), RAGGED, **heads(4, 8))


@pytest.mark.parametrize(("family", "method", "num_key"), EIGHT)
def test_split_over_eight_ranks(family: str, method: str, num_key: int) -> None:
    cases = cases_of((method,), ("zigzag", "balanced"))
    assert_holds(family, {"ring": 4, "ulysses": 2}, cases, RAGGED, **heads(num_key, 8))


@pytest.mark.parametrize("num_key", [1])
def test_states_take_fewer_key_heads_than_ranks(num_key: int) -> None:
    cases = cases_of(("states", "auto"), ("zigzag",))
    assert_holds("qwen3_5", {"ring": 4, "ulysses": 2}, cases, RAGGED, **heads(num_key, 2))


@pytest.mark.parametrize(
    "cases", [[{"gated_delta": "states", "micro_batches": 2}, {"gated_delta": "heads"}]], ids=str
)
def test_data_ranks_beside_the_ring(cases: list[dict[str, Any]]) -> None:
    mesh = {"dp_shard": 2, "ring": 2}
    assert_holds("qwen3_5", mesh, cases, (*RAGGED, 40, 2), "whole", **heads(4, 8))


def sequences_of(layout: SequenceLayout, rank: int) -> set[int]:
    return {segment.sequence for segment in layout.segments(rank)}


def test_ranks_with_nothing_but_padding() -> None:
    """Three tokens on four ranks: the last one talks all the same."""
    layout = SequenceLayout((3,), ring=4, policy="zigzag")
    assert [len(sequences_of(layout, rank)) for rank in range(4)] == [1, 1, 1, 0]
    cases = cases_of(METHODS, ("zigzag",))
    assert_holds("qwen3_5", {"ring": 4}, cases, (3,), "none", **heads(4, 8))


def test_ranks_with_nothing_but_whole_sequences() -> None:
    """Two ranks share the long sequence; the others have no part in it but their heads."""
    lengths = (260, 130, 130)
    layout = SequenceLayout(lengths, ring=2, ulysses=2, policy="balanced")
    assert sorted(map(sorted, (sequences_of(layout, rank) for rank in range(4)))) == [[0], [0], [1], [2]]
    cases = cases_of(METHODS, ("balanced",))
    assert_holds("qwen3_5", {"ring": 2, "ulysses": 2}, cases, lengths, **heads(4, 8))


def full_gradients(model: BraidedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.model.named_parameters()}  # type: ignore[union-attr,operator]


def recomputed(path: str, methods: tuple[str, ...]) -> list[Any]:
    """On one rank: checkpointed layers, and another batch between a forward and its backward."""
    case, mesh = load(path), Mesh(ring=2, ulysses=2)
    found = []
    for method in methods:
        stock = case.model()
        stock.gradient_checkpointing_enable({"use_reentrant": False})
        model = sb.parallelize(stock, mesh, gated_delta=method)
        batch = sb.pack(case.samples, stock.config, mesh)
        other = sb.pack(random_samples((9, 150), 97), stock.config, mesh, policy="zigzag")
        out = model(batch)
        logits = model.logits(other)
        out.loss.backward()
        # Gradients first: a forward leaves the outermost parameters gathered.
        gradients = full_gradients(model)
        got = Measurement(out.mean_loss, model.logits(batch), gradients)
        parity = compare(method, got, case.references[0], case.references[1:])
        found.append((parity.holds, parity.worst, [len(x) for x in logits]))
    return found


def test_recomputed_layers_keep_their_batch() -> None:
    path = prepared("qwen3_5", RAGGED, **heads(4, 8))
    for per_rank in ranks.run(recomputed, 4, path, METHODS):
        for holds, worst, lengths in per_rank:
            assert holds and lengths == [9, 150], worst


def exchanges(gated_delta: str, lengths: tuple[int, ...]) -> set[str]:
    """On one rank: what its gated-delta layers sent in a forward, by name."""
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("qwen3_5"), mesh, gated_delta=gated_delta)
    batch: PackedBatch = sb.pack(random_samples(lengths, 97), model.model.config, mesh, policy="zigzag")
    with torch.no_grad():
        model(batch)
    return {name for name, count in model.groups["sequence"].sent.items() if count}


def test_the_exchange_asked_for_is_taken() -> None:
    """Per layer 400 tokens take 2 KiB of states or 41 KiB of heads, 16 tokens 2 KiB or 1.7 KiB."""
    states, by_heads = {"gated delta states", "gated delta halo"}, {"gated delta heads"}
    for method, length, expected in (
        ("states", 16, states),
        ("heads", 400, by_heads),
        ("auto", 400, states),
        ("auto", 16, by_heads),
    ):
        assert ranks.run(exchanges, 2, method, (length,)) == [expected] * 2


def test_models_without_gated_delta_layers_take_any_choice() -> None:
    for method in ("auto", *METHODS):
        model = sb.parallelize(tiny_model("llama"), Mesh(rank=0, world_size=1), gated_delta=method)
        model(sb.pack(random_samples((9, 5), 97), model.model.config, model.mesh)).loss.backward()
