"""Adapters: exact on any mesh, and peft's own in every other respect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import Tensor, nn
from transformers import PreTrainedModel

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import mixed_samples, tiny_media_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.train.lora import LoraOptions, add_lora, load_adapter, merged, save_adapter
from seqbraid.verify.parity import check_parity, stock_references
from seqbraid.verify.reference import stock_step
from tests.helpers import ranks


def lora_model(family: str, **options: Any) -> PreTrainedModel:
    """A tiny model with adapters that do something: after `add_lora` alone their product is zero."""
    model = tiny_media_model(family)
    add_lora(model, LoraOptions(rank=4, alpha=8.0, **options))
    return shaken(model)


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def adapted(model: nn.Module) -> set[str]:
    return {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}


def logits(model: Any, sample: dict[str, Any]) -> Tensor:
    return stock_step(model, [sample]).logits[0]


def parity_and_save(family: str, references: str, folder: str) -> tuple[float, bool, list[str], list[Tensor]]:
    """On every rank: parity with one process, then the adapter written from the shards."""
    model, mesh = lora_model(family), Mesh(ring=2, ulysses=2)
    samples = mixed_samples(model.config)[:4]
    parity = check_parity(model, samples, mesh, references=torch.load(references, weights_only=False))
    lines = [line for line in parity.lines if "lora_" in line.name]
    braided = sb.parallelize(model, mesh)
    save_adapter(braided, Path(folder), base_name="tiny")
    found = braided.logits(sb.pack(samples, model.config, mesh))
    return max(line.error for line in lines), parity.holds, [line.name for line in lines], found


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_adapters_on_four_ranks_equal_one_process_and_load_in_peft(family: str, tmp_path: Path) -> None:
    folder, references = tmp_path / "adapter", tmp_path / "references"
    model = lora_model(family)
    samples = mixed_samples(model.config)[:4]
    torch.save(stock_references(model, samples), references)
    results = ranks.run(parity_and_save, 4, family, str(references), str(folder))
    for error, holds, names, _ in results:
        assert holds and error <= 1e-5
        layers = {name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for name in names}
        assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} <= layers
        if family == "qwen3_5":
            assert {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"} <= layers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "references"]
    stock = tiny_media_model(family)
    plain = logits(stock, samples[1])
    loaded = PeftModel.from_pretrained(stock, folder, is_trainable=True)
    assert loaded.peft_config["default"].base_model_name_or_path == "tiny"
    for i, sample in enumerate(samples):
        expected = logits(loaded.get_base_model(), sample)
        assert (results[0][3][i] - expected).norm() <= 1e-5 * expected.norm()
    assert (plain - logits(loaded.get_base_model(), samples[1])).norm() > 0.01 * plain.norm()


def test_a_saved_adapter_is_the_one_in_memory(tmp_path: Path) -> None:
    model = lora_model("qwen3_5", rslora=True)
    sample = mixed_samples(model.config)[1]
    expected = logits(model, sample)
    save_adapter(sb.parallelize(model), tmp_path / "a", base_name="somewhere/base")
    stock = tiny_media_model("qwen3_5")
    theirs = PeftModel.from_pretrained(stock, tmp_path / "a", is_trainable=True).get_base_model()
    torch.testing.assert_close(logits(theirs, sample), expected, rtol=1e-6, atol=1e-6)
    ours = tiny_media_model("qwen3_5")
    assert load_adapter(ours, tmp_path / "a") == sorted(adapted(model))
    torch.testing.assert_close(logits(ours, sample), expected, rtol=1e-6, atol=1e-6)
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if "lora_" in n
    }
    braided = sb.parallelize(ours)
    save_adapter(braided, tmp_path / "b", base_name="somewhere/base")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    save_adapter(braided, tmp_path / "b", base_name="another")
    assert "another" in (tmp_path / "b" / "adapter_config.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        save_adapter(braided, tmp_path / "c")


def test_an_adapter_that_peft_trained_is_taken_up(tmp_path: Path) -> None:
    theirs = get_peft_model(tiny_model("qwen3"), LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"]))
    shaken(theirs)
    theirs.save_pretrained(tmp_path)
    ours = tiny_model("qwen3")
    load_adapter(ours, tmp_path)
    sample = random_samples([20], 97)[0]
    expected = logits(theirs.get_base_model(), sample)
    torch.testing.assert_close(logits(ours, sample), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="has adapters already"):
        load_adapter(ours, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match="it sets use_dora"):
        load_adapter(tiny_model("qwen3"), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_adapter(tiny_model("qwen3"), tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"no adapter_model.safetensors"):
        load_adapter(tiny_model("qwen3"), tmp_path)


def test_a_new_adapter_changes_nothing_and_is_all_that_learns() -> None:
    model = tiny_media_model("qwen3_omni").to(torch.bfloat16)
    sample = mixed_samples(model.config)[1]
    before = logits(model, sample)
    add_lora(model, LoraOptions(rank=4))
    assert torch.equal(logits(model, sample), before)
    for name, p in model.named_parameters():
        assert p.requires_grad == ("lora_" in name), name
        assert p.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    torch.manual_seed(7)
    again = tiny_media_model("qwen3_omni").to(torch.bfloat16)
    add_lora(again, LoraOptions(rank=4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_merged_weights_give_the_logits_of_the_adapters() -> None:
    model = lora_model("qwen3_vl", rslora=True)
    sample = mixed_samples(model.config)[1]
    expected = logits(model, sample)
    stock = tiny_media_model("qwen3_vl")
    stock.load_state_dict(merged(model, model.state_dict()))
    found = logits(stock, sample)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj"}),  # experts are one tensor, no linear layers
        (["q_proj"], {"q_proj"}),
        (["self_attn.v_proj", "o_proj"], {"v_proj", "o_proj"}),
        ([r"re:audio_tower\..*q_proj$"], {"q_proj"}),
        ([r"re:visual\..*\.qkv$"], {"qkv"}),
    ],
)
def test_targets_are_the_decoders_unless_a_tower_is_named(targets: Any, expected: set[str]) -> None:
    model = tiny_media_model("qwen3_omni")
    names = add_lora(model, LoraOptions(rank=2, targets=targets))
    assert set(names) == adapted(model)
    assert {name.rsplit(".", 1)[-1] for name in names} == expected
    tower = "audio_tower" if "audio" in str(targets) else "visual" if "visual" in str(targets) else None
    assert {next((t for t in ("audio_tower", "visual") if t in name), None) for name in names} == {tower}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["lm_head"], "the loss reads the head's weight"),
        (["re:."], "the loss reads the head's weight"),
        (["conv1d"], "not a linear layer of the decoder; it has down_proj, gate_proj"),
        (["qkv"], "towers are named by"),
        (["embed_tokens"], "not a linear layer"),
        (["re:)"], "not a regular expression"),
        ([], "targets is empty"),
    ],
)
def test_targets_that_are_refused(targets: list[str], message: str) -> None:
    model = tiny_media_model("qwen3_5")
    with pytest.raises(ValueError, match=message):
        add_lora(model, LoraOptions(rank=2, targets=targets))
    assert not adapted(model) and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("target", ["lm_head", "conv1d"])
def test_peft_on_a_layer_whose_weight_is_read_is_refused(target: str) -> None:
    """Nobody has to go through `add_lora`: what would be left out silently is refused by `parallelize`."""
    model = tiny_model("qwen3_5")
    inject_adapter_in_model(LoraConfig(r=64, target_modules=[target]), model)
    with pytest.raises(ValueError, match="which would be ignored"):
        sb.parallelize(model)


def test_options_and_models_without_adapters_are_refused(tmp_path: Path) -> None:
    for options in ({"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"alpha": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(options))):
            LoraOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no linear layers in its decoder"):  # its layers are Conv1D
        add_lora(tiny_model("gpt2"), LoraOptions())
    with pytest.raises(ValueError, match="no adapters"):
        save_adapter(sb.parallelize(tiny_model("llama")), tmp_path / "a")
