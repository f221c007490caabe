"""A tiny model with random weights of any causal language model type of transformers, made from its default
config: sizes are shrunk by the names of fields, so that a type of the next release needs no line here.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from seqbraid.models.tiny.decoders import shake

VOCABULARY = 97
WINDOW = 16
LAYERS = 2
MOST_LAYERS = 6
HEADS = 4

KINDS = ("full_attention", "sliding_attention")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention")

SIZES: list[tuple[str, int]] = [
    (r"(decoder_|type_|task_type_|pronunciation_|shape_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"hidden_size_per_layer_input|laurel_rank", 8),
    (r"adapter_(in|out)_dim|adapter_input_size|downsample_hidden_size", 32),
    (r"hidden_size|d_model|n_embd|embedding_size|embedding_dim|emb_dim|word_embed_proj_dim|attention_hidden_size"
     r"|(in|out)put_embedding_size|lru_width|dim_model_base|backbone_hidden_size|router_hidden_size", 32),
    (r"(moe_|expert_|shared_expert_|moe_shared_expert_|shared_|expert_ffn_)?(intermediate|hidden)_size"
     r"(_mlp)?|dense_intermediate_size|expert_ffn_hidden_size", 16),
    (r"(en|de)coder_ffn_dim|ffn_dim|n_inner|dff|dim_ff|d_inner|ffn_hidden_size|feed_forward_size", 48),
    (r"(num_)?(en|de)?coder_layers|num_hidden_layers|num_layers|n_layers?|num_blocks", LAYERS),
    (r"num_layers_per_stack", LAYERS),
    (r"(num_)?((en|de)coder_)?attention_heads|num_heads|n_heads?|swa_num_attention_heads", HEADS),
    (r"(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups", 2),
    (r"(swa_|linear_)?head_dim|dim_head|d_head|kv_channels|attention_head_size|query_pre_attn_scalar", 8),
    (r"(num_|num_local_|n_routed_|moe_num_)experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|(router_)?top_k", 2),
    (r"(num_|n_|moe_num_)shared_experts|n_group|topk_group|num_expert_group|first_k_dense_replace", 1),
    (r"num_dense_layers|moe_layer_start_index", 1),
    (r"(q|kv|o|index_kv)_lora_rank|qk_(rope|nope)_head_dim|index_head_dim|rotary_dim|hc_lowrank|d_rel", 8),
    (r"qk_head_dim", 16),
    (r"v_head_dim", 4),
    (r"linear_num_(key_heads|heads)|index_n_heads|o_groups", 2),
    (r"linear_num_value_heads", 4),
    (r"linear_(key|value)_head_dim", 8),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|context_length", 512),
    (r"index_topk(_blocks)?|rel_extent", 8),
    ("|".join([*WINDOWS, "attention_chunk_size"]), WINDOW),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim|mamba_d_state|ssm_state_size|state_size", 8),
]  # fmt: skip
"""What fields of configs are shrunk to, by their whole names; the first that matches counts."""

_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_INDEXER = {f"indexer_{key}": 2 for key in ("n_heads", "compress_ratio")}
_INDEXER |= {"indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(KINDS, _ROPE)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": _EXPERTS,
    "dots1": _EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_assistant": {"text_config": _NO_LAYER_INPUTS},
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": None, "layer_types": ["full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""What the sizes above do not get right, by model type."""

DEFAULTS: dict[str, dict[str, Any]] = {"gemma4_assistant": {"text_config": _NO_LAYER_INPUTS}}
"""What a default config cannot be made without."""

PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}
"""Types whose causal language model is made from a part of the config, which is no type of its own."""

OFTEN: dict[str, dict[str, dict[str, Any]]] = {
    "cohere": {"logit_scale=1": {"logit_scale": 1.0}},
    "dots3_note_text": {
        "use_dsa=False": {
            "use_dsa": False, "layer_types": [KINDS[0], *KINDS], "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
        },
    },
    "gemma2": {"final_logit_softcapping=None": {"final_logit_softcapping": None}},
    "gemma3_text": {"use_bidirectional_attention": {"use_bidirectional_attention": True}},
    "gemma4_text": {
        "num_kv_shared_layers=2": {
            "num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": [*KINDS, *KINDS],
        },
        "attention_k_eq_v": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    },
    "granite": {"logits_scaling=8": {"logits_scaling": 8.0}},
    "lfm2": {"conv layers": {"layer_types": ["conv", "full_attention"]}},
    "llama": {"rope_type=dynamic": {"rope_parameters": _ROPE | {"rope_type": "dynamic", "factor": 2.0}}},
    "phimoe": {"router_jitter_noise=0.01": {"router_jitter_noise": 0.01}},
}  # fmt: skip
"""What checkpoints of a type are often like, and its default config is not."""


