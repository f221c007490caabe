"""Random tiny models of every family: odd widths, head counts, layers and experts."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from transformers import PreTrainedModel

from seqbraid.models.tiny.decoders import FAMILIES, tiny_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES, mixed_samples, tiny_media_model
from seqbraid.models.tiny.mtp import with_mtp
from seqbraid.models.tiny.samples import random_samples

MEDIA = {f"{name}_media" if name in FAMILIES else name: name for name in MEDIA_FAMILIES}
"""Media families by their names in the matrix: some families of text have the same one."""

MTP = {
    "qwen3_next_mtp": "qwen3_next",
    "qwen3_5_mtp": "qwen3_5",
    "qwen3_5_moe_mtp": "qwen3_5_moe",
    "qwen3_5_media_mtp": "qwen3_5_media",
}
"""Families that predict several tokens: of one, two or three depths by turns."""

NAMES = (*FAMILIES, *MEDIA, *MTP)
WITH_EXPERTS = (
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_vl_moe",
    "qwen3_omni",
)
EXPERT_WIDTHS = {"hidden_size", "intermediate_size", "moe_intermediate_size"}
SHARED = {
    *("num_attention_heads", "linear_num_key_heads", "intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts"),
}
WITH_LATENTS = ("deepseek_v3",)
SCALES = (0.05, 0.1, 0.2, 0.3)


def random_model(
    name: str, number: int, seed: int, shared: bool = False, stages: int = 1
) -> tuple[PreTrainedModel, list[dict[str, Any]]]:
    """The model of this number, the same in size for every seed, and samples of random lengths; `shared`
    where its heads, channels and experts are to be shared out, and with layers for so many pipeline stages.
    """
    if name in MTP:
        model, samples = random_model(MTP[name], number, seed, shared, stages)
        # Where the first labels of all samples are ignored, each depth has as many labels as the decoder.
        max(samples, key=lambda sample: len(sample["input_ids"])).pop("labels", None)
        return with_mtp(model, depth=1 + (number + 1) % 3, seed=seed), samples
    draw = Random(f"{name} {number}")
    if name in MEDIA:
        changes = media_changes(MEDIA[name], draw, stages)
        if shared:
            changes["text_config"] = shared_by_four(name, number, changes["text_config"])
        model = tiny_media_model(MEDIA[name], seed, **changes)
        return _with_experts(model), mixed_samples(model.config, seed)
    changes = text_changes(name, draw, stages)
    model = tiny_model(name, seed, **(shared_by_four(name, number, changes) if shared else changes))
    lengths = [draw.choice((1, 2, draw.randrange(3, 70), draw.randrange(60, 160))) for _ in range(4)]
    lengths += [draw.randrange(65, 140)]  # more than one chunk, more than any window
    lengths[0] += sum(lengths) % 64 == 0  # a row with padding
    return _with_experts(model), random_samples(lengths, model.config.get_text_config().vocab_size, seed)


def _with_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Grouped products take rows of whole 16 bytes; experts of other widths run in a loop."""
    narrow = [p for p in model.parameters() if p.ndim == 3 and any(n % 4 for n in p.shape[1:])]
    if narrow and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def text_changes(name: str, draw: Random, fewest: int = 1) -> dict[str, Any]:
    """What a text model of this family has in its config."""
    num_layers = max(fewest, draw.randrange(1, 6))
    changes = {
        "vocab_size": draw.randrange(50, 150),
        "hidden_size": draw.randrange(17, 48),
        "intermediate_size": draw.randrange(11, 64),
        "num_hidden_layers": num_layers,
        "initializer_range": draw.choice(SCALES),
        "tie_word_embeddings": draw.random() < 0.3,
    }
    quarter = name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    changes |= _heads(draw, head_dims=(8, 16, 24) if quarter else (4, 6, 8, 10, 14))
    if name in ("llama", "gemma3"):  # stock asks for it, though it has a head size of its own
        changes["hidden_size"] = changes["num_attention_heads"] * draw.randrange(3, 7)
    changes |= OWN.get(name, lambda draw, num_layers: {})(draw, num_layers)
    return _even_widths(changes, draw) if name in WITH_EXPERTS else changes


