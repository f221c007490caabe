"""Tensor parallelism: the loss and every gradient are those of the stock model on each sample alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import seqbraid as sb
from seqbraid.comm.group import Group
from seqbraid.models.mixers import SoftmaxSizes, local_heads
from seqbraid.models.parts import ModelParts
from seqbraid.models.tensor import TensorPlan, vocabulary_rows
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import LENGTHS, random_samples
from seqbraid.ops.cross_entropy import VocabularyShard
from seqbraid.ops.linear_cross_entropy import linear_cross_entropy
from seqbraid.plan.memory import MemoryOptions
from seqbraid.verify.exchange import tensor_bytes
from seqbraid.verify.parity import rows_of
from tests.distributed.test_units import make, micro_batches, whole
from tests.helpers import ranks
from tests.models.test_media_ranks import prepared as media_references
from tests.models.test_media_ranks import verdicts as media_verdicts
from tests.models.test_parity_ranks import assert_holds

BIASES = {"attention_bias": True, "mlp_bias": True}

Case = tuple[str, dict[str, Any], dict[str, int], dict[str, Any]]

CASES: list[Case] = [
    ("llama", BIASES, {"tp": 2}, {}),
    (
        "llama",
        {"tie_word_embeddings": True, "vocab_size": 99, "num_key_value_heads": 1},
        {"tp": 4},
        {"micro_batches": 3},
    ),
    ("llama", BIASES | {"num_key_value_heads": 1}, {"dp_replicate": 2, "tp": 2}, {}),
    ("qwen3", {"num_key_value_heads": 2}, {"tp": 4}, {}),
    ("qwen3", {}, {"dp_shard": 2, "tp": 2}, {"micro_batches": 3}),
    ("gemma3", {}, {"ulysses": 2, "tp": 2}, {}),
    ("gpt_oss", {}, {"tp": 2}, {}),
    ("qwen3_moe", {}, {"ring": 2, "ulysses": 2, "tp": 2}, {}),
    ("qwen3_next", {}, {"dp_shard": 2, "tp": 2}, {}),
    ("qwen3_5", {"num_key_value_heads": 1}, {"ring": 2, "tp": 2}, {"gated_delta": "states"}),
    ("qwen3_5", {"linear_num_key_heads": 4}, {"ulysses": 2, "tp": 2}, {"gated_delta": "heads"}),
    ("qwen3_5_moe", {}, {"tp": 2}, {"micro_batches": 3}),
]
"""`shared_grid.py` has others."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cut_equals_each_sample_alone(case: Case) -> None:
    family, changes, mesh, options = case
    shares = math.prod(mesh.get(axis, 1) for axis in ("dp_replicate", "dp_shard"))
    rows = rows_of(len(LENGTHS), shares, options.get("micro_batches", 1))
    assert_holds(family, mesh, [options], LENGTHS, rows=rows, **changes)


MEDIA: list[tuple[str, dict[str, int]]] = [
    ("qwen3_vl", {"ring": 2, "tp": 2}),
    ("qwen3_vl_moe", {"ulysses": 2, "tp": 2}),
    ("qwen3_omni", {"tp": 2}),
]
"""Beside dp_shard and ep: in `test_experts.py`."""


@pytest.mark.parametrize(("family", "mesh"), MEDIA, ids=str)
def test_media_are_shared_out_over_tp_as_well(family: str, mesh: dict[str, int]) -> None:
    row = "in turn" if "dp_shard" in mesh else "mixed"
    path = media_references(family, row)
    for ((holds, worst),) in ranks.run(media_verdicts, math.prod(mesh.values()), path, family, mesh, [{}]):
        assert holds, worst


def memory_gradients(family: str, options: dict[str, Any], axes: dict[str, int]) -> dict[str, Tensor]:
    """Of three micro-batches."""
    mesh, stock = sb.Mesh(**axes), make(family)
    model = sb.parallelize(stock, mesh, memory=MemoryOptions(**options))
    batches = [sb.pack(samples, stock.config, mesh) for samples in micro_batches(family, stock.config)]
    total = sum(batch.label_tokens for batch in batches)
    for number, batch in enumerate(batches, start=1):
        with model.accumulating(last=number == len(batches)):
            model(batch, label_tokens=total).loss.backward()
    return whole(stock)


Switches = tuple[str, dict[str, Any], dict[str, int]]

