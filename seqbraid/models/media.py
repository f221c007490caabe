"""The media of a row: what each sample brings, checked, and the part of it that this rank encodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import SequenceLayout
from ..sequence_parallel.media import MediaItem, MediaPlan, encoder_cost
from .families import MediaFamily
from .media_tokens import audio_tokens

PIXELS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


class MediaInput(NamedTuple):
    """An image, a video or a clip of a sample, and what its encoder takes."""

    item: MediaItem
    payload: Tensor
    """Patches `[P, C]` of an image or video, mel frames `[M, n]` of a clip."""
    grid: tuple[int, int, int] | None
    """Time, height and width in patches; None for a clip."""


@dataclass(frozen=True)
class MediaBatch:
    """What this rank encodes, and where the features of all ranks go."""

    plan: MediaPlan
    own: tuple[MediaInput, ...]
    """In the order of `plan.own`."""

    @staticmethod
    def of(layout: SequenceLayout, inputs: Sequence[MediaInput], rank: int) -> MediaBatch:
        """A rank's part of a row's media; the payload of the others is let go."""
        plan = MediaPlan.of(layout, [media.item for media in inputs], rank)
        by_item = {media.item: media for media in inputs}
        return MediaBatch(plan, tuple(by_item[item] for item in plan.own))

    def to(self, device: torch.device | str) -> MediaBatch:
        """The batch with its tensors on another device."""
        own = tuple(media._replace(payload=media.payload.to(device)) for media in self.own)
        return replace(self, plan=self.plan.to(device), own=own)


def sample_media(
    sample: Mapping[str, Any], number: int, first_token: int, ids: Tensor, config: Any, family: MediaFamily
) -> list[MediaInput]:
    """The media of one sample, whose counts `sample_positions` has checked; its tokens start at
    `first_token`.
    """
    found: list[MediaInput] = []
    for kind, token_id in family.token_ids(config).items():
        pieces = _clips(sample, number) if kind == "audio" else _pictures(sample, number, kind)
        counts = [_num_tokens(payload, grid, config) for payload, grid in pieces]
        rows = (ids == token_id).nonzero().flatten()
        assert sum(counts) == len(rows), f"sample {number}: {kind} placeholders that its positions let pass"
        for index, ((payload, grid), part) in enumerate(zip(pieces, rows.split(counts), strict=True)):
            item = MediaItem(kind, number, index, _runs(part + first_token), _cost(payload, grid, config))
            found.append(MediaInput(item, payload, grid))
    return found


def _runs(rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Rows in order as ranges."""
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return tuple((int(rows[start]), int(rows[stop - 1]) + 1) for start, stop in pairwise(edges))


def _pictures(
    sample: Mapping[str, Any], number: int, kind: str
) -> list[tuple[Tensor, tuple[int, int, int] | None]]:
    pixel_key, grid_key = PIXELS[kind]
    if (sample.get(pixel_key) is None) != (sample.get(grid_key) is None):
        raise ValueError(
            f"sample {number} has only one of {pixel_key} and {grid_key}; a processor gives both"
        )
    if sample.get(pixel_key) is None:
        return []
    pixels, grids = torch.as_tensor(sample[pixel_key]), torch.as_tensor(sample[grid_key]).view(-1, 3)
    sizes = grids.prod(1).tolist()
    return [(part, tuple(grid)) for part, grid in zip(pixels.split(sizes), grids.tolist(), strict=True)]


def _clips(sample: Mapping[str, Any], number: int) -> list[tuple[Tensor, tuple[int, int, int] | None]]:
    """Mel frames of each clip, its padding cut off."""
    features, mask = sample.get("input_features"), sample.get("feature_attention_mask")
    if (features is None) != (mask is None):
        raise ValueError(
            f"sample {number} has only one of input_features and feature_attention_mask; a processor gives "
            "both"
        )
    if features is None or mask is None:
        return []
    features, mask = torch.as_tensor(features), torch.as_tensor(mask)
    return [(clip[:, keep.bool()], None) for clip, keep in zip(features, mask, strict=True)]


def _num_tokens(payload: Tensor, grid: tuple[int, int, int] | None, config: Any) -> int:
    if grid is None:
        return audio_tokens(payload.shape[1], config)
    return len(payload) // int(config.vision_config.spatial_merge_size) ** 2


def _cost(payload: Tensor, grid: tuple[int, int, int] | None, config: Any) -> float:
    if grid is None:
        audio = config.audio_config
        return encoder_cost([audio_tokens(payload.shape[1], config)], audio.d_model, audio.encoder_ffn_dim)
    (time, height, width), vision = grid, config.vision_config
    return encoder_cost([height * width] * time, vision.hidden_size, vision.intermediate_size)
