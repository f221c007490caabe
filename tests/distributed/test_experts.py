"""Experts over ranks: loss and every gradient are those of the stock model in one process."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from seqbraid import Mesh, pack, parallelize
from seqbraid.models.output import ExpertLoad
from seqbraid.models.step import forward_backward
from seqbraid.models.tiny.decoders import FAMILIES, tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.memory import MemoryOptions
from seqbraid.verify.mutants import padding_routed_to_experts
from seqbraid.verify.parity import check_parity, packed_step, rows_of, stock_references
from seqbraid.verify.reference import stock_step
from seqbraid.verify.wide import float32_is_float64, in_float64
from tests.helpers import ranks
from tests.helpers.references import stored
from tests.models.test_media_ranks import prepared as media_references
from tests.models.test_media_ranks import verdicts as media_verdicts
from tests.models.tiny_types import tiny_type_model

LENGTHS = (30, 64, 5, 1, 2, 100, 17, 40)


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    if family not in FAMILIES:
        return tiny_type_model(family, dtype, **changes)
    return tiny_model(family, dtype=dtype, **changes)


def references(family: str, rows: list[list[int]]) -> str:
    """What stock makes of a case."""

    def make() -> Any:
        samples = random_samples(LENGTHS, 97, seed=3, ignored="some")
        return samples, stock_references(build(family), samples, rows)

    return stored(make, family, LENGTHS, rows)


def verdict(path: str, family: str, mesh: dict[str, int], micro_batches: int) -> tuple[bool, str]:
    samples, found = torch.load(path, weights_only=False)
    model, ours = build(family), Mesh(**mesh)
    parity = check_parity(model, samples, ours, references=found, micro_batches=micro_batches)
    return parity.holds, parity.reason


def size_of(mesh: dict[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis != "ep")


def assert_holds(family: str, mesh: dict[str, int], micro_batches: int = 1) -> None:
    data = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    # The loss of routers is that of a row.
    path = references(family, rows_of(len(LENGTHS), data, micro_batches))
    for holds, reason in ranks.run(verdict, size_of(mesh), path, family, mesh, micro_batches):
        assert holds, (mesh, reason)


CASES: list[tuple[str, dict[str, int], int]] = [
    ("qwen3_moe", {"dp_shard": 4, "ep": 2}, 3),
    ("qwen3_moe", {"ring": 2, "ulysses": 2, "ep": 4}, 1),
    ("qwen3_moe", {"dp_replicate": 2, "tp": 2, "ep": 2}, 3),
    ("qwen3_next", {"dp_shard": 2, "tp": 2, "ep": 2}, 1),
    ("qwen3_5_moe", {"ring": 2, "ep": 2}, 1),
    ("deepseek_v3", {"dp_shard": 2, "ring": 2, "ep": 4}, 2),  # an expert on each rank
    ("mixtral", {"dp_shard": 2, "tp": 2, "ep": 2}, 1),
    ("gpt_oss", {"tp": 2, "ep": 2}, 1),
    ("olmoe", {"ulysses": 2, "ep": 2}, 1),
]
"""With so many micro-batches; `shared_grid.py` has others."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_stocks(case: tuple[str, dict[str, int], int]) -> None:
    assert_holds(*case)


MEDIA: list[tuple[str, dict[str, int]]] = [
    ("qwen3_vl_moe", {"ulysses": 2, "ep": 2}),
    ("qwen3_5_moe", {"dp_shard": 2, "tp": 2, "ep": 2}),
    ("qwen3_omni", {"ring": 2, "ep": 2}),
]


@pytest.mark.parametrize(("family", "mesh"), MEDIA, ids=str)
def test_media_families(family: str, mesh: dict[str, int]) -> None:
    path = media_references(family, "in turn" if "dp_shard" in mesh else "mixed")
    for ((holds, worst),) in ranks.run(media_verdicts, size_of(mesh), path, family, mesh, [{}]):
        assert holds, worst


def chosen(picks: int, experts: list[int]) -> tuple[bool, str]:
    """All tokens to these experts, which the biases of the router's choice decide."""
    model = tiny_model("deepseek_v3", num_experts_per_tok=picks)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.zero_()[experts] = 100.0
    mesh = Mesh(ring=2, ep=2)
    parity = check_parity(model, random_samples(LENGTHS, 97), mesh)
    return parity.holds, parity.reason


