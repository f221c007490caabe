"""Tiny models with a processor or tokenizer of their own, for training on a laptop without any download."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Tokenizer, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ..models.tiny.decoders import tiny_config
from ..models.tiny.media import MEDIA_FAMILIES, TEXT_MODELS, tiny_media_class, tiny_media_config
from .media.processor import VIDEO_PROCESSORS, VideoSettings, make_processor

BPE_TOKENS = 384
VOCABULARY = 400
"""Rows of the embedding; a few more than there are tokens, as in real checkpoints."""

INITIALIZER_RANGE = 0.02
"""Small enough that the loss starts at ln(`VOCABULARY`)."""

CORPUS = """
What is in the picture? It is a small red square on a white ground. How many are there? There are
three of them. The answer is seven. Please describe what you see and hear, in one short sentence. I
see a cat that sleeps on the chair; I hear the rain. Which number is written here? The number is 42.
What happens in the video? A ball falls down and the boy picks it up. You are a helpful assistant.
Read the digits from left to right: 0 1 2 3 4 5 6 7 8 9. Thank you! Let me think about it. First, we
look at the colour, then at the shape. Yes, it is. No, it is not. user system assistant tool
{"name": "add", "arguments": {"a": 1, "b": 2}}
"""
PATTERN = r"'s|'t| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MEDIA_SPECIAL = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
PLAIN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHAT_TEMPLATE = """\
{%- macro say(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type == 'audio' -%}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
            {%- else -%}
                {{- '<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- say(messages[0].content) ~ '\\n' -}}{%- endif -%}
    {{- 'Tools:' -}}
    {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if not (tools and loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' ~ ('user' if message.role == 'tool' else message.role) ~ '\\n' -}}
    {%- if message.reasoning_content -%}
        {{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- say(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '\\n<tool_call>\\n' ~ ((call.function or call) | tojson) ~ '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML, as the Qwen models speak it."""


def tiny_training_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, Any]:
    """A tiny model that can be trained, and its processor (media families) or tokenizer (text decoders).

    Args:
        name: of `MEDIA_FAMILIES` (`qwen3_vl`, `qwen3_5`, `qwen3_omni`, …) or of the text models that
            `seqbraid verify` knows (`llama`, `qwen3`, `qwen3_5_text`, …).
        seed: of the weights.
        dtype: of the weights.
    """
    if name not in MEDIA_FAMILIES and name not in TEXT_MODELS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join([*MEDIA_FAMILIES, *TEXT_MODELS])}")
    is_media = name in MEDIA_FAMILIES
    tokenizer = tiny_tokenizer(with_media=is_media)
    config = tiny_media_config(name) if is_media else tiny_config(TEXT_MODELS[name])
    _prepare(config, tokenizer)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = tiny_media_class(name)(config) if is_media else AutoModelForCausalLM.from_config(config)
    torch.random.set_rng_state(state)
    if TEXT_MODELS.get(name) != "gpt_oss":
        model.set_attn_implementation("sdpa")
    return model.to(dtype).train(), tiny_processor(name, tokenizer) if is_media else tokenizer


def tiny_tokenizer(with_media: bool = True) -> Any:
    """A byte-level tokenizer of some 390 tokens, with Qwen's special ones, trained here from `CORPUS`."""
    model = _trained()
    tokenizer = Qwen2Tokenizer(
        vocab=dict(model["vocab"]),
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=MEDIA_SPECIAL if with_media else {},
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens(list(PLAIN_TAGS))
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) <= VOCABULARY
    return tokenizer


def tiny_processor(name: str, tokenizer: Any) -> Any:
    """The stock processor of a media family at the sizes of its tiny model."""
    is_omni = "audio_config" in MEDIA_FAMILIES[name][2]
    kind = "Qwen3OmniMoeProcessor" if is_omni else "Qwen3VLProcessor"
    vision = MEDIA_FAMILIES[name][2]["vision_config"]
    sizes = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "image_processor": Qwen2VLImageProcessorPil(
            **sizes,
            size={"shortest_edge": 8 * 8, "longest_edge": 32 * 32},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        "video_processor": VideoSettings(
            VIDEO_PROCESSORS[kind],
            **sizes,
            size={"shortest_edge": 4 * 8 * 8, "longest_edge": 8 * 32 * 32},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            min_frames=2,
            max_frames=8,
        ),
    }
    if is_omni:
        mel_bins = MEDIA_FAMILIES[name][2]["audio_config"]["num_mel_bins"]
        parts["feature_extractor"] = WhisperFeatureExtractor(feature_size=mel_bins)
    return make_processor(kind, CHAT_TEMPLATE, **parts)


@cache
def _trained() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def _prepare(config: Any, tokenizer: Any) -> None:
    """The tokenizer's ids and a start that can be trained, in the config and those inside it."""
    text = config.get_text_config()
    inner = [getattr(config, name, None) for name in ("vision_config", "audio_config")]
    for part in {id(part): part for part in (config, text, *inner) if part is not None}.values():
        part.initializer_range = INITIALIZER_RANGE
    text.vocab_size = VOCABULARY
    text.eos_token_id = tokenizer.eos_token_id
    text.pad_token_id = tokenizer.pad_token_id
    if hasattr(text, "router_aux_loss_coef"):
        text.router_aux_loss_coef, text.output_router_logits = 0.0, False
    if config is text:
        return
    for kind in ("image", "video", "audio"):
        if hasattr(config, f"{kind}_token_id"):
            setattr(config, f"{kind}_token_id", getattr(tokenizer, f"{kind}_token_id"))
    for kind in ("vision", "audio"):
        for end, name in (("start", "bos"), ("end", "eos")):
            if hasattr(config, f"{kind}_{end}_token_id"):
                setattr(config, f"{kind}_{end}_token_id", getattr(tokenizer, f"{kind}_{name}_token_id"))