def tiny_type_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of a type."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_merged(_shrunk(_default(model_type)), OVERRIDES.get(model_type, {}) | changes))


def tiny_type_model(model_type: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """The tiny model of a type in training mode, with weights large enough that a leak shows."""
    config = tiny_type_config(model_type, **changes)
    torch.manual_seed(0)
    implementation = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: PreTrainedModel
    if model_type in PARTS:
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        model = kind._from_config(getattr(config, PARTS[model_type]), **implementation)
    else:
        model = AutoModelForCausalLM.from_config(config, **implementation)
    shake(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not 0.1 < parameter.std() < 1:
                parameter.normal_(0, 0.2)
    return model.to(dtype).train()


def variants(model_type: str) -> dict[str, dict[str, Any]]:
    """What is changed in a tiny config, by name: nothing first, then what the type has switches for."""
    found: dict[str, dict[str, Any]] = {"": {}}
    try:
        config = tiny_type_config(model_type).get_text_config()
    except Exception:
        return found  # whoever makes the model will see it
    own = vars(config)
    windows = [key for key in WINDOWS[:3] if key in own]
    if windows and not has_window(config):
        switches = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": list(reversed(KINDS))}
        found[f"{windows[0]} set"] = {windows[0]: WINDOW} | {k: v for k, v in switches.items() if k in own}
    if "output_router_logits" in own:
        found["output_router_logits"] = {"output_router_logits": True}
    return found | OFTEN.get(model_type, {})


def has_window(config: PreTrainedConfig) -> bool:
    """Whether layers of a tiny config see no further than a window."""
    own = vars(config.get_text_config())
    kinds = own.get("layer_types")
    return any(own.get(key) == WINDOW for key in WINDOWS) and (
        kinds is None or any(k != "full_attention" for k in kinds)
    )


def _default(model_type: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {}))


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Fields with some changed, in the configs within as well."""
    own = {
        key: fields[key] | value if key.endswith("_config") and key in fields else value
        for key, value in changes.items()
    }
    return fields | own


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config, shrunk; of lists with one entry per layer, a few layers of every kind."""
    found = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    layers = _chosen_layers(found)
    changed: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, PreTrainedConfig):
            changed[key] = _shrunk(value)
            continue
        new = _shrunk_value(key, value)
        if isinstance(value, list | tuple) and layers and len(value) > max(layers):
            new = [value[i] for i in layers]
        if re.fullmatch(r"num_hidden_layers|n_layers?|num_layers", key) and layers:
            new = len(layers)
        if new is not value:
            changed[key] = new
    if found.get("head_dim", 0) is None:  # some families do not work it out themselves
        changed["head_dim"] = 8
    if "kv_lora_rank" in found and "num_key_value_heads" in changed:
        changed["num_key_value_heads"] = HEADS  # latent attention has as many of them as queries
    return changed


def _chosen_layers(found: dict[str, Any]) -> list[int]:
    """The first layer of every kind, where a config says per layer what it is."""
    count = next((found[k] for k in ("num_hidden_layers", "num_layers", "n_layer") if found.get(k)), 0)
    lists = [v for v in found.values() if isinstance(v, list | tuple) and len(v) == count > 0]
    if not lists:
        return []
    kinds = [repr(kind) for kind in zip(*lists, strict=True)]
    chosen = sorted({kinds.index(kind) for kind in kinds})[:MOST_LAYERS]
    return (chosen + [i for i in range(count) if i not in chosen])[: max(LAYERS, len(chosen))]


def _shrunk_value(key: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float) and ("drop" in key or "jitter" in key):
        return 0.0
    if re.fullmatch(r"initializer_range|init_std|embed_init_std|initializer_factor", key):
        return 0.2
    if not isinstance(value, int):
        return value
    if key.endswith(("_token_id", "_token_index", "_index")) and value >= VOCABULARY:
        return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(key, VOCABULARY - 1)
    return next((size for name, size in SIZES if re.fullmatch(name, key) and value > size), value)
