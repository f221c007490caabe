"""How many tokens a media item has, and which tokens of a sample are its placeholders.

T: tokens of one sample; N: media items; 3: time, height, width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TEXT, IMAGE, VIDEO, AUDIO = range(4)
"""Token types, numbered as the processors of transformers number them."""

KINDS = ("text", "image", "video", "audio")

NUM_CONVOLUTIONS = 3
"""Convolutions in front of the audio encoder, each of kernel 3, stride 2, padding 1: n → ⌈n / 2⌉ frames."""

Ints = NDArray[np.int64]


def token_types(input_ids: Any, config: Any) -> Tensor:
    """`[T]`: 0 text, 1 image, 2 video, 3 audio, by the placeholder ids of the config."""
    return torch.from_numpy(placeholder_kinds(as_vector(input_ids, "input_ids"), config))


def num_media_tokens(grid: Any, merge_size: int) -> int:
    """Tokens that an image or a whole video of `grid` (time, height, width in patches) has in the text.

    >>> num_media_tokens([1, 4, 6], merge_size=2)
    6
    """
    return int(token_grids(np.asarray(grid)[None], "grid", merge_size).prod())


def audio_tokens(num_mel_frames: int, config: Any) -> int:
    """Tokens of a clip of so many mel frames.

    The encoder cuts a clip into chunks of 2·`n_window` frames and convolves each chunk alone. Three
    convolutions of stride 2 each halve the frames and round up: with `n_window` 50 a whole chunk, one second,
    goes 100 → 50 → 25 → 13; the last, shorter chunk of r frames gives ⌈r / 8⌉. The stock model writes the 13
    as a constant, and fails where `n_window` makes it another number (anything but 49 to 52).

    >>> from transformers import AutoConfig
    >>> config = AutoConfig.for_model("qwen3_omni_moe_thinker", audio_config={"n_window": 50})
    >>> [audio_tokens(n, config) for n in (1, 100, 101, 3000)]
    [1, 13, 14, 390]
    """
    chunk = 2 * media_config(config).audio_config.n_window
    whole, rest = divmod(num_mel_frames, chunk)
    return whole * _convolved(chunk) + _convolved(rest)


def media_config(config: Any) -> Any:
    """The config that knows the placeholders: the model's own, or the thinker's within the whole Omni's."""
    return getattr(config, "thinker_config", config)


def placeholder_kinds(ids_T: Ints, config: Any) -> Ints:
    """`token_types` on arrays."""
    config = media_config(config)
    types_T = np.zeros_like(ids_T)
    for kind in (IMAGE, VIDEO, AUDIO):
        token = getattr(config, f"{KINDS[kind]}_token_id", None)
        if token is not None:
            types_T[ids_T == token] = kind
    return types_T


def as_vector(value: Any, what: str) -> Ints:
    """One sample's `[T]` integers, from a list, an array or a tensor, also with a batch dimension of one."""
    array = np.asarray(value)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise ValueError(f"{what} has shape {array.shape}; one sample is [T]")
    if array.size and array.dtype.kind not in "iub":
        raise ValueError(f"{what} has dtype {array.dtype}; it holds integers")
    return array.astype(np.int64, copy=False)


def token_grids(grids: Any, what: str, merge_size: int) -> Ints:
    """`[N, 3]` grids counted in tokens: height and width in patches over the merge size, which
    divides them."""
    if grids is None or len(grids) == 0:
        return np.zeros((0, 3), np.int64)
    grid_N3 = np.asarray(grids)
    if grid_N3.ndim != 2 or grid_N3.shape[1] != 3 or grid_N3.dtype.kind not in "iu":
        raise ValueError(
            f"{what} has shape {grid_N3.shape} and dtype {grid_N3.dtype}; it is [items, 3] integers: time, "
            "height and width in patches"
        )
    bad = ((grid_N3 < 1).any(1) | (grid_N3[:, 1:] % merge_size != 0).any(1)).nonzero()[0]
    if len(bad):
        raise ValueError(
            f"{what}: item {bad[0]} is {times(grid_N3[bad[0]])} patches; each number must be at least 1, and "
            f"height and width multiples of the merge size {merge_size}"
        )
    return grid_N3.astype(np.int64) // np.array([1, merge_size, merge_size])


def times(grid: Any) -> str:
    """A grid as people write it: 1×4×6."""
    return "×".join(str(int(size)) for size in grid)


def runs(mask_T: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """First token and length of each run of True."""
    edges = np.diff(np.concatenate([[False], mask_T, [False]]).astype(np.int8))
    starts = (edges == 1).nonzero()[0]
    return starts, (edges == -1).nonzero()[0] - starts


def _convolved(frames: int) -> int:
    for _ in range(NUM_CONVOLUTIONS):
        frames = -(-frames // 2)
    return frames


def mel_frames(sample: Mapping[str, Any]) -> Ints | None:
    """`[clips]`: the mel frames of each clip of a sample; its mask, its features and its lengths must agree
    about them."""
    mask, features = sample.get("feature_attention_mask"), sample.get("input_features")
    lengths = sample.get("audio_feature_lengths")
    if mask is None:
        if features is not None and lengths is None:
            raise ValueError("input_features need feature_attention_mask, which has the lengths of the clips")
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


def _audio_shape(features: Any) -> tuple[int, ...]:
    return (*features.shape[:1], *features.shape[2:])
