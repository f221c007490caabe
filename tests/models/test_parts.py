"""`ModelParts`: every part of a model is found once, wrapped, sharded or without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid.models.mixers import gated_delta_sizes
from seqbraid.models.parts import ModelParts
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES, tiny_media_model
from seqbraid.train.lora import LoraOptions, add_lora
from tests.helpers import ranks
from tests.models.tiny_types import tiny_type_model


def described(model: Any) -> dict[str, Any]:
    """What is where, by name."""
    parts = ModelParts.of(model)
    names = {id(module): name for name, module in parts.model.named_modules()}

    def of(*modules: Any) -> list[str]:
        return [names[id(module)] for module in modules if module is not None]

    layers = [
        {
            "kind": (layer.kind, layer.window),
            "mixer": of(layer.mixer),
            "norms": of(*layer.norms, *layer.mixer_norms),
            "mlps": (of(*layer.mlps), of(*layer.shared_experts)),
            "experts": (of(*layer.experts), of(layer.router)),
            "heads": tuple(
                gated_delta_sizes(layer.mixer) if layer.kind == "gated_delta" else parts.heads(layer)
            ),
        }
        for layer in parts.layers
    ]
    return {
        "decoder": of(parts.decoder, parts.embedding, parts.final_norm, parts.head, *parts.other_embeddings),
        "tied": parts.is_tied,
        "towers": [(t.kind, of(t.module, *t.mergers), len(t.blocks)) for t in parts.towers],
        "layers": layers,
    }


@pytest.mark.parametrize(
    ("model_type", "layer", "wanted"),
    [
        ("gpt2", 1, {"mixer": ["transformer.h.1.attn"], "mlps": (["transformer.h.1.mlp"], []),
                     "heads": (4, 4, 8, 8)}),
        ("gpt_neox", 0, {"mlps": (["gpt_neox.layers.0.mlp"], []), "heads": (4, 4, 8, 8)}),
        ("phi3", 0, {"kind": ("full_attention", None), "heads": (4, 2, 8, 8)}),
        ("gpt_bigcode", 0, {"heads": (4, 1, 8, 8)}),
        ("laguna", 1, {"heads": (48, 2, 8, 8)}),  # the config's count of heads is not that of its layers
        ("moshi", 0, {"kind": ("full_attention", None), "mlps": (["model.layers.0.mlp"], [])}),
        ("gemma3_text", 0, {"kind": ("sliding_attention", 16)}),
        ("deepseek_v3", 0, {"mlps": (["model.layers.0.mlp"], []), "experts": ([], []),
                            "heads": (4, 4, 16, 4)}),
        ("deepseek_v3", 1, {"mlps": ([], ["model.layers.1.mlp.shared_experts"]),
                            "experts": (["model.layers.1.mlp.experts"], ["model.layers.1.mlp.gate"])}),
        ("dbrx", 0, {"mixer": ["transformer.blocks.0.norm_attn_norm.attn"], "heads": (4, 2, 8, 8),
                     "experts": (["transformer.blocks.0.ffn.experts"], ["transformer.blocks.0.ffn.router"])}),
        ("qwen3_next", 0, {"kind": ("gated_delta", None), "heads": (2, 4, 8, 8)}),
    ],
)  # fmt: skip
def test_a_layer_is_taken_apart(model_type: str, layer: int, wanted: dict[str, Any]) -> None:
    found = described(tiny_type_model(model_type, torch.float32))["layers"][layer]
    assert {key: found[key] for key in wanted} == wanted


def test_all_of_a_layer_is_in_its_parts() -> None:
    """Norms, mixer, MLPs, experts and routers together hold every parameter of a layer."""
    for model_type in ("gpt2", "gpt_neox", "olmo2", "mixtral", "deepseek_v3", "afmoe", "jetmoe", "qwen3_moe"):
        for layer in ModelParts.of(tiny_type_model(model_type, torch.float32)).layers:
            parts = (layer.mixer, *layer.norms, *layer.dense, *layer.experts, layer.router)
            held = {id(p) for part in parts if part is not None for p in part.parameters()}
            left = {n for n, p in layer.module.named_parameters() if id(p) not in held and p.ndim > 1}
            assert not left, (model_type, left)


@pytest.mark.parametrize("family", sorted(MEDIA_FAMILIES))
def test_towers_have_blocks_and_mergers(family: str) -> None:
    model = tiny_media_model(family)
    found = described(model)
    kinds = [kind for kind, _, _ in found["towers"]]
    assert kinds == (["vision", "audio"] if "omni" in family else ["vision"])
    assert all(blocks for _, _, blocks in found["towers"])
    parts = ModelParts.of(model)
    vision = parts.towers[0]
    assert parts.tower("vision") is vision and len(vision.mergers) == (1 if "3_5" in family else 2)
    assert not {id(p) for p in parts.decoder.parameters()} & {id(p) for p in vision.module.parameters()}


def on_ranks(family: str) -> tuple[Any, Any]:
    model = tiny_model(family)
    before = described(model)
    return before, described(sb.parallelize(model, sb.Mesh(ring=2)))


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "qwen3_5_moe"])
def test_wrapped_sharded_and_weightless_models_have_the_same_parts(family: str) -> None:
    expected = described(tiny_model(family))
    assert described(sb.parallelize(tiny_model(family))) == expected
    assert described(tiny_model(family).to("meta")) == expected
    for before, after in ranks.run(on_ranks, 2, family):
        assert before == after == expected
    adapted = tiny_model(family)
    add_lora(adapted, LoraOptions(rank=2, targets=["q_proj", "v_proj", "o_proj"]))
    assert described(adapted) == expected


def test_a_tied_pair_is_seen() -> None:
    assert ModelParts.of(tiny_type_model("gpt2", torch.float32)).is_tied
    assert not ModelParts.of(tiny_model("llama")).is_tied
