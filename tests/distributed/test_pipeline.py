"""Pipeline stages: the loss and every gradient are those of the stock model on each sample alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import seqbraid as sb
from seqbraid.distributed.gradients import clip_grad_norm_
from seqbraid.distributed.pipeline import num_chunks
from seqbraid.models.parts import ModelParts
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import mixed_samples, tiny_media_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.plan.pipeline import PipelineOptions, cut_into_stages
from seqbraid.verify.exchange import stage_bytes
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from seqbraid.verify.pipeline_mutants import PIPELINE_MUTANTS
from seqbraid.verify.verdict import ALLOWANCE
from tests.helpers import ranks
from tests.helpers.references import stored
from tests.models.test_parity_ranks import assert_holds, load, prepared
from tests.models.test_refusals import build

LENGTHS = (30, 64, 5, 1, 1, 1, 100, 17, 40, 64, 3, 130)
"""Cut into 4 or 7 rows, of which one is of single tokens: it has no label."""

INTERLEAVED = PipelineOptions("interleaved")
FOUR = {"num_hidden_layers": 4}

Case = tuple[str, dict[str, int], dict[str, Any]]

CASES: list[Case] = [
    ("qwen3", {"pp": 2}, {"micro_batches": 7, "pipeline": INTERLEAVED}),
    ("qwen3", {"pp": 4}, {"micro_batches": 7}),
    ("qwen3", {"pp": 2, "tp": 2}, {"micro_batches": 4}),
    ("qwen3_moe", {"pp": 2, "ring": 2}, {"micro_batches": 4, "pipeline": INTERLEAVED}),
    ("qwen3_moe", {"pp": 2, "dp_shard": 2, "ring": 2, "ep": 2}, {"micro_batches": 4}),
    ("qwen3_5", {"pp": 2, "ulysses": 2}, {"micro_batches": 4}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_equal_each_sample_alone(case: Case) -> None:
    family, mesh, options = case
    data = mesh.get("dp_shard", 1)
    rows = rows_of(len(LENGTHS), data, options["micro_batches"])
    assert len(rows) == data * options["micro_batches"]
    assert any(all(LENGTHS[i] == 1 for i in row) for row in rows), "a micro-batch without a label"
    assert_holds(family, mesh, [options], LENGTHS, "whole", rows, **FOUR)


@pytest.mark.parametrize(("dense", "stages"), [([0], [1, 3]), ([2, 3], [2, 2])])
def test_a_stage_without_experts_beside_one_with(dense: list[int], stages: list[int]) -> None:
    """As the first dense layers of DeepSeek-V3 may be alone on theirs; stages as the user says."""
    options = {"micro_batches": 4, "pipeline": PipelineOptions(stages=stages)}
    rows = rows_of(len(LENGTHS), 1, 4)
    changes = FOUR | {"mlp_only_layers": dense}
    assert_holds("qwen3_moe", {"pp": 2}, [options], LENGTHS, "whole", rows, **changes)


def media_verdict(path: str, family: str, mesh: dict[str, int], micro_batches: int) -> Any:
    samples, references = torch.load(path, weights_only=False)
    model = tiny_media_model(family)
    parity = check_parity(model, samples, sb.Mesh(**mesh), references=references, micro_batches=micro_batches)
    return parity.holds, parity.worst


def media_references(family: str, micro_batches: int) -> str:
    def make() -> Any:
        model = tiny_media_model(family)
        samples = mixed_samples(model.config)
        return samples, stock_references(model, samples, rows_of(len(samples), 1, micro_batches))

    return stored(make, family, "mixed", micro_batches)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [("qwen3_vl", {"pp": 2}), ("qwen3_5", {"pp": 2, "ring": 2}), ("qwen3_omni", {"pp": 2})],
    ids=str,
)
def test_media_on_the_first_stage(family: str, mesh: dict[str, int]) -> None:
    path = media_references(family, 4)
    for holds, worst in ranks.run(media_verdict, math.prod(mesh.values()), path, family, mesh, 4):
        assert holds, worst


def mutated(path: str, name: str) -> Any:
    (mutant,) = (m for m in PIPELINE_MUTANTS if m.name == name)
    with mutant.switched_on():
        if mutant.check == "qwen3_vl":
            return media_verdict(path, mutant.check, mutant.mesh, 4)[1].ratio
        stock = load(path)
        mesh = sb.Mesh(**mutant.mesh)
        found = check_parity(stock.model(), stock.samples, mesh, references=stock.references, micro_batches=4)
        return found.worst.ratio


@pytest.mark.parametrize("mutant", PIPELINE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_of_stages_is_caught(mutant: Any) -> None:
    """The same cases hold without it, above."""
    if mutant.check == "qwen3_vl":
        path = media_references(mutant.check, 4)
    else:
        path = prepared(mutant.check, LENGTHS, "whole", rows_of(len(LENGTHS), 1, 4), **FOUR)
    for ratio in ranks.run(mutated, 2, path, mutant.name):
        assert ratio > 10 * ALLOWANCE


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def own_loops(mesh: dict[str, int]) -> dict[str, Any]:
    """What a loop of one's own sees: two steps whose gradients add up, an evaluation, logits, the norm."""
    model = sb.parallelize(tiny_model("qwen3_moe", tie_word_embeddings=True, **FOUR), sb.Mesh(**mesh))
    rows = [random_samples(lengths, 97, seed=i) for i, lengths in enumerate([(9, 30), (17,), (40, 3)])]
    batches = [sb.pack(row, model.model.config, model.mesh) for row in rows]
    done: list[int] = []
    outs = [
        sb.forward_backward(model, batches[:2]),
        sb.forward_backward(model, batches[2:], after=done.append),
    ]
    named = {name: whole(p.grad).clone() for name, p in model.model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        outs.append(sb.forward_backward(model, batches))
    load = [out.expert_load for out in outs]
    numbers = [
        torch.stack([o.mean_loss, o.loss_sum, o.correct_tokens.float(), o.aux_loss])
        for o in outs
        if o.aux_loss is not None
    ]
    return {
        "gradients": named,
        "copies": model.copies,
        "numbers": torch.stack(numbers),
        "rows": [out.batch_losses for out in outs],
        "picks": [x.picks_NE for x in load if x is not None],
        "logits": torch.cat(model.logits(batches[0])),
        "norm": clip_grad_norm_(model, 0.1),
        "clipped": clip_grad_norm_(model, 0.1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "sent": dict(model.groups["pp"].sent) if model.mesh.pp > 1 else {},
        "tokens": [batch.layout.num_local_tokens for batch in batches],
        "done": done,
    }


def test_a_loop_of_ones_own_sees_the_same_on_every_stage() -> None:
    (alone,) = ranks.run(own_loops, 1, {})
    found = ranks.run(own_loops, 2, {"pp": 2})
    merged: dict[str, Tensor] = {}
    for rank in found:
        for name, gradient in rank["gradients"].items():
            name = rank["copies"].get(name, name)
            assert torch.equal(merged.setdefault(name, gradient), gradient)  # a tied one, to the bit
        torch.testing.assert_close(rank["numbers"], alone["numbers"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rank["logits"], alone["logits"], rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(rank["rows"], alone["rows"], strict=True):
            torch.testing.assert_close(mine, theirs)
        for mine, theirs in zip(rank["picks"], alone["picks"], strict=True):
            assert torch.equal(mine, theirs)
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert rank["clipped"] == pytest.approx(0.1, rel=1e-4)
    assert merged.keys() == alone["gradients"].keys()
    for name, gradient in merged.items():
        torch.testing.assert_close(gradient, alone["gradients"][name], rtol=1e-4, atol=1e-6)


def test_a_rank_has_its_stages_alone_and_sends_what_the_formula_says() -> None:
    (alone,) = ranks.run(own_loops, 1, {})
    first, last = ranks.run(own_loops, 2, {"pp": 2})
    tied = 97 * 32
    assert first["parameters"] + last["parameters"] == alone["parameters"] + tied
    assert max(first["parameters"], last["parameters"]) < 0.6 * alone["parameters"]
    assert first["done"] == [1, 1] and last["done"] == [1, 1]
    # Two steps, of 2 and of 1 micro-batches, of which 1F1B makes 2; an evaluation of 3; logits of 1, made 2.
    # Each travels as its tokens by 32 channels and, but for logits, the routers' sums of 4 experts.
    rows = sum(stage_bytes(tokens, 32, 4, 4) for tokens in alone["tokens"])
    steps, evaluation = rows + stage_bytes(1, 32, 4, 4), rows
    logits = stage_bytes(alone["tokens"][0], 32, 4) + stage_bytes(1, 32, 4)
    assert first["sent"] == {"activations": steps + evaluation + logits, "tied gradient": 2 * 4 * tied}
    assert last["sent"] == {"activation gradients": steps, "tied gradient": 2 * 4 * tied}


def media_held() -> Any:
    model = sb.parallelize(tiny_media_model("qwen3_vl"), sb.Mesh(pp=2))
    batch = sb.pack(mixed_samples(model.model.config), model.model.config, model.mesh)
    held = sum(media.payload.nbytes for media in batch.media.own) if batch.media is not None else 0
    return held, sum("visual" in name for name, _ in model.model.named_parameters())


def test_later_stages_have_neither_media_nor_encoders() -> None:
    (bytes_of_first, encoders), (bytes_of_last, others) = ranks.run(media_held, 2)
    assert bytes_of_first > 0 and encoders > 0
    assert bytes_of_last == 0 and others == 0


def test_chunks_suit_the_schedules() -> None:
    for pp in (2, 3, 4, 8):
        for n in range(1, 40):
            interleaved = num_chunks(n, pp, 2 * pp)
            assert interleaved >= n and interleaved % max(1, interleaved // pp) == 0
            assert interleaved < n + n // pp + 1
            assert num_chunks(n, pp, pp) == max(n, pp)


def test_stages_are_level() -> None:
    """A head and an encoder cost layers, and DeepStack wants its own on the first stage."""
    parts = ModelParts.of(tiny_model("llama", num_hidden_layers=9))
    sizes = [len(stage.layers) for stage in cut_into_stages(parts, 2, PipelineOptions())]
    assert sum(sizes) == 9 and sizes[0] > sizes[1]
    wide = ModelParts.of(tiny_model("llama", num_hidden_layers=9, vocab_size=60_000))
    behind_it = [len(stage.layers) for stage in cut_into_stages(wide, 2, PipelineOptions())]
    assert behind_it[1] < sizes[1]
    media = ModelParts.of(tiny_media_model("qwen3_vl"))
    assert [len(stage.layers) for stage in cut_into_stages(media, 2, PipelineOptions())] == [2, 1]


@pytest.mark.parametrize(
    ("family", "pp", "options", "message"),
    [
        ("llama", 4, {}, "has 2 layers, too few for 4 stages .*use pp of at most 2"),
        ("llama", 2, {"schedule": "interleaved"}, "use pp of at most 1"),
        ("llama", 2, {"stages": [2, 1]}, r"pipeline.stages=\[2, 1\] are 2 stages of 3 layers"),
        ("qwen3_vl", 3, {}, "DeepStack features behind its first 2 layers, .* use at most 2 stages"),
        ("qwen3_vl", 2, {"stages": [1, 2]}, "gives the first stage 1 layers, .* give it at least 2"),
    ],
)
def test_cuts_that_cannot_be_are_refused(family: str, pp: int, options: dict[str, Any], message: str) -> None:
    model = tiny_media_model(family) if family == "qwen3_vl" else tiny_model(family)
    with pytest.raises(ValueError, match=message):
        cut_into_stages(ModelParts.of(model), pp, PipelineOptions(**options))


def positions_in_front() -> None:
    sb.parallelize(tiny_model("gpt2"), sb.Mesh(pp=2))


def one_batch() -> None:
    model = sb.parallelize(tiny_model("llama"), sb.Mesh(pp=2))
    model(sb.pack(random_samples([9], 97), model.model.config, model.mesh))


def frozen_on_one_rank() -> None:
    model = sb.parallelize(tiny_model("llama"), sb.Mesh(pp=2, ring=2))
    if model.mesh.rank == 3:
        next(model.parameters()).requires_grad_(False)
    sb.forward_backward(model, [sb.pack(random_samples([9], 97), model.model.config, model.mesh)])


def spoilt(mesh: dict[str, int], layer: int, in_backward: bool, options: PipelineOptions) -> Any:
    """A layer fails in its second micro-batch: what a rank hears; loss and gradient of the next step."""
    model = sb.parallelize(tiny_model("qwen3", **FOUR), sb.Mesh(**mesh), pipeline=options)
    rows = [random_samples([length], 97) for length in (9, 30, 5)]
    batches = [sb.pack(row, model.model.config, model.mesh) for row in rows]
    calls: list[int] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory is left")

    def spoil(module: Any, args: Any, out: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            out.register_hook(fail) if in_backward else fail()

    message, of_layer = "", model.parts.layer_list[layer]
    if layer >= 0:
        handle = of_layer.register_forward_hook(spoil) if any(True for _ in of_layer.parameters()) else None
        with pytest.raises((ValueError, RuntimeError)) as raised:
            sb.forward_backward(model, batches)
        message = str(raised.value)
        model.zero_grad()
        if handle is not None:
            handle.remove()
    if in_backward:
        return message, []
    return message, [float(sb.forward_backward(model, batches).mean_loss), float(clip_grad_norm_(model, 9e9))]


@pytest.mark.parametrize(
    ("mesh", "layer", "in_backward", "options"),
    [
        ({"pp": 2}, 0, False, PipelineOptions()),
        ({"pp": 2}, 3, False, INTERLEAVED),
        ({"pp": 2}, 1, True, INTERLEAVED),
        ({"pp": 2}, 3, True, PipelineOptions()),
        ({"ring": 2}, 0, False, PipelineOptions()),
    ],
)
def test_what_goes_wrong_on_a_stage_all_ranks_raise_and_can_go_on(
    mesh: dict[str, int], layer: int, in_backward: bool, options: Any
) -> None:
    ((_, expected),) = ranks.run(spoilt, 1, {}, -1, False, options)
    for message, found in ranks.run(spoilt, 2, mesh, layer, in_backward, options, limit=20):
        assert "no memory is left" in message
        assert found == pytest.approx([] if in_backward else expected, rel=1e-5)


def random_numbers_on_the_first_stage() -> None:
    stock = build("seed_oss", residual_dropout=0.1, attention_dropout=0.0)
    model = sb.parallelize(stock, sb.Mesh(pp=2))
    sb.forward_backward(model, [sb.pack(random_samples([9], 97), stock.config, model.mesh)])


@pytest.mark.parametrize(
    ("function", "size", "message"),
    [
        (random_numbers_on_the_first_stage, 2, "draws random numbers in training (its config has residual"),
        (positions_in_front, 2, "changes hidden states outside of its layers"),
        (one_batch, 2, "unlike forward_backward(model, batches), is not supported with pp=2"),
        (
            frozen_on_one_rank,
            4,
            "ranks 2 and 3 have the same pipeline stage, but rank 3 has requires_grad of model.layers.1.",
        ),
    ],
)
def test_refused_on_every_rank(function: Any, size: int, message: str) -> None:
    for error in ranks.errors(function, size):
        assert error.kind == "ValueError" and message in error.message
