"""Rotary positions of one sample, computed for the sample alone, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .families import MediaFamily, family_of
from .media_tokens import Ints, as_vector, placeholder_kinds

TEXT_KEYS = ("input_ids", "labels", "attention_mask", "mm_token_type_ids", "fields")


def sample_positions(sample: Mapping[str, Any], config: Any) -> Tensor:
    """`[4, T]` (text, time, height, width) of a sample as a processor gives it; placeholders, grids and audio
    lengths are checked against each other on the way.

    int64; float32 for Omni, whose time axis knows fractions.

    >>> from transformers import AutoConfig
    >>> config = AutoConfig.for_model("qwen3_vl", image_token_id=7)
    >>> sample_positions({"input_ids": [1, 7, 7, 2], "image_grid_thw": [[1, 2, 4]]}, config).tolist()
    [[0, 1, 2, 3], [0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    family = family_of(config)
    _check_keys(sample, config, family)
    ids_T = as_vector(sample["input_ids"], "input_ids")
    if family is None:  # text, time, height and width agree where there is no media
        return torch.arange(len(ids_T)).expand(4, -1)
    _check_types(sample, ids_T, config)
    _check_pixels(sample)
    positions_3T = family.positions(sample, ids_T, config)
    text_T = torch.arange(len(ids_T), dtype=positions_3T.dtype)
    return torch.cat([text_T[None], positions_3T])


def _check_keys(sample: Mapping[str, Any], config: Any, family: MediaFamily | None) -> None:
    """Refuse what the model would not look at."""
    known = (*TEXT_KEYS, *((*family.keys, "media_ranks") if family else ()))
    for key in sample:
        if key not in known:
            raise ValueError(
                f"key {key!r} is not known for {config.model_type}; known are {', '.join(known)}"
            )


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
    """Pixels, where given, must be as many patches as the grids have, if they are those of all ranks."""
    if sample.get("media_ranks") is not None:
        return
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