def shared_by_four(name: str, number: int, text: dict[str, Any]) -> dict[str, Any]:
    """The same model with heads, channels and experts that four ranks can share: with two, one or four key
    heads, and a vocabulary that they do not divide.
    """
    found = text | {key: -(-text[key] // 4) * 4 for key in text if key in SHARED}
    if name in WITH_LATENTS:
        found["num_key_value_heads"] = found["num_attention_heads"]
    else:
        found["num_key_value_heads"] = (2, 1, 4)[number % 3]
    if "linear_num_key_heads" in text:
        per_key = text["linear_num_value_heads"] // text["linear_num_key_heads"]
        found["linear_num_value_heads"] = per_key * found["linear_num_key_heads"]
    if name in ("llama", "gemma3"):
        found["hidden_size"] = 6 * found["num_attention_heads"]
    if name == "gpt_oss":  # it has a bias behind its heads
        found["hidden_size"] = -(-text["hidden_size"] // 4) * 4
    if "vocab_size" in text:
        found |= {"vocab_size": text["vocab_size"] | 1, "tie_word_embeddings": name == "qwen3"}
    return found


def _even_widths(changes: dict[str, Any], draw: Random) -> dict[str, Any]:
    """Half of them have widths that grouped products take."""
    if draw.random() < 0.5:
        for key in EXPERT_WIDTHS & changes.keys():
            changes[key] = -(-changes[key] // 4) * 4
    return changes


def _heads(draw: Random, head_dims: tuple[int, ...]) -> dict[str, Any]:
    num_kv_heads = draw.randrange(1, 5)
    return {
        "head_dim": draw.choice(head_dims),
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_kv_heads * draw.randrange(1, 4),
    }


def _gpt2(draw: Random, num_layers: int) -> dict[str, Any]:
    heads = draw.randrange(1, 6)
    width = heads * draw.randrange(3, 9)
    return {"n_head": heads, "n_embd": width, "hidden_size": width, "n_layer": num_layers} | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_inner": draw.randrange(11, 64),
    }


def _experts(draw: Random, num_layers: int) -> dict[str, Any]:
    num_experts = draw.randrange(2, 10)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": draw.randrange(1, min(4, num_experts) + 1),
        "moe_intermediate_size": draw.randrange(5, 24),
        "norm_topk_prob": draw.random() < 0.5,
        "output_router_logits": draw.random() < 0.8,
        "router_aux_loss_coef": draw.choice((0.001, 0.03, 0.2)),
        "mlp_only_layers": [0] if num_layers > 1 and draw.random() < 0.3 else [],
    }


def _gpt_oss(draw: Random, num_layers: int) -> dict[str, Any]:
    num_experts = draw.randrange(2, 10)
    experts = {
        "num_local_experts": num_experts,
        "num_experts_per_tok": draw.randrange(1, min(4, num_experts) + 1),
        "output_router_logits": draw.random() < 0.5,
    }
    return experts | _windows(draw, num_layers)


def _windows(draw: Random, num_layers: int) -> dict[str, Any]:
    kinds = [draw.choice(("sliding_attention", "full_attention")) for _ in range(num_layers)]
    kinds[draw.randrange(num_layers)] = "sliding_attention"
    return {"sliding_window": draw.randrange(2, 50), "layer_types": kinds}


def _deepseek(draw: Random, num_layers: int) -> dict[str, Any]:
    heads = draw.randrange(1, 7)
    num_groups, rotated = draw.choice((1, 2)), draw.choice((2, 4, 6, 8))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice((None, draw.randrange(4, 16))),
        "kv_lora_rank": draw.randrange(4, 16),
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,
        "qk_nope_head_dim": draw.randrange(3, 10),
        "v_head_dim": draw.randrange(3, 10),
        "n_routed_experts": num_groups * draw.randrange(3, 6),
        "num_experts_per_tok": draw.randrange(1, 4),
        "n_group": num_groups,
        "topk_group": draw.randrange(1, num_groups + 1),
        "n_shared_experts": draw.randrange(1, 3),
        "moe_intermediate_size": draw.randrange(5, 24),
        "first_k_dense_replace": draw.randrange(0, num_layers),
    }


def _gated_delta(draw: Random, num_layers: int) -> dict[str, Any]:
    num_layers = max(2, num_layers)
    kinds = [
        draw.choice(("linear_attention", "linear_attention", "full_attention")) for _ in range(num_layers)
    ]
    one, other = draw.sample(range(num_layers), 2)
    kinds[one], kinds[other] = "linear_attention", "full_attention"
    num_key_heads = draw.randrange(1, 6)
    return {
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * draw.randrange(1, 4),
        "linear_key_head_dim": draw.randrange(2, 13),
        "linear_value_head_dim": draw.randrange(2, 13),
        "linear_conv_kernel_dim": draw.randrange(2, 6),
    }


def _gated_delta_experts(draw: Random, num_layers: int) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": draw.randrange(5, 24)}
    return _gated_delta(draw, num_layers) | _experts(draw, num_layers) | shared


OWN: dict[str, Callable[[Random, int], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "qwen3_moe": _experts,
    "gemma3": _windows,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "qwen3_next": _gated_delta_experts,
    "qwen3_5": _gated_delta,
    "qwen3_5_moe": _gated_delta_experts,
}


def media_changes(name: str, draw: Random, stages: int = 1) -> dict[str, dict[str, Any]]:
    """What a media model of this family has in its configs; its first stage has room for DeepStack."""
    fewest = stages if stages == 1 or name in ("qwen3_5", "qwen3_5_moe") else stages + 1
    experts = name in WITH_EXPERTS
    own = {"qwen3_5": _gated_delta, "qwen3_5_moe": _gated_delta_experts}.get(
        name, _experts if experts else lambda draw, num_layers: {}
    )
    num_layers = max(fewest, draw.randrange(2, 5))
    is_hybrid = name in ("qwen3_5", "qwen3_5_moe")
    text = {
        "hidden_size": draw.randrange(17, 48),
        "intermediate_size": draw.randrange(11, 64),
        "num_hidden_layers": num_layers,
        "initializer_range": draw.choice(SCALES),
        **_heads(draw, head_dims=(32, 48) if is_hybrid else (8, 12, 16)),
    } | own(draw, num_layers)
    text = _even_widths(text, draw) if experts else text
    rotated = text["head_dim"] // (8 if is_hybrid else 2)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3],
        "mrope_interleaved": True,
        **({"partial_rotary_factor": 0.25} if is_hybrid else {}),
    }
    heads = draw.randrange(1, 5)
    vision = {
        "depth": draw.randrange(2, 5),
        "hidden_size": heads * draw.choice((4, 8, 12)),
        "num_heads": heads,
        "intermediate_size": draw.randrange(11, 64),
        "out_hidden_size": text["hidden_size"],
    }
    changes = {"text_config": text, "vision_config": vision}
    if name == "qwen3_omni":
        heads = draw.randrange(1, 5)
        changes["audio_config"] = {
            "d_model": heads * draw.choice((4, 6, 8)),
            "encoder_attention_heads": heads,
            "encoder_layers": draw.randrange(1, 4),
            "encoder_ffn_dim": draw.randrange(11, 64),
            "downsample_hidden_size": draw.randrange(4, 12),
            "output_dim": text["hidden_size"],
        }
    return changes