SWITCHES: list[Switches] = [
    ("llama", {"checkpointing": "selective", "offload": True, "mlp_tile": 7}, {"tp": 2}),
    ("qwen3_vl", {"checkpointing": "full", "reduce_gradients": "once", "loss_chunk": 9}, {"tp": 2}),
    (
        "qwen3_5_moe",
        {"checkpointing": "full", "offload": True, "mlp_tile": 9},
        {"ring": 2, "tp": 2, "ep": 2},
    ),
]


@pytest.mark.parametrize("case", SWITCHES, ids=str)
def test_no_switch_for_memory_changes_a_gradient(case: Switches) -> None:
    family, options, axes = case
    expected = memory_gradients(family, {}, {})
    size = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    size_of_mesh = math.prod(size for axis, size in axes.items() if axis != "ep")
    for found in ranks.run(memory_gradients, size_of_mesh, family, options, axes):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-4 * size)
            assert error < 5e-5, (name, float(error))


def test_heads_of_a_rank() -> None:
    heads = SoftmaxSizes(8, 4, 16, 16)
    assert [local_heads(heads, 2, rank)[:2] for rank in (0, 1)] == [(4, 2), (4, 2)]
    assert local_heads(SoftmaxSizes(8, 2, 16, 16), 4, 3)[:2] == (2, 1)
    # 3 key heads of 4 query heads each for two ranks: the middle one goes to both.
    assert local_heads(SoftmaxSizes(12, 3, 16, 16), 2, 0)[:2] == (6, 6)


class AcrossChannels(torch.nn.Module):
    """What a rank cannot compute from its own channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


def test_what_is_no_sum_of_its_parts_is_seen_and_refused() -> None:
    model: Any = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = AcrossChannels()
    message = r"the MLP of layer 0 .* \(LlamaMLP\) does not give in 2 parts what it gives whole"
    with pytest.raises(ValueError, match=message):
        TensorPlan.of(ModelParts.of(model), 2)


def placed(family: str, changes: dict[str, Any], axes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """What a rank holds of each parameter."""
    model = sb.parallelize(tiny_model(family, **changes), sb.Mesh(**axes))
    parameters = model.model.named_parameters()
    return {name: tuple(p.to_local().shape) for name, p in parameters if isinstance(p, DTensor)}


def test_a_rank_holds_its_part_of_everything() -> None:
    """1 / (tp · fsdp) of each parameter, and no more than a row beside it."""
    for changes in ({}, {"num_key_value_heads": 1, "tie_word_embeddings": True}):
        whole = {name: p.shape for name, p in tiny_model("llama", **changes).named_parameters()}
        for found in ranks.run(placed, 4, "llama", changes, {"dp_shard": 2, "tp": 2}):
            assert found.keys() == whole.keys()
            for name, shape in whole.items():
                row = math.prod(shape[1:])
                assert math.prod(found[name]) <= math.prod(shape) / 4 + row, name


class Shapes(TorchDispatchMode):
    """The shapes of what is made on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A DTensor has the shape of the whole, and is computed by parts.
        plain = [x for x in tree_leaves(out) if type(x) is Tensor and not x.is_meta]
        self.made |= {tuple(x.shape) for x in plain}
        return out


Made = tuple[set[tuple[int, ...]], dict[str, int], list[tuple[int, ...]]]


def made_on_a_rank(axes: dict[str, int]) -> Made:
    """Shapes, bytes that are sent, and the shapes of what is kept for the backward."""
    mesh = sb.Mesh(**axes)
    model = sb.parallelize(tiny_model("qwen3", num_hidden_layers=1, intermediate_size=80), mesh)
    batch = sb.pack(random_samples([90, 30], 97), model.model.config, mesh)
    kept: dict[int, tuple[int, ...]] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = tuple(x.shape[-2:])
        return x

    with Shapes() as seen:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(batch)
        out.loss.backward()
    return seen.made, dict(model.groups["tp"].sent) if model.groups else {}, list(kept.values())


