"""Tiny media models of every family we know, made from configs."""

from __future__ import annotations

import importlib
from itertools import count
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from .decoders import COMMON, EXPERTS, FAMILIES, GATED_DELTA, SHARED_EXPERT, shake
from .media_samples import item_kinds, media_sample

VOCABULARY = 120
IDS = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
AUDIO_IDS = {"audio_token_id": 104, "audio_start_token_id": 105, "audio_end_token_id": 106}

TEXT: dict[str, Any] = COMMON | {
    "vocab_size": VOCABULARY,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QUARTER_ROPE: dict[str, Any] = {
    "head_dim": 32,
    "rope_parameters": TEXT["rope_parameters"] | {"partial_rotary_factor": 0.25},
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": COMMON["hidden_size"],
    "initializer_range": 0.2,
}
DEEPSTACK: dict[str, Any] = {"deepstack_visual_indexes": [0, 1]}
AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "downsample_hidden_size": 8,
    "output_dim": COMMON["hidden_size"],
    "n_window": 50,
    "n_window_infer": 400,
    "conv_chunksize": 8,
    "initializer_range": 0.2,
    "max_source_positions": 200,
}

MEDIA_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_vl": (
        "qwen3_vl",
        "Qwen3VL{}",
        {"text_config": TEXT | {"num_hidden_layers": 3}, "vision_config": VISION | DEEPSTACK} | IDS,
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        "Qwen3VLMoe{}",
        {"text_config": TEXT | EXPERTS | {"num_hidden_layers": 3}, "vision_config": VISION | DEEPSTACK} | IDS,
    ),
    "qwen3_5": (
        "qwen3_5",
        "Qwen3_5{}",
        {"text_config": TEXT | GATED_DELTA | QUARTER_ROPE, "vision_config": VISION} | IDS,
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        "Qwen3_5Moe{}",
        {"text_config": TEXT | GATED_DELTA | QUARTER_ROPE | EXPERTS | SHARED_EXPERT, "vision_config": VISION}
        | IDS,
    ),
    "qwen3_omni": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeThinker{}",
        {
            "text_config": TEXT | EXPERTS | {"num_hidden_layers": 3},
            "vision_config": VISION | DEEPSTACK,
            "audio_config": AUDIO,
        }
        | IDS
        | AUDIO_IDS,
    ),
}
"""Name to module of transformers, class pattern, and config."""

TEXT_MODELS = {f"{name}_text" if name in MEDIA_FAMILIES else name: name for name in FAMILIES}
"""Tiny text models by the name they have on the command line: a media model of the same name goes first."""


def tiny_media_config(family: str, **changes: dict[str, Any]) -> Any:
    """The config of a tiny media model; changes are those of its `text_config`, `vision_config` …"""
    module, pattern, values = MEDIA_FAMILIES[family]
    values = values | {name: values[name] | own for name, own in changes.items()}
    configs = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    config_class = getattr(configs, pattern.format("Config"))
    config = config_class(**values, tie_word_embeddings=False, initializer_range=0.2)
    if not hasattr(_modeling(module), pattern.format("Model")):
        # Before it had a model below its head, Omni's thinker gave no router logits.
        config.get_text_config().output_router_logits = False
    return config


def tiny_media_class(family: str) -> type[PreTrainedModel]:
    """The stock class that a tiny media model is made of."""
    module, pattern, _ = MEDIA_FAMILIES[family]
    found: type[PreTrainedModel] = getattr(_modeling(module), pattern.format("ForConditionalGeneration"))
    return found


def _modeling(module: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{module}.modeling_{module}")


def tiny_media_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: dict[str, Any]
) -> PreTrainedModel:
    """A tiny media model of this family with random weights."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = tiny_media_class(family)(tiny_media_config(family, **changes))
    model.set_attn_implementation("sdpa")
    shake(model)
    torch.random.set_rng_state(state)
    return model.to(dtype).train()


def mixed_samples(config: Any, seed: int = 0) -> list[dict[str, Any]]:
    """Text alone, one image, several, a video, one that ends in an image, an image and a video of one size,
    two tokens; and what can be heard."""
    rows: list[tuple[list[str], list[int], int]] = [
        ([], [30], 1),
        (["image"], [5, 10], 4),
        (["image", "image", "image"], [3, 2, 4, 7], 5),
        (["video"], [4, 6], 4),
        (["image", "video"], [1, 2, 2], 3),
        ([], [2], 1),
    ]
    if "audio" in item_kinds(config):
        rows += [(["audio"], [4, 6], 1), (["audio", "image", "audio"], [2, 3, 1, 5], 3)]
        rows += [(["video with audio"], [3, 4], 4), (["video with audio", "image"], [3, 1, 4], 3)]
    samples = [
        media_sample(
            config, items, 100 * seed + number, text, max_side=side, max_mel_frames=320, encoder_inputs=True
        )
        for number, (items, text, side) in enumerate(rows)
    ]
    same = media_sample(
        config, ["image", "video"], seed, [2, 1, 3], max_side=1, max_frames=1, encoder_inputs=True
    )
    drawn = (
        media_sample(config, ["image"], 100 * seed + number, [9, 0], max_side=18, encoder_inputs=True)
        for number in count()
    )
    large = next(sample for sample in drawn if len(sample["input_ids"]) > 200)
    return [*samples, same, large]
