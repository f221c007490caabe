"""Rotary positions of images and video frames: qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe.

T: tokens of one sample; N: media items; 3: time, height, width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .media_tokens import IMAGE, TEXT, VIDEO, Ints, as_vector, placeholder_kinds, runs, times, token_grids


def vision_positions(token_types_T: Any, image_grids: Any, video_grids: Any, merge_size: int) -> Tensor:
    """`[3, T]`: text counts on in all rows; an item is its grid plus its start, and what follows starts
    max(height, width) later.

    Timestamps stand between the frames of a video, so each frame is an item of its own. Where items of
    one kind touch, the stock models take them for one item and fail; here each is placed by its own
    grid, in order.
    """
    types_T = as_vector(token_types_T, "mm_token_type_ids")
    if len(types_T) and not TEXT <= types_T.min() <= types_T.max() <= VIDEO:
        raise ValueError(
            f"mm_token_type_ids holds values from {types_T.min()} to {types_T.max()}; known are 0 (text), "
            "1 (image) and 2 (video)"
        )
    image_N3 = token_grids(image_grids, "image_grid_thw", merge_size)
    video_N3 = token_grids(video_grids, "video_grid_thw", merge_size)
    frame_N3 = video_N3.repeat(video_N3[:, 0], axis=0)
    frame_N3[:, 0] = 1

    def frame_name(number: int) -> str:
        ends_N = video_N3[:, 0].cumsum()
        video = int(ends_N.searchsorted(number, side="right"))
        return f"video {video}, frame {number - ends_N[video] + video_N3[video, 0]}"

    image_at_T, image_starts_N = _place_items(types_T == IMAGE, image_N3, "image", "image {}".format)
    frame_at_T, frame_starts_N = _place_items(types_T == VIDEO, frame_N3, "video", frame_name)
    # How far each token moves what follows it; an item does so once, at its first token.
    steps_T = (types_T == TEXT).astype(np.int64)
    steps_T[image_starts_N] = image_N3[:, 1:].max(1)
    steps_T[frame_starts_N] = frame_N3[:, 1:].max(1)
    starts_T = steps_T.cumsum() - steps_T
    positions_3T = np.tile(starts_T, (3, 1))
    for at_T, starts_N, grid_N3 in (
        (image_at_T, image_starts_N, image_N3),
        (frame_at_T, frame_starts_N, frame_N3),
    ):
        if len(at_T):
            positions_3T[:, at_T] = _grid_offsets(grid_N3) + starts_T[starts_N].repeat(grid_N3.prod(1))
    return torch.from_numpy(positions_3T)


def _place_items(
    mask_T: NDArray[np.bool_], grid_N3: Ints, kind: str, name: Callable[[int], str]
) -> tuple[Ints, Ints]:
    """The tokens of all items in order, and the first token of each; every item must lie in one piece."""
    at_T = mask_T.nonzero()[0]
    counts_N = grid_N3.prod(1)
    ends_N = counts_N.cumsum()
    if len(at_T) == counts_N.sum():
        starts_N = at_T[ends_N - counts_N]
        if (at_T[ends_N - 1] - starts_N == counts_N - 1).all():
            return at_T, starts_N
    raise ValueError(_mismatch(*runs(mask_T), grid_N3, kind, name))


def _mismatch(starts: Ints, lengths: Ints, grid_N3: Ints, kind: str, name: Callable[[int], str]) -> str:
    """Which item the runs of placeholders first disagree with."""
    counts = grid_N3.prod(1).tolist()
    free = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    # A run for each item: then a run that is too long is the item's own fault, not that of the next one.
    one_each = len(free) == len(counts)
    for number, count in enumerate(counts):
        start, found = free.pop(0) if free else (-1, 0)
        if found < count or (one_each and found != count):
            return (
                f"{name(number)} ({times(grid_N3[number])} tokens) needs {count} {kind} placeholders, found "
                f"{found}" + (f" at token {start}" if found else "")
            )
        if found > count:
            free.insert(0, (start + count, found - count))
    left = sum(length for _, length in free)
    return (
        f"{left} {kind} placeholders from token {free[0][0]} on belong to no {kind}: {kind}_grid_thw needs "
        f"{sum(counts)} in all, found {sum(counts) + left}"
    )


def _grid_offsets(grid_N3: Ints) -> Ints:
    """`[3, tokens]`: where each token of each item stands in the item's grid, width running fastest."""
    counts_N = grid_N3.prod(1)
    offset = np.arange(counts_N.sum()) - (counts_N.cumsum() - counts_N).repeat(counts_N)
    height, width = grid_N3[:, 1].repeat(counts_N), grid_N3[:, 2].repeat(counts_N)
    row = offset // width
    frame = row // height
    return np.stack([frame, row - frame * height, offset - row * width])


def vision_sample_positions(sample: Mapping[str, Any], ids_T: Ints, config: Any) -> Tensor:
    """Those of a sample of Qwen3-VL or Qwen3.5."""
    return vision_positions(
        placeholder_kinds(ids_T, config),
        sample.get("image_grid_thw"),
        sample.get("video_grid_thw"),
        config.vision_config.spatial_merge_size,
    )
