"""Rotary positions of one sample, computed for the sample alone, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .media_tokens import Ints, as_vector, placeholder_kinds
from .positions_omni import omni_positions
from .positions_vision import vision_positions

TEXT_KEYS = ("input_ids", "labels", "attention_mask", "mm_token_type_ids")
VISION_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
SECONDS_KEYS = ("second_per_grid_ts", "video_second_per_grid")
"""Two names for one thing: processors say the second, older ones and our samples the first."""
OMNI_KEYS = (
    *VISION_KEYS, *SECONDS_KEYS, "input_features", "feature_attention_mask", "audio_feature_lengths",
    "use_audio_in_video",
)  # fmt: skip


def text_positions(length: int) -> Tensor:
    """`[4, T]`: text, time, height and width agree where there is no media."""
    return torch.arange(length).expand(4, -1)


def sample_positions(sample: Mapping[str, Any], config: Any) -> Tensor:
    """`[4, T]` (text, time, height, width) of a sample as a processor gives it; placeholders, grids and audio
    lengths are checked against each other on the way.

    int64; float32 for Omni, whose time axis knows fractions.

    >>> from transformers import AutoConfig
    >>> config = AutoConfig.for_model("qwen3_vl", image_token_id=7)
    >>> sample_positions({"input_ids": [1, 7, 7, 2], "image_grid_thw": [[1, 2, 4]]}, config).tolist()
    [[0, 1, 2, 3], [0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    family = FAMILIES.get(config.model_type)
    known = (*TEXT_KEYS, *(family.media_keys if family else ()))
    for key in sample:
        if key not in known:
            raise ValueError(
                f"key {key!r} is not known for {config.model_type}; known are {', '.join(known)}"
            )
    ids_T = as_vector(sample["input_ids"], "input_ids")
    if family is None:
        return text_positions(len(ids_T))
    _check_types(sample, ids_T, config)
    _check_pixels(sample)
    positions_3T = family.positions(sample, ids_T, config)
    text_T = torch.arange(len(ids_T), dtype=positions_3T.dtype)
    return torch.cat([text_T[None], positions_3T])


def mel_frames(sample: Mapping[str, Any]) -> Ints | None:
    """`[clips]`: the mel frames of each clip of a sample; its mask, its features and its lengths must agree
    about them."""
    mask, features = sample.get("feature_attention_mask"), sample.get("input_features")
    lengths = sample.get("audio_feature_lengths")
    if mask is None:
        if features is not None and lengths is None:
            raise ValueError(
                "input_features come without feature_attention_mask, which tells the clips' lengths"
            )
        return None if lengths is None else as_vector(lengths, "audio_feature_lengths")
    mask_NF = np.asarray(mask)
    if mask_NF.ndim != 2 or (features is not None and _audio_shape(features) != mask_NF.shape):
        raise ValueError(
            f"feature_attention_mask has shape {mask_NF.shape}"
            + (f", input_features {tuple(features.shape)}" if features is not None else "")
            + "; they are [clips, frames] and [clips, mel bins, frames]"
        )
    frames_N = mask_NF.astype(np.int64).sum(1)
    if lengths is not None and as_vector(lengths, "audio_feature_lengths").tolist() != frames_N.tolist():
        raise ValueError(
            f"audio_feature_lengths is {np.asarray(lengths).tolist()}, but feature_attention_mask has "
            f"{frames_N.tolist()} frames"
        )
    return frames_N


def _vision(sample: Mapping[str, Any], ids_T: Ints, config: Any) -> Tensor:
    return vision_positions(
        placeholder_kinds(ids_T, config),
        sample.get("image_grid_thw"),
        sample.get("video_grid_thw"),
        config.vision_config.spatial_merge_size,
    )


def _omni(sample: Mapping[str, Any], ids_T: Ints, config: Any) -> Tensor:
    seconds = [sample[key] for key in SECONDS_KEYS if sample.get(key) is not None]
    if len(seconds) > 1:
        raise ValueError(f"{' and '.join(SECONDS_KEYS)} are two names for one thing; give one of them")
    return omni_positions(
        ids_T,
        config,
        sample.get("image_grid_thw"),
        sample.get("video_grid_thw"),
        seconds[0] if seconds else None,
        mel_frames(sample),
        bool(sample.get("use_audio_in_video", False)),
    )


class Family(NamedTuple):
    """What a multimodal family knows: its media keys, and its rule for time, height and width."""

    media_keys: tuple[str, ...]
    positions: Callable[[Mapping[str, Any], Ints, Any], Tensor]


FAMILIES = {
    "qwen3_vl": Family(VISION_KEYS, _vision),
    "qwen3_vl_moe": Family(VISION_KEYS, _vision),
    "qwen3_5": Family(VISION_KEYS, _vision),
    "qwen3_5_moe": Family(VISION_KEYS, _vision),
    "qwen3_omni_moe": Family(OMNI_KEYS, _omni),
    "qwen3_omni_moe_thinker": Family(OMNI_KEYS, _omni),
}
"""By the config's model type; all others are text."""


def _check_types(sample: Mapping[str, Any], ids_T: Ints, config: Any) -> None:
    """Features go to the tokens with the placeholder's id, so token types must say the same."""
    if sample.get("mm_token_type_ids") is None:
        return
    given_T = as_vector(sample["mm_token_type_ids"], "mm_token_type_ids")
    expected_T = placeholder_kinds(ids_T, config)
    if given_T.shape != expected_T.shape:
        raise ValueError(f"{len(given_T)} mm_token_type_ids for {len(ids_T)} input_ids; give one per token")
    wrong = (given_T != expected_T).nonzero()[0]
    if len(wrong):
        token = wrong[0]
        raise ValueError(
            f"mm_token_type_ids says {given_T[token]} for token {token}, whose id {ids_T[token]} is of type "
            f"{expected_T[token]}"
        )


def _check_pixels(sample: Mapping[str, Any]) -> None:
    """Pixels, where given, must be as many patches as the grids have."""
    for pixels_key, grid_key in (
        ("pixel_values", "image_grid_thw"),
        ("pixel_values_videos", "video_grid_thw"),
    ):
        pixels, grids = sample.get(pixels_key), sample.get(grid_key)
        if pixels is None:
            continue
        expected = 0 if grids is None else int(np.asarray(grids).prod(-1).sum())
        if len(pixels) != expected:
            raise ValueError(f"{pixels_key} has {len(pixels)} patches, but {grid_key} has {expected}")


def _audio_shape(features: Any) -> tuple[int, ...]:
    return (*features.shape[:1], *features.shape[2:])
