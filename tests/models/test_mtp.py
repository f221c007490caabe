"""Multi-token prediction in one process: the module is transformers' own, and its weights go in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import seqbraid as sb
from seqbraid.layout import SequenceLayout
from seqbraid.models.mtp import attach_mtp, attached, mtp_of
from seqbraid.models.mtp_module import MtpOptions
from seqbraid.models.mtp_weights import add_to_checkpoint, read_mtp, to_checkpoint
from seqbraid.models.parts import ModelParts
from seqbraid.models.stock import INDEX, SINGLE
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.mtp import with_mtp
from seqbraid.models.tiny.samples import random_samples
from seqbraid.ops.linear_cross_entropy import LossPart, TokenFactors, losses_of_parts
from seqbraid.plan.estimate import memory_estimate
from seqbraid.plan.flops import ModelFlops
from seqbraid.sequence_parallel.shift import ShiftPlan
from seqbraid.train.export import export
from seqbraid.train.freeze import freeze
from seqbraid.train.lora import LoraOptions, add_lora
from seqbraid.verify.mtp_reference import mtp_step, seen_by_decoder
from tests.train.test_lora import shaken

MOE = ("qwen3_next", "qwen3_5_moe")


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 5, 17, 40]), min_size=1, max_size=6),
    mesh=st.sampled_from([(1, 1, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1), (2, 2, 2)]),
    policy=st.sampled_from(["balanced", "zigzag", "contiguous"]),
    depths=st.integers(1, 4),
)
def test_every_slot_reads_the_token_that_many_places_on(
    lengths: list[int], mesh: tuple[int, int, int], policy: str, depths: int
) -> None:
    ring, ulysses, tp = mesh
    if policy == "contiguous" and ring > 1:
        return
    layout = SequenceLayout(lengths, ring, ulysses, policy, multiple_of=tp)
    row = torch.arange(1, sum(lengths) + 1)
    size = layout.num_local_tokens // tp
    parts = [part for rank in range(ring * ulysses) for part in layout.shard(row, rank).split(size)]
    plans = [ShiftPlan.of(layout, depths, rank, tp) for rank in range(len(parts))]
    sent = [plan.rows.rows.split(list(plan.rows.send)) for plan in plans]
    for rank, plan in enumerate(plans):
        arrived = [parts[other][sent[other][rank]] for other in range(len(parts))]
        assert [len(x) for x in arrived] == list(plan.rows.receive)
        assert not plan.rows.is_local or not any(map(len, arrived))
        pool = torch.cat([parts[rank], *arrived, torch.zeros(1, dtype=torch.long)])
        for depth in range(1, depths + 1):
            ahead = torch.cat([F.pad(x[depth:], (0, min(depth, len(x)))) for x in row.split(lengths)])
            wanted = layout.shard(ahead, rank // tp).split(size)[rank % tp]
            assert torch.equal(pool[plan.sources_KT[depth - 1]], wanted)
            assert torch.equal(plan.has_source_KT[depth - 1], wanted > 0)


def transformers_mtp(model: PreTrainedModel, depth: int) -> Any:
    """The stock class, which has a projection and norms for each depth, with the weights of our module."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this release of transformers has no MtpModel whose layers can be called one by one")
    config = model.config.get_text_config()
    config.num_mtp_layers = depth
    config.mtp_layer_types = ["full_attention"] * depth
    stock = modeling_layers.MtpModel(model, depth)
    own: Any = mtp_of(model)
    for number, layer in enumerate(stock.layers):
        block = own.layers[number % len(own.layers)]
        for theirs, ours in (
            (layer.eh_proj, own.fc),
            (layer.enorm, own.pre_fc_norm_embedding),
            (layer.hnorm, own.pre_fc_norm_hidden),
            (layer.post_norm, own.norm),
            (layer.mtp_block, block),
        ):
            theirs.load_state_dict(ours.state_dict())
    return stock.to(own.fc.weight.dtype)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_the_reference_is_the_module_of_transformers(family: str) -> None:
    model = with_mtp(tiny_model(family, output_router_logits=False), depth=2)
    ids = torch.randint(0, 97, (1, 12), generator=torch.Generator().manual_seed(0))
    stock = transformers_mtp(model, 2)
    with torch.no_grad(), seen_by_decoder(model) as seen:
        model(ids, use_cache=False)
    length, hidden = ids.shape[1], seen.hidden[0]
    sums = mtp_step(model, seen, ids[0])
    for depth in (1, 2):
        ahead = F.pad(seen.embeds[0][:, depth:], (0, 0, 0, depth))
        positions = torch.arange(length)[None]
        with torch.no_grad():
            hidden = stock.forward_layer(depth - 1, hidden, positions, None, inputs_embeds=ahead)
            logits = model.lm_head(hidden[0, : length - depth - 1])
        wanted = F.cross_entropy(logits, ids[0, depth + 1 :], reduction="sum")
        torch.testing.assert_close(sums.losses[depth - 1], wanted, rtol=1e-6, atol=0)


