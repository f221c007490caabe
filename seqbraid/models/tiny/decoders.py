"""Tiny models of every family we know, made from configs, with weights large enough that a leak shows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
SHARED_EXPERT: dict[str, Any] = {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    # Learned absolute positions: with rotary ones alone a shift of a whole sample changes nothing.
    "gpt2": (
        "gpt2",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 48,
            "n_positions": 4096,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_next": ("qwen3_next", GATED_DELTA | EXPERTS | SHARED_EXPERT),
    "qwen3_5": ("qwen3_5_text", GATED_DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", GATED_DELTA | EXPERTS | SHARED_EXPERT),
}
"""Family to transformers' model type and what its tiny config changes."""


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of a tiny model of this family."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known are {', '.join(FAMILIES)}")
    model_type, own = FAMILIES[family]
    return AutoConfig.for_model(model_type, **(COMMON | own | changes))


def tiny_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A tiny model of this family with random weights."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(family, **changes), attn_implementation="sdpa" if family != "gpt_oss" else "eager"
    )
    shake(model)
    torch.random.set_rng_state(state)
    return model.to(dtype).train()


@torch.no_grad()
def shake(model: torch.nn.Module) -> None:
    """Move parameters away from where they would hide a mistake."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # Slow decay: a state that is forgotten within a token could not leak, and its gradient is noise.
            parameter.copy_(torch.empty_like(parameter).uniform_(0.02, 0.5).log())
        elif parameter.ndim == 1:
            # Norms and biases that start at a constant would hide a wrong use of them.
            parameter.add_(0.2 * torch.randn_like(parameter))
