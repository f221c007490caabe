"""Parts of a model are frozen by name."""

from __future__ import annotations

import pytest
import torch

import seqbraid as sb
from seqbraid.models.parts import towers_of
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES, mixed_samples, tiny_media_model
from seqbraid.train.freeze import freeze, model_parts

TEXT = ["llama", "gpt2", "qwen3_moe", "qwen3_next", "qwen3_5"]


def trainable(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


@pytest.mark.parametrize("family", [*(f"{name} text" for name in TEXT), *MEDIA_FAMILIES])
def test_the_parts_are_all_of_the_model_and_apart(family: str) -> None:
    media = family in MEDIA_FAMILIES
    model = tiny_media_model(family) if media else tiny_model(family.removesuffix(" text"))
    parts = model_parts(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert sum(map(len, parts.values())) == len(names) and set().union(*parts.values()) == names
    wanted = {"language_model", "embeddings", "head"} | ({"vision", "merger"} if media else set())
    assert set(parts) == wanted | ({"audio"} if family == "qwen3_omni" else set())
    assert all("lm_head" in name for name in parts["head"])
    assert all("layers." in n or "norm" in n or ".h." in n or "ln_" in n for n in parts["language_model"])
    assert not any("visual" in n or "audio" in n or "embed_tokens" in n for n in parts["language_model"])
    if media:
        assert {n.split("visual.")[1].split(".")[0] for n in parts["merger"]} == {
            name for name, _ in towers_of(model).visual.named_children() if "merger" in name
        }
        assert any("blocks" in n for n in parts["vision"]) and not any("merger" in n for n in parts["vision"])
    if family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni"):
        assert any("merger_list" in name for name in parts["merger"]), "DeepStack's mergers"


def test_only_the_named_parts_stop_learning() -> None:
    model = tiny_media_model("qwen3_vl")
    parts = model_parts(model)
    counts = freeze(model, ["vision", "language_model", "embeddings", "head"])
    assert trainable(model) == parts["merger"]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert counts["vision"] == sum(sizes[name] for name in parts["vision"])
    assert counts["trainable"] == sum(sizes[name] for name in parts["merger"])
    assert counts["frozen"] + counts["trainable"] == sum(sizes.values())
    braided = sb.parallelize(model)
    braided(sb.pack(mixed_samples(model.config)[:3], model.config)).loss.backward()
    learnt = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learnt == parts["merger"]


def test_regular_expressions_take_parameters_by_name() -> None:
    model = tiny_model("llama")
    counts = freeze(model, [r"re:layers\.0\.", "re:norm"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if ".layers.0." in n or "norm" in n}
    assert counts["re:norm"] == sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert counts["frozen"] == sum(p.numel() for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("parts", [["embeddings"], ["head"], ["re:lm_head"], ["language_model", "head"]])
def test_tied_weights_are_frozen_together_or_not_at_all(parts: list[str]) -> None:
    model = tiny_model("qwen3")
    assert model.config.tie_word_embeddings
    with pytest.raises(ValueError, match="are the same weight"):
        freeze(model, parts)
    assert all(p.requires_grad for p in model.parameters())
    counts = freeze(model, ["head", "embeddings"])
    assert counts["head"] == counts["embeddings"] == counts["frozen"] == model.lm_head.weight.numel()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["vision"], "'vision' is not a part of LlamaForCausalLM; it has language_model, embeddings, head"),
        (["heads"], "'heads' is not a part"),
        (["re:qqq"], "matches no parameter"),
        (["re:("], "not a regular expression"),
        (["language_model", "embeddings", "head"], "leaves no parameter"),
        (["re:."], "leaves no parameter"),
    ],
)
def test_refusals_change_nothing(parts: list[str], message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=message):
        freeze(model, parts)
    assert all(p.requires_grad for p in model.parameters())