def test_parts_of_the_tokens_count_by_their_factors() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(30, 8, generator=random, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(19, 8, generator=random, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(19, generator=random, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 19, (30,), generator=random)
    targets[[0, 3, 12, 29]] = -100
    parts = [LossPart(10, 1.0), LossPart(5, 0.25), LossPart(15, 0.0)]
    found = losses_of_parts(hidden, weight, targets, bias, TokenFactors(parts=tuple(parts)), chunk_tokens=4)
    gradients = torch.autograd.grad(found.loss, (hidden, weight, bias))
    logits = hidden @ weight.T + bias
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none").split([10, 5, 15])
    wanted = losses[0].sum() + 0.25 * losses[1].sum()
    torch.testing.assert_close(found.loss, wanted)
    torch.testing.assert_close(found.losses_P, torch.stack([x.sum() for x in losses]).detach())
    for ours, theirs in zip(gradients, torch.autograd.grad(wanted, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(ours, theirs)
    best = torch.where(targets == -100, -1, logits.argmax(1))
    assert torch.equal(found.best_T, best)
    right = [(b == t).sum() for b, t in zip(best.split([10, 5, 15]), targets.split([10, 5, 15]), strict=True)]
    assert torch.equal(found.correct_P, torch.stack(right))


def test_figures_of_each_depth() -> None:
    model = with_mtp(tiny_model("qwen3_5"), depth=3, loss_factor=0.5)
    samples = random_samples((13, 5, 2, 1, 22), 97, seed=3, ignored="some")
    braided = sb.parallelize(model)
    batch = sb.pack(samples, model.config, mtp_depth=3)
    with torch.no_grad():
        out = braided(batch)
    braided.release()
    losses, labels, accepted = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    for sample in samples:
        ids = torch.as_tensor(sample["input_ids"])
        wanted = torch.as_tensor(sample.get("labels", ids))
        with torch.no_grad(), seen_by_decoder(model) as seen:
            main = model(ids[None], use_cache=False).logits[0].argmax(1)
            sums = mtp_step(model, seen, wanted)
        for depth in (1, 2, 3):
            losses[depth - 1] += sums.losses[depth - 1]
            is_label = wanted[depth + 1 :] != -100
            labels[depth - 1] += is_label.sum()
            own = sums.best[depth - 1]
            accepted[depth - 1] += ((own == main[depth : depth + len(own)]) & is_label).sum()
    assert out.mtp is not None and out.mtp_loss is not None
    torch.testing.assert_close(out.mtp.loss_sums_K.float(), losses)
    assert out.mtp.label_tokens_K.tolist() == labels.tolist()
    assert out.mtp.accepted_tokens_K.tolist() == accepted.tolist()
    torch.testing.assert_close(out.mtp_loss, losses.mean() / out.label_tokens)
    torch.testing.assert_close(out.loss, out.mean_loss + 0.5 * out.mtp_loss)
    logged = out.mtp.summary()
    assert logged["mtp_loss_2"] == pytest.approx(float(losses[1] / labels[1]), rel=1e-5)
    assert logged["mtp_acceptance_1"] == accepted[0] / labels[0]


def saved(folder: Path, family: str, packed: bool = False, sharded: bool = False) -> dict[str, Tensor]:
    """A checkpoint with tensors of multi-token prediction, and these."""
    model = tiny_model(family)
    model.config.tie_word_embeddings = False
    module = with_mtp(model).get_submodule("mtp")
    tensors = to_checkpoint({f"mtp.{n}": p.detach().clone() for n, p in module.named_parameters()}, packed)
    del model._modules["mtp"]
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
    assert (folder / (INDEX if sharded else SINGLE)).is_file()
    if sharded:
        add_to_checkpoint(folder, tensors)
    else:
        save_file(load_file(folder / SINGLE) | tensors, folder / SINGLE, metadata={"format": "pt"})
    return tensors


def engine_table(family: str, config: Any) -> dict[str, list[int]]:
    """Names and shapes of one layer of multi-token prediction as inference engines look them up."""
    size, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = {
        "input_layernorm": [size], "post_attention_layernorm": [size],
        "self_attn.q_proj": [2 * queries, size], "self_attn.k_proj": [keys, size],
        "self_attn.v_proj": [keys, size], "self_attn.o_proj": [size, queries],
        "self_attn.q_norm": [head], "self_attn.k_norm": [head],
    }  # fmt: skip
    if family in MOE:
        wide = {"shared_expert": config.shared_expert_intermediate_size}
        wide |= {f"experts.{e}": config.moe_intermediate_size for e in range(config.num_experts)}
        layer |= {"mlp.gate": [config.num_experts, size], "mlp.shared_expert_gate": [1, size]}
        mlps = {f"mlp.{name}": width for name, width in wide.items()}
    else:
        mlps = {"mlp": config.intermediate_size}
    for name, width in mlps.items():
        layer |= {f"{name}.{side}_proj": [width, size] for side in ("gate", "up")}
        layer[f"{name}.down_proj"] = [size, width]
    table = {"fc": [size, 2 * size], "norm": [size]}
    table |= {"pre_fc_norm_embedding": [size], "pre_fc_norm_hidden": [size]}
    table |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    return {f"mtp.{name}.weight": shape for name, shape in table.items()}


@pytest.mark.parametrize(("packed", "sharded"), [(False, False), (True, True)])
@pytest.mark.parametrize("family", ["qwen3_5", *MOE])
def test_weights_survive_training_without_and_are_written_after_training_with(
    tmp_path: Path, family: str, packed: bool, sharded: bool
) -> None:
    before = saved(tmp_path / "source", family, packed, sharded)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    off = sb.parallelize(stock)
    off.save_pretrained(tmp_path / "off")
    off.release()
    export(off.model, tmp_path / "source", tmp_path / "exported off")
    for name in ("off", "exported off"):
        kept = read_mtp(tmp_path / name)
        assert kept.keys() == before.keys()
        assert all(torch.equal(kept[key], before[key]) for key in kept), name
    on = sb.parallelize(stock, mtp=MtpOptions())
    with torch.no_grad():
        for parameter in mtp_of(stock).parameters():
            parameter.add_(1.0)
    on.save_pretrained(tmp_path / "on")
    export(on, tmp_path / "source", tmp_path / "exported on")
    for name in ("on", "exported on"):
        trained = read_mtp(tmp_path / name)
        assert trained.keys() == before.keys()
        assert all(torch.equal(trained[key], before[key] + 1) for key in trained), name
        if not packed:
            config = stock.config.get_text_config()
            assert {key: list(x.shape) for key, x in trained.items()} == engine_table(family, config)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for (key, one), (_, other) in zip(
            again.named_parameters(), tiny_model(family).named_parameters(), strict=True
        ):
            assert torch.equal(one, other), key
    on.release()
    assert not hasattr(stock, "mtp")


def test_a_tied_weight_is_saved_once_and_has_one_gradient(tmp_path: Path) -> None:
    model = with_mtp(tiny_model("qwen3_5", tie_word_embeddings=True))
    braided = sb.parallelize(model)
    braided(sb.pack(random_samples((9, 4), 97), model.config, mtp_depth=1)).loss.backward()
    assert model.lm_head.weight.grad is model.get_input_embeddings().weight.grad
    braided.save_pretrained(tmp_path)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    names = []
    for file in set(places.values()):
        with safe_open(tmp_path / file, "pt") as tensors:
            names += tensors.keys()
    assert len(names) == len(set(names)) and "lm_head.weight" not in names


def test_frozen_trunk() -> None:
    model = tiny_model("qwen3_5")
    with attached(model, MtpOptions(fresh=True, only=True)):
        braided = sb.parallelize(model)
        braided(sb.pack(random_samples((9, 4), 97), model.config, mtp_depth=1)).loss.backward()
        trained = {name for name, p in model.named_parameters() if p.grad is not None}
        assert trained == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
        assert all(p.grad.norm() > 0 for p in mtp_of(model).parameters() if p.grad is not None)
        braided.release()
    assert all(p.requires_grad for p in model.parameters())
    assert not hasattr(model.config, "mtp_num_hidden_layers")


def test_a_frozen_module_still_trains_the_model() -> None:
    gradients = []
    for factor in (0.0, 1.0):
        model = with_mtp(tiny_model("qwen3_5"), loss_factor=factor)
        freeze(model, ["mtp"])
        sb.parallelize(model)(sb.pack(random_samples((9, 4), 97), model.config, mtp_depth=1)).loss.backward()
        assert all(p.grad is None for p in mtp_of(model).parameters())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    without, beside = gradients
    assert without.keys() == beside.keys()
    assert all((beside[name] - g).norm() > 1e-2 * g.norm() for name, g in without.items())


def test_export_merges_the_modules_adapters(tmp_path: Path) -> None:
    before = saved(tmp_path / "source", "qwen3_5")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    attach_mtp(stock)
    adapted = [name for name in add_lora(stock, LoraOptions(2, alpha=6.0)) if name.startswith("mtp.")]
    assert len(adapted) == 8  # fc, four of attention, three of the MLP
    shaken(stock)
    wanted = dict(before)
    for name in adapted:
        a, b = (stock.get_parameter(f"{name}.lora_{x}.default.weight").detach() for x in "AB")
        wanted[f"{name}.weight"] = before[f"{name}.weight"] + 3 * b @ a
    export(sb.parallelize(stock), tmp_path / "source", tmp_path / "out")
    found = read_mtp(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-6)


def test_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen3_5")
    with pytest.raises(ValueError, match=r"loaded from no folder.*fresh=True"):
        sb.parallelize(model, mtp=MtpOptions())
    assert ModelParts.of(model).mtp is None
    with pytest.raises(ValueError, match=r"model_type 'llama'.*no multi-token prediction"):
        attach_mtp(tiny_model("llama"), MtpOptions(fresh=True))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tensor mtp"):
        attach_mtp(model, MtpOptions(source=str(tmp_path)))
    saved(tmp_path / "other", "qwen3_5")
    save_file(
        {k: v for k, v in load_file(tmp_path / "other" / SINGLE).items() if k != "mtp.norm.weight"},
        tmp_path / "other" / SINGLE,
    )
    with pytest.raises(ValueError, match=r"lacks mtp\.norm\.weight"):
        attach_mtp(model, MtpOptions(source=str(tmp_path / "other")))
    with pytest.raises(ValueError, match="depth=0"):
        MtpOptions(depth=0)
    braided = sb.parallelize(with_mtp(model))
    with pytest.raises(ValueError, match="mtp_depth=0, but the model predicts 1"):
        braided(sb.pack(random_samples((9, 4), 97), model.config))
    with pytest.raises(ValueError, match="already"):
        attach_mtp(model, MtpOptions(fresh=True))


def test_costs_are_counted_with_each_depth() -> None:
    model = tiny_model("qwen3_5")
    config, without, before = model.config, ModelFlops.of(model), memory_estimate(model, sb.Mesh())
    flops = ModelFlops.of(with_mtp(model, depth=2))
    size, head, queries, keys = config.hidden_size, config.head_dim, 8, 2
    attention = size * head * (2 * queries + 2 * keys + queries)  # with its gate
    layer = attention + 3 * size * config.intermediate_size + 2 * size * size
    assert flops.token - without.token == 2 * 3 * 2 * layer
    assert flops.label == 3 * without.label
    assert flops.pair[None] == 3 * without.pair[None]
    estimate = memory_estimate(model, sb.Mesh())
    own = sum(p.numel() for p in mtp_of(model).parameters())
    assert estimate.num_parameters - before.num_parameters == own
    assert estimate["parameters"] - before["parameters"] == 4 * own
    assert estimate["activations"] > before["activations"] and estimate["loss"] > before["loss"]


def test_tokens_that_nobody_is_predicted_from_go_to_no_expert() -> None:
    model = with_mtp(tiny_model("qwen3_5_moe"), depth=2)
    braided = sb.parallelize(model)
    lengths = (9, 4, 2, 1)
    with torch.no_grad():
        out = braided(sb.pack(random_samples(lengths, 97), model.config, mtp_depth=2, multiple_of=8))
    assert out.expert_load is not None
    *decoder, module = (out.expert_load.picks_NE.sum(1) / model.config.num_experts_per_tok).tolist()
    assert decoder == [sum(lengths)] * model.config.num_hidden_layers
    assert module == sum(max(0, n - 1) + max(0, n - 2) for n in lengths)
