"""Real widths with few layers and random weights, and the rows that they are timed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from seqbraid.models.media_tokens import TEXT, audio_tokens, media_config, token_types
from seqbraid.plan.flops import MediaSizes

LONGEST = 1 << 20
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LINEAR_HEADS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 5e6,
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}
EXPERTS_30B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
} | HEADS | {"num_key_value_heads": 4}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The samples of a step."""

    samples: list[dict[str, Any]]
    media: MediaSizes = field(default_factory=MediaSizes)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(sample["input_ids"]) for sample in self.samples]

    @property
    def label_tokens(self) -> int:
        """Targets of all samples; the first token of a sample is none."""
        return sum(int((sample["labels"][1:] != -100).sum()) for sample in self.samples)


@dataclass(frozen=True)
class Case:
    """One width."""

    config: Callable[[int], Any]
    """By the number of layers."""
    layers: int
    row: Callable[[Any, int, str], Row]
    """By config, tokens and kind of row."""
    liger: str
    """The function of Liger that patches this family."""
    model_class: Any = AutoModelForCausalLM

    def build(self, config: Any) -> PreTrainedModel:
        """The stock model on the GPU, the same weights each time."""
        torch.manual_seed(0)
        with torch.device("cuda"):
            if self.model_class is AutoModelForCausalLM:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            else:
                model = self.model_class._from_config(config, dtype=torch.bfloat16)
        return model.train()


def row_lengths(tokens: int, kind: str) -> list[int]:
    """One sequence, or heavy-tailed lengths that fill the row."""
    if kind == "one":
        return [tokens]
    generator = torch.Generator().manual_seed(7)
    found, left = [], tokens
    while left:
        drawn = float(torch.empty(1).log_normal_(6.6, 1.1, generator=generator))
        found.append(int(min(left, max(64, drawn))))
        left -= found[-1]
    return found


def text_row(config: Any, tokens: int, kind: str) -> Row:
    """Random ids, every token a label."""
    generator = torch.Generator().manual_seed(1)
    ids = [
        torch.randint(0, config.vocab_size, (length,), generator=generator)
        for length in row_lengths(tokens, kind)
    ]
    return Row([{"input_ids": x, "labels": x} for x in ids])


def video_row(config: Any, tokens: int, kind: str) -> Row:
    """One sample: a question, a video whose frames have 22 × 22 tokens and a timestamp, an answer."""
    generator, side = torch.Generator().manual_seed(1), 22
    merge, vision = config.vision_config.spatial_merge_size, config.vision_config
    frames = max(1, (tokens - 1024) // (side * side + 8))
    frame = [config.vision_start_token_id, *[config.video_token_id] * side**2, config.vision_end_token_id]
    ids = _text(config, 64, generator)
    for _ in range(frames):
        ids = torch.cat([ids, _text(config, 6, generator), torch.tensor(frame)])
    ids = torch.cat([ids, _text(config, 1024, generator)])
    grid = [frames, side * merge, side * merge]
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    sample = _labelled(ids, config) | {
        "video_grid_thw": torch.tensor([grid]),
        "pixel_values_videos": torch.randn(
            grid[0] * grid[1] * grid[2], patch, generator=generator
        ).bfloat16(),
    }
    return Row([sample], MediaSizes(grids=[(grid[0], grid[1], grid[2])]))


def audio_row(config: Any, tokens: int, kind: str) -> Row:
    """One sample: clips of half a minute, each with 100 tokens of text after it."""
    generator, frames = torch.Generator().manual_seed(1), 3000
    media = media_config(config)
    clip = [media.audio_start_token_id, *[media.audio_token_id] * audio_tokens(frames, config)]
    count = max(1, tokens // (len(clip) + 100))
    parts = [x for _ in range(count) for x in (torch.tensor(clip), _text(config, 100, generator))]
    mel = media.audio_config.num_mel_bins
    sample = _labelled(torch.cat(parts), config) | {
        "input_features": torch.randn(count, mel, frames, generator=generator).bfloat16(),
        "feature_attention_mask": torch.ones(count, frames, dtype=torch.long),
    }
    del sample["mm_token_type_ids"]
    return Row([sample], MediaSizes(mel_frames=[frames] * count))


def _text(config: Any, length: int, generator: torch.Generator) -> Tensor:
    """Ids below all that have a meaning of their own."""
    return torch.randint(0, 150_000, (length,), generator=generator)


def _labelled(ids: Tensor, config: Any) -> dict[str, Any]:
    types = token_types(ids, config)
    return {
        "input_ids": ids,
        "labels": torch.where(types == TEXT, ids, -100),
        "mm_token_type_ids": types,
    }


def _qwen3(hidden: int, intermediate: int, tied: bool) -> Callable[[int], Any]:
    return lambda layers: transformers.Qwen3Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        max_position_embeddings=LONGEST, tie_word_embeddings=tied, **HEADS,
    )  # fmt: skip


def _qwen3_moe(layers: int) -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=151936, num_hidden_layers=layers, max_position_embeddings=LONGEST, **EXPERTS_30B
    )


def _qwen3_5(layers: int) -> Any:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, max_position_embeddings=LONGEST,
        tie_word_embeddings=False, **LINEAR_HEADS,
    )  # fmt: skip


def _qwen3_5_moe(layers: int) -> Any:
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(
        vocab_size=248320, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=2, head_dim=256, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512,
        max_position_embeddings=LONGEST, tie_word_embeddings=False, **LINEAR_HEADS,
    )  # fmt: skip


def _qwen3_vl(layers: int) -> Any:
    text = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288} | HEADS
    text |= {"num_hidden_layers": layers, "max_position_embeddings": LONGEST, "rope_parameters": MROPE}
    vision = {"depth": 9, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16}
    vision |= {"out_hidden_size": 4096, "deepstack_visual_indexes": [2, 5, 8]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


def _qwen3_omni(layers: int) -> Any:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    text = {"vocab_size": 152064, "num_hidden_layers": layers, "max_position_embeddings": LONGEST}
    text |= EXPERTS_30B | {"rope_parameters": MROPE}
    audio = {"d_model": 1280, "encoder_layers": 8, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    audio |= {"output_dim": 2048, "n_window": 50, "n_window_infer": 800}
    return Qwen3OmniMoeThinkerConfig(
        text_config=text, audio_config=audio, vision_start_token_id=151652, vision_end_token_id=151653
    )


def _omni_class() -> Any:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    return Qwen3OmniMoeThinkerForConditionalGeneration


CASES: dict[str, Callable[[], Case]] = {
    "qwen3_4b": lambda: Case(_qwen3(2560, 9728, True), 6, text_row, "qwen3"),
    "qwen3_8b": lambda: Case(_qwen3(4096, 12288, False), 4, text_row, "qwen3"),
    "qwen3_30b_a3b": lambda: Case(_qwen3_moe, 4, text_row, "qwen3_moe"),
    "qwen3_5_9b": lambda: Case(_qwen3_5, 8, text_row, "qwen3_5"),
    "qwen3_5_35b_a3b": lambda: Case(_qwen3_5_moe, 4, text_row, "qwen3_5_moe"),
    "qwen3_vl_8b": lambda: Case(
        _qwen3_vl, 4, video_row, "qwen3_vl", transformers.Qwen3VLForConditionalGeneration
    ),
    "qwen3_omni_30b_a3b": lambda: Case(_qwen3_omni, 4, audio_row, "", _omni_class()),
}