@pytest.mark.parametrize(("picks", "experts"), [(1, [3]), (2, [0, 1])])
def test_some_experts_get_all_tokens_and_others_none(picks: int, experts: list[int]) -> None:
    for holds, reason in ranks.run(chosen, 2, picks, experts):
        assert holds, reason


def alone_verdict() -> tuple[bool, str, int]:
    mesh, samples = Mesh(dp_shard=2, ring=2, ep=4), random_samples([1, 40], 97)
    model = tiny_model("qwen3_moe")
    batch = pack(samples[mesh.data_rank : mesh.data_rank + 1], model.config, mesh, policy="zigzag")
    parity = check_parity(model, samples, mesh, policy="zigzag")
    return parity.holds, parity.reason, int(batch.real.sum())


def test_a_rank_without_tokens() -> None:
    found = ranks.run(alone_verdict, 4)
    assert [count for *_, count in found] == [1, 0, 20, 20]
    for holds, reason, _ in found:
        assert holds, reason


def in_wide(family: str, axes: dict[str, int]) -> float:
    """In float64: how far the worst gradient is from the stock model's."""
    model, samples, mesh = in_float64(tiny_model(family)), random_samples(LENGTHS, 97), Mesh(**axes)
    with float32_is_float64(model):
        expected = stock_step(model, samples, rows=rows_of(len(samples), mesh.data_world_size))
        own = [samples[i] for i in range(mesh.data_rank, len(samples), mesh.data_world_size)]
        found = packed_step(copy.deepcopy(model), own, mesh)
    errors = [float((found.gradients[name] - g).norm() / g.norm()) for name, g in expected.gradients.items()]
    assert len(errors) > 10
    return max(errors)


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("qwen3_moe", {"dp_shard": 2, "ep": 2}),
        ("qwen3_moe", {"ring": 2, "tp": 2, "ep": 4}),
        ("llama", {"tp": 2}),
        ("gemma3", {"tp": 2}),
    ],
    ids=str,
)
def test_in_float64(family: str, axes: dict[str, int]) -> None:
    assert max(ranks.run(in_wide, size_of(axes), family, axes)) < 1e-10


def router_loss(axes: dict[str, int]) -> float:
    """Of one row, which all data ranks have alike."""
    mesh, model = Mesh(**axes), tiny_model("qwen3_moe", output_router_logits=True)
    batch = pack(random_samples(LENGTHS, 97), model.config, mesh)
    out = parallelize(model, mesh)(batch)
    assert out.aux_loss is not None
    return float(out.aux_loss)


def test_the_routers_loss_is_stocks_on_the_same_tokens() -> None:
    model: Any = tiny_model("qwen3_moe")
    each = [
        model(input_ids=sample["input_ids"][None], output_router_logits=True).router_logits
        for sample in random_samples(LENGTHS, 97)
    ]
    whole = tuple(torch.cat(of_layer) for of_layer in zip(*each, strict=True))
    stock = sys.modules[type(model).__module__].load_balancing_loss_func
    wanted = float(stock(whole, model.config.num_experts, model.config.num_experts_per_tok))
    for axes in ({"tp": 2, "ep": 2}, {"dp_shard": 2, "ring": 2, "ep": 4}):
        for found in ranks.run(router_loss, size_of(axes), axes):
            assert found == pytest.approx(wanted, rel=1e-6), axes