def test_no_rank_has_logits_or_channels_of_the_whole_model() -> None:
    (alone, _, kept_alone), *_ = ranks.run(made_on_a_rank, 1, {})
    assert any(97 in shape for shape in alone) and any(80 in shape for shape in alone)
    for made, sent, kept in ranks.run(made_on_a_rank, 2, {"tp": 2}):
        # Norms and residuals keep a rank's own tokens. The two inputs of projections are gathered, and the
        # loss keeps its gradient of all.
        assert kept.count((120, 32)) == 3
        assert 3 < kept.count((60, 32)) <= kept_alone.count((120, 32)) - 2
        assert not [shape for shape in made if 97 in shape], "logits of the whole vocabulary"
        assert not [shape for shape in made if 80 in shape and len(shape) > 1], "channels of the whole MLP"
        # 120 tokens of width 32 in float32: in a layer, and as embeddings and in front of the head.
        layer = tensor_bytes(120, 32, 4, tp=2)
        assert sent == {"tp": layer + layer // 2, "tp gradient": layer + layer // 2}


def refused() -> None:
    sb.parallelize(tiny_model("qwen3"), sb.Mesh(tp=3))


def packed_for_another_mesh() -> None:
    model = sb.parallelize(tiny_model("qwen3"), sb.Mesh(tp=2))
    model(sb.pack(random_samples([9], 97), model.model.config, sb.Mesh(ring=2)))


@pytest.mark.parametrize(
    ("function", "size", "message"),
    [
        (refused, 3, "tp=3 does not divide the 8 query heads"),
        (packed_for_another_mesh, 2, "pass the model's mesh to pack"),
    ],
)
def test_refused_on_every_rank(function: Any, size: int, message: str) -> None:
    for error in ranks.errors(function, size):
        assert error.kind == "ValueError" and message in error.message


def sharded_sums(tied_logits: bool) -> list[Tensor]:
    """On a rank: loss, correct tokens, and gradients of a part of the vocabulary."""
    mesh = sb.Mesh(tp=3)
    mesh.cpu_group  # noqa: B018  # joins the job
    group = Group.of(mesh.process_group("tp"))
    hidden, weight, bias, targets = problem(tied_logits)
    rows = vocabulary_rows(len(weight), 3, group.rank)
    own = [x[rows].detach().requires_grad_() for x in (weight, bias)]
    shard = VocabularyShard(
        rows.start, vocabulary_rows(len(weight), 3, 0).stop, group.maximum, group.all_reduce
    )
    loss, correct = linear_cross_entropy(hidden, own[0], targets, own[1], chunk_tokens=7, shard=shard)
    loss.backward()
    assert hidden.grad is not None
    return [
        loss.detach(),
        correct,
        group.all_reduce(hidden.grad),
        *(x.grad for x in own if x.grad is not None),
    ]


def problem(tied_logits: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(40, 6, dtype=torch.float64, generator=random)
    weight, bias = torch.randn(11, 6, dtype=torch.float64, generator=random), torch.zeros(11).double()
    if tied_logits:  # of the largest logits, which lie on several ranks, the first counts
        hidden, weight = torch.ones_like(hidden), torch.zeros_like(weight)
        weight[[3, 4, 9]] = 1.0
    targets = torch.randint(0, 11, (40,), generator=random)
    targets[::5] = -100
    return hidden.requires_grad_(), weight, bias, targets


@pytest.mark.parametrize("tied_logits", [False, True])
def test_loss_over_parts_of_the_vocabulary(tied_logits: bool) -> None:
    hidden, weight, bias, targets = problem(tied_logits)
    weight.requires_grad_()
    bias.requires_grad_()
    logits = F.linear(hidden, weight, bias)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    found = ranks.run(sharded_sums, 3, tied_logits)
    for of_rank in found:
        torch.testing.assert_close(of_rank[0], loss.detach())
        assert int(of_rank[1]) == int((logits.argmax(1) == targets).sum()) > 0
        torch.testing.assert_close(of_rank[2], hidden.grad)
    torch.testing.assert_close(torch.cat([of_rank[3] for of_rank in found]), weight.grad)
    torch.testing.assert_close(torch.cat([of_rank[4] for of_rank in found]), bias.grad)


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        ("qwen3", {}, 3, "tp=3 does not divide the 8 query heads of layer 0 .* use one of 1, 2, 4, 8"),
        ("qwen3_5", {}, 4, "tp=4 does not divide the 2 key heads of gated delta .* use one of 1, 2"),
        ("llama", {"intermediate_size": 50}, 4, "does not divide the 50 channels of the MLP"),
        ("llama", {"vocab_size": 9}, 8, "too large for the 9 tokens of the vocabulary"),
        ("deepseek_v3", {}, 2, "has no q_proj, k_proj, v_proj of its own .* use tp=1"),
        ("gpt2", {}, 2, "embeddings beside that of its tokens"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(
    family: str, changes: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TensorPlan.of(ModelParts.of(tiny_model(family, **changes)), size)
