"""The media of a row: what each sample brings, checked, and the part of it that this rank encodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sequence_parallel.media import MediaItem, MediaPlan, assign_items, encoder_cost
from ..sequence_parallel.plans import RowPlans
from .families import MediaFamily
from .media_tokens import audio_tokens, media_config

KEYS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
    "audio": ("input_features", "feature_attention_mask"),
}
"""What a sample has of each kind: what the encoder takes, and how much of it is whose."""

MediaSize = tuple[int, int, int] | int
"""Time, height and width in patches; the mel frames of a clip."""


class MediaInput(NamedTuple):
    """An image, a video or a clip of a sample, and what its encoder takes."""

    item: MediaItem
    payload: Tensor
    """Patches `[P, C]` of an image or video, mel frames `[M, n]` of a clip; nothing, maybe, if another rank
    encodes it.
    """
    grid: tuple[int, int, int] | None
    """Time, height and width in patches; None for a clip."""


@dataclass(frozen=True)
class MediaBatch:
    """What this rank encodes, and where the features of all ranks go."""

    plan: MediaPlan
    own: tuple[MediaInput, ...]
    """In the order of `plan.own`."""

    @staticmethod
    def of(plans: RowPlans, inputs: Sequence[MediaInput]) -> MediaBatch:
        """A rank's part of a row's media; the payload of the others is let go."""
        rank = plans.rank * plans.tp + plans.tp_rank
        plan = MediaPlan.of(plans.layout, [media.item for media in inputs], rank, tp=plans.tp)
        by_item = {media.item: media for media in inputs}
        return MediaBatch(plan, tuple(by_item[item] for item in plan.own))

    def to(self, device: torch.device | str) -> MediaBatch:
        """The batch with its tensors on another device."""
        own = tuple(media._replace(payload=media.payload.to(device)) for media in self.own)
        return replace(self, plan=self.plan.to(device), own=own)


def sample_media(
    sample: Mapping[str, Any],
    number: int,
    first_token: int,
    ids: Tensor,
    config: Any,
    family: MediaFamily,
    rank: int = 0,
) -> list[MediaInput]:
    """The media of one sample, whose counts `sample_positions` has checked; its tokens start
    at `first_token`.

    Where the sample has `media_ranks`, pixels and mel frames are those of the media of `rank`
    alone; −1 has none.
    """
    token_ids = family.token_ids(config)
    sizes = {kind: _sizes(sample, number, kind) for kind in token_ids}
    ranks = _media_ranks(sample, number, sum(map(len, sizes.values())))
    found: list[MediaInput] = []
    for kind, token_id in token_ids.items():
        ranks_of_kind, ranks = ranks[: len(sizes[kind])], ranks[len(sizes[kind]) :]
        payloads = _payloads(
            sample, number, kind, sizes[kind], [rank >= 0 and r in (None, rank) for r in ranks_of_kind]
        )
        counts = [_num_tokens(size, config) for size in sizes[kind]]
        rows = (ids == token_id).nonzero().flatten()
        assert sum(counts) == len(rows), f"sample {number}: {kind} placeholders that its positions let pass"
        media = zip(sizes[kind], payloads, rows.split(counts), ranks_of_kind, strict=True)
        for index, (size, payload, part, encoder) in enumerate(media):
            tokens = _runs(part + first_token)
            item = MediaItem(kind, number, index, tokens, media_cost(size, config), encoder)
            found.append(MediaInput(item, payload, None if isinstance(size, int) else size))
    return found


def media_cost(size: MediaSize, config: Any) -> float:
    """What an encoder layer costs on a medium of this size, as all of a row's are compared by."""
    config = media_config(config)
    if isinstance(size, int):
        audio = config.audio_config
        return encoder_cost([audio_tokens(size, config)], audio.d_model, audio.encoder_ffn_dim)
    (time, height, width), vision = size, config.vision_config
    return encoder_cost([height * width] * time, vision.hidden_size, vision.intermediate_size)


def media_ranks(costs: Sequence[Sequence[float]], num_ranks: int) -> list[tuple[int, ...]]:
    """Who encodes each medium of each sample of a row, given what they cost.

    >>> media_ranks([[3.0], [], [9.0, 5.0]], num_ranks=2)
    [(1,), (), (0, 1)]
    """
    ranks = iter(assign_items([cost for of_sample in costs for cost in of_sample], num_ranks))
    return [tuple(islice(ranks, len(of_sample))) for of_sample in costs]


def _runs(rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Rows in order as ranges."""
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(rows)]
    return tuple((int(rows[start]), int(rows[stop - 1]) + 1) for start, stop in pairwise(edges))


def _media_ranks(sample: Mapping[str, Any], number: int, num_media: int) -> list[int | None]:
    ranks = sample.get("media_ranks")
    if ranks is None:
        return [None] * num_media
    if len(ranks) != num_media:
        raise ValueError(
            f"sample {number} has {len(ranks)} media_ranks for {num_media} images, videos and clips"
        )
    return [int(rank) for rank in ranks]


def _sizes(sample: Mapping[str, Any], number: int, kind: str) -> list[MediaSize]:
    payload_key, size_key = KEYS[kind]
    payload, sizes = sample.get(payload_key), sample.get(size_key)
    if (payload is None) != (sizes is None) and (sizes is None or sample.get("media_ranks") is None):
        raise ValueError(
            f"sample {number} has only one of {payload_key} and {size_key}; pass both, as the processor "
            "returns them"
        )
    if sizes is None:
        return []
    if kind == "audio":
        return [int(frames) for frames in torch.as_tensor(sizes).bool().sum(1)]
    return [(time, height, width) for time, height, width in torch.as_tensor(sizes).view(-1, 3).tolist()]


def _payloads(
    sample: Mapping[str, Any], number: int, kind: str, sizes: Sequence[MediaSize], is_own: Sequence[bool]
) -> list[Tensor]:
    """What the encoder takes of each medium; nothing of those that are not our own."""
    payload_key, size_key = KEYS[kind]
    if not any(is_own):
        return [torch.empty(0) for _ in sizes]
    if sample.get(payload_key) is None:
        raise ValueError(f"sample {number} has no {payload_key}, though this rank encodes some of its media")
    payload = torch.as_tensor(sample[payload_key])
    if kind == "audio":  # clips of a sample are made together; their padding is cut off
        masks = torch.as_tensor(sample[size_key]).bool()
        return [
            clip[:, keep] if own else torch.empty(0)
            for clip, keep, own in zip(payload, masks, is_own, strict=True)
        ]
    grids = torch.as_tensor(sample[size_key]).view(-1, 3)
    patches = (grids.prod(1) * torch.tensor(is_own)).tolist()
    if sum(patches) != len(payload):
        raise ValueError(
            f"sample {number}: {payload_key} has {len(payload)} patches, but this rank's media have "
            f"{sum(patches)}"
        )
    return list(payload.split(patches))


def _num_tokens(size: MediaSize, config: Any) -> int:
    if isinstance(size, int):
        return audio_tokens(size, config)
    return math.prod(size) // int(config.vision_config.spatial_merge_size) ** 2
