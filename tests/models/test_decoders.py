"""Any text decoder of transformers is either exact or refused: there is no third."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import seqbraid as sb
from seqbraid.models.tiny.decoders import COMMON, tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.verify.parity import check_parity

EXACT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "phi3": {},
    "gemma": {},
    # Layers that see all have other heads than those with a window, as the larger Gemma 4 has.
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "global_head_dim": 8,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": None, "num_kv_shared_layers": 0,
    },
    "olmo2": {},
    "deepseek_v3": {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 8,
    },
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "glm4": {},
    "gpt_neox": {},
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({}, "soft-cap"),
    "cohere": ({}, "soft-cap"),
    "stablelm": ({}, "without the context of the step"),
    "falcon_h1": ({}, "kind hybrid|carries state"),
    "mamba": ({}, "carries state|kind mamba"),
    "jamba": ({}, "carries state|kind mamba"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "kind conv|carries state"),
    "bloom": ({}, "attention interface"),
    "llama4_text": ({}, "no decoder below a language-model head|chunked"),
    "llama": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
}


def build(model_type: str, changes: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(COMMON | changes))).train()


@pytest.mark.parametrize("model_type", EXACT)
def test_exact(model_type: str) -> None:
    parity = check_parity(build(model_type, EXACT[model_type]), random_samples([1, 5, 40, 70], 97))
    assert parity.holds, parity.worst


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type: str) -> None:
    changes, message = REFUSED[model_type]
    model = build(model_type, changes)
    with pytest.raises(ValueError, match=message):
        batch = sb.pack([{"input_ids": [1, 2, 3]}], model.config)
        sb.parallelize(model)(batch)


def test_attention_dropout_is_refused_in_training_alone() -> None:
    model = sb.parallelize(tiny_model("llama", attention_dropout=0.1))
    batch = sb.pack([{"input_ids": [1, 2, 3]}], model.model.config)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        model(batch)
    model.eval()
    assert model(batch).loss > 0


def test_attention_changed_behind_our_back_is_refused() -> None:
    model = sb.parallelize(tiny_model("llama"))
    batch = sb.pack([{"input_ids": [1, 2, 3]}], model.model.config)
    model.model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="changed to 'eager'"):
        model(batch)


def test_what_is_no_causal_language_model_is_refused() -> None:
    with pytest.raises(ValueError, match="ForCausalLM"):
        sb.parallelize(tiny_model("llama").model)
    with pytest.raises(ValueError, match="PreTrainedModel of transformers, not Linear"):
        sb.parallelize(tiny_model("llama").lm_head)  # type: ignore[arg-type]