class Gathers(TorchDispatchMode):
    """Counts the elements that all-gathers bring."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d._allgather_base" in str(func):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def step_of(family: str, axes: dict[str, int], memory: dict[str, Any]) -> Any:
    """On a rank: gradients of two micro-batches, and how often experts were gathered in the second."""
    mesh, stock = Mesh(**axes), tiny_model(family)
    model = parallelize(stock, mesh, memory=MemoryOptions(**memory))
    batches = [pack(random_samples(n, 97), stock.config, mesh, multiple_of=16) for n in ((30, 7), (50, 5))]
    total = sum(batch.label_tokens for batch in batches)
    for number, batch in enumerate(batches):
        with Gathers() as found, model.accumulating(last=number == 1):
            model(batch, label_tokens=total).loss.backward()
    experts = stock.model.layers[0].mlp.experts
    every = sum(p.numel() for p in experts.parameters())
    own = every // mesh.ep
    assert mesh.ep == 1 or every not in found.sizes, "all experts of a layer are on no rank"
    gradients = {name: p.grad for name, p in stock.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return whole, found.sizes.count(own)


CHECKPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"checkpointing": "selective", "reduce_gradients": "once"}),
    ("qwen3_next", {"checkpointing": "full", "offload": True}),  # has a shared expert
]


@pytest.mark.parametrize(("family", "memory"), CHECKPOINTS, ids=str)
def test_micro_batches_and_checkpoints(family: str, memory: dict[str, Any]) -> None:
    expected, _ = step_of(family, {}, {})
    layers = len(tiny_model(family).model.layers)
    for found, count in ranks.run(step_of, 4, family, {"dp_shard": 1, "ring": 4, "ep": 2}, memory):
        # The last layer's stay from its forward to its backward.
        assert count == 2 * layers - 1, count
        for name, gradient in expected.items():
            error = float((found[name] - gradient).norm() / gradient.norm())
            assert error < 2e-5, (name, error)


def in_16_bits(axes: dict[str, int]) -> dict[str, torch.Tensor]:
    mesh, stock = Mesh(**axes), tiny_model("qwen3_moe")
    model = parallelize(stock, mesh, compute_dtype=torch.bfloat16)
    model(pack(random_samples(LENGTHS, 97), stock.config, mesh)).loss.backward()
    gradients = {name: p.grad for name, p in stock.named_parameters()}
    return {name: g.full_tensor() for name, g in gradients.items() if isinstance(g, DTensor)}


def test_compute_in_bfloat16_with_gradients_in_float32() -> None:
    """A token that rounding sends to another expert changes a gradient by more than its rounding."""
    expected, *_ = ranks.run(in_16_bits, 2, {"ring": 2})
    for found in ranks.run(in_16_bits, 2, {"ring": 2, "ep": 2}):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert found[name].dtype == torch.float32
            assert (found[name] - gradient).norm() < 0.05 * gradient.norm(), name


def loads(axes: dict[str, int]) -> Any:
    mesh = Mesh(**axes)
    model = parallelize(tiny_model("qwen3_moe"), mesh, memory=MemoryOptions(checkpointing="full"))
    samples = random_samples(LENGTHS, 97)[mesh.data_rank :: mesh.data_world_size]
    rows = (samples[:2], samples[2:])
    batches = [pack(row, model.model.config, mesh, multiple_of=16) for row in rows]
    out = forward_backward(model, batches)
    assert out.expert_load is not None
    return out.expert_load.picks_NE, out.expert_load.left_N, out.expert_load.summary()


def test_the_load_of_experts_is_that_of_all_ranks() -> None:
    """Two micro-batches; padding is no load, and computing again counts nothing twice."""
    expected, none, summary = loads({})
    assert expected.sum(1).tolist() == [2 * sum(LENGTHS)] * 2 and none.tolist() == [0, 0]
    assert summary["expert_tokens_sent"] == 0 and 1 < summary["expert_load_max"] <= 2
    for found, left, of_ranks in ranks.run(loads, 4, {"dp_shard": 2, "ring": 2, "ep": 2}):
        assert torch.equal(found, expected)
        assert (left > 0.2 * found.sum(1)).all() and (left < 0.8 * found.sum(1)).all()
        assert of_ranks["expert_load_max"] == summary["expert_load_max"]
        assert of_ranks["expert_tokens_sent"] == pytest.approx(float(left.sum() / found.sum()))


def routed_padding(axes: dict[str, int]) -> Any:
    with padding_routed_to_experts():
        return loads(axes)


def test_padding_that_is_routed_is_seen_in_the_load() -> None:
    wanted = [2 * sum(LENGTHS)] * 2
    for picks, *_ in ranks.run(routed_padding, 2, {"ring": 2, "ep": 2}):
        assert picks.sum(1).tolist() > wanted


def test_a_router_that_collapses_is_seen() -> None:
    found = ExpertLoad(torch.tensor([[4.0, 4, 4, 4], [16, 0, 0, 0]]), torch.tensor([8.0, 0])).summary()
    assert found == {"expert_load_max": 4, "experts_unused": 3 / 8, "expert_tokens_sent": 0.25}
