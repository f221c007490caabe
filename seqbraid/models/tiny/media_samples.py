"""Random multimodal samples of a family: token ids with their placeholders, grids, clips, and what the
encoders read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...layout.labels import IGNORE
from ..media_tokens import AUDIO, TEXT, VIDEO, audio_tokens, media_config, num_media_tokens, token_types

ITEMS = {"vision": ("image", "video"), "omni": ("image", "video", "audio", "video with audio")}
"""What a sample can hold; `image` and `video` are known to all."""

FRAME_SECONDS = (0.03, 1 / 3, 0.4, 2 / 3, 0.97, 2.0)
"""Seconds per step of a video: several steps to one audio token, fractions, and the usual."""


def item_kinds(config: Any) -> tuple[str, ...]:
    """The kinds of items that `media_sample` can place for this config."""
    return ITEMS["omni" if hasattr(media_config(config), "audio_token_id") else "vision"]


def random_items(config: Any, chance: random.Random, max_items: int = 4) -> list[str]:
    """Kinds of items in random order, in one sample either all videos with their sound or none."""
    kinds = list(item_kinds(config))
    if "video with audio" in kinds:
        kinds.remove(chance.choice(("video", "video with audio")))
    return [chance.choice(kinds) for _ in range(chance.randint(0, max_items))]


def media_sample(
    config: Any,
    items: Sequence[str],
    seed: int = 0,
    text: Sequence[int] | None = None,
    max_side: int = 4,
    max_frames: int = 3,
    max_mel_frames: int = 250,
    encoder_inputs: bool = False,
) -> dict[str, Any]:
    """A sample that holds these items in this order, as a processor would give it.

    Args:
        config: of a qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe or qwen3_omni_moe model.
        items: of `item_kinds(config)`.
        seed: decides everything that the other arguments leave open.
        text: tokens before, between and after the items, one more number than there are items; none to a
            few when left out. In the vision families half of the items have no start and end tokens, so that
            they can touch what is beside them, but for another of their kind, which stock cannot tell apart.
        max_side: largest height and width of an image or frame, in tokens.
        max_frames: most steps of a video's time axis.
        max_mel_frames: longest clip.
        encoder_inputs: add random `pixel_values`, `pixel_values_videos` and `input_features`.
    """
    unknown = [item for item in items if item not in item_kinds(config)]
    if unknown:
        raise ValueError(
            f"unknown items {unknown}; {config.model_type} knows {', '.join(item_kinds(config))}"
        )
    if text is not None and len(text) != len(items) + 1:
        raise ValueError(f"text has {len(text)} numbers for {len(items)} items; give {len(items) + 1}")
    if "video" in items and "video with audio" in items:
        raise ValueError("the videos of one sample all have their sound among their tokens, or none has")
    chance = random.Random(seed)
    if text is None:
        text = [chance.choice((0, 0, 1, 2, 5)) for _ in range(len(items) + 1)]
        text[-1] += not sum(text)  # a sample without items has a token at least
    writer = _Writer(config, chance, max_side, max_frames, max_mel_frames)
    for item, length in zip(items, text, strict=False):
        writer.text(length)
        writer.item(item)
    writer.text(text[-1])
    sample = writer.sample(use_audio_in_video="video with audio" in items)
    if encoder_inputs:
        _add_encoder_inputs(sample, media_config(config), torch.Generator().manual_seed(seed))
    return sample


class _Writer:
    """Writes a sample from left to right."""

    def __init__(
        self, config: Any, chance: random.Random, max_side: int, max_frames: int, max_mel_frames: int
    ) -> None:
        self.config, self.chance = media_config(config), chance
        self.max_side, self.max_frames, self.max_mel_frames = max_side, max_frames, max_mel_frames
        self.merge_size: int = self.config.vision_config.spatial_merge_size
        self.vocab_size: int = config.get_text_config().vocab_size
        # Ids with a meaning of their own must not turn up in the text.
        names = [
            f"{kind}_{end}" for kind in ("vision", "audio") for end in ("start_token_id", "end_token_id")
        ]
        names += [f"{kind}_token_id" for kind in ("image", "video", "audio")]
        self.special = {getattr(self.config, name, None) for name in names}
        self.ids: list[int] = []
        self.images: list[list[int]] = []
        self.videos: list[list[int]] = []
        self.seconds: list[float] = []
        self.clips: list[int] = []
        self.is_omni = "audio" in item_kinds(config)

    def text(self, length: int) -> None:
        while length > 0:
            token = self.chance.randrange(self.vocab_size)
            if token not in self.special:
                self.ids.append(token)
                length -= 1

    def item(self, item: str) -> None:
        {
            "image": self._image,
            "video": self._video if self.is_omni else self._frames,
            "audio": self._audio,
            "video with audio": self._video_with_audio,
        }[item]()

    def sample(self, use_audio_in_video: bool) -> dict[str, Any]:
        ids = torch.tensor(self.ids)
        types = token_types(ids, self.config)
        labels = torch.where(types == TEXT, ids, IGNORE)
        labels[1 : self.chance.randint(0, len(ids) // 2)] = IGNORE  # the first is asked of no token
        sample: dict[str, Any] = {"input_ids": ids, "labels": labels}
        if self.images:
            sample["image_grid_thw"] = torch.tensor(self.images)
        if self.videos:
            sample["video_grid_thw"] = torch.tensor(self.videos)
        if not self.is_omni:
            return sample | {"mm_token_type_ids": types}
        if self.videos:
            sample["second_per_grid_ts"] = torch.tensor(self.seconds)
        if self.clips:
            lengths = torch.tensor(self.clips)
            sample["feature_attention_mask"] = (torch.arange(max(self.clips)) < lengths[:, None]).long()
        return sample | {"use_audio_in_video": use_audio_in_video}

    def _image(self) -> None:
        grid = self._grid(frames=1)
        self.images.append(grid)
        token = self.config.image_token_id
        bare = not self.is_omni and self.ids[-1:] != [token] and self.chance.random() < 0.5
        self._wrapped([token] * num_media_tokens(grid, self.merge_size), "" if bare else "vision")

    def _frames(self) -> None:
        """Each frame apart, after its timestamp."""
        grid = self._grid(self.chance.randint(1, self.max_frames))
        self.videos.append(grid)
        frame = num_media_tokens([1, *grid[1:]], self.merge_size)
        bare = self.chance.random() < 0.5
        for number in range(grid[0]):
            # The first timestamp may be missing where that leaves the frame next to something else.
            touches = bare and self.ids[-1:] == [self.config.video_token_id]
            self.text(self.chance.randint(1 if number or touches else 0, 3))
            self._wrapped([self.config.video_token_id] * frame, "" if bare else "vision")

    def _video(self) -> None:
        grid = self._timed_grid()
        self._wrapped([self.config.video_token_id] * num_media_tokens(grid, self.merge_size), "vision")

    def _audio(self) -> None:
        self._wrapped([self.config.audio_token_id] * self._clip(), "audio")

    def _video_with_audio(self) -> None:
        grid = self._timed_grid()
        step = self.seconds[-1] * self.config.position_id_per_seconds
        frame = num_media_tokens([1, *grid[1:]], self.merge_size)
        # Ordered by time and then by kind, so that a frame goes before the sound of its moment.
        tokens = [(number * step, VIDEO) for number in range(grid[0]) for _ in range(frame)]
        tokens += [(float(number), AUDIO) for number in range(self._clip())]
        ids = {VIDEO: self.config.video_token_id, AUDIO: self.config.audio_token_id}
        self._wrapped([ids[kind] for _, kind in sorted(tokens)], "vision", "audio")

    def _grid(self, frames: int) -> list[int]:
        return [frames, *(self.chance.randint(1, self.max_side) * self.merge_size for _ in range(2))]

    def _timed_grid(self) -> list[int]:
        self.videos.append(self._grid(self.chance.randint(1, self.max_frames)))
        self.seconds.append(self.chance.choice(FRAME_SECONDS))
        return self.videos[-1]

    def _clip(self) -> int:
        self.clips.append(self.chance.randint(1, self.max_mel_frames))
        return audio_tokens(self.clips[-1], self.config)

    def _wrapped(self, tokens: list[int], *ends: str) -> None:
        """Between start tokens and, in reverse, end tokens; an end token without an id is some text."""
        ends = tuple(end for end in ends if end)
        self.ids += [getattr(self.config, f"{end}_start_token_id") for end in ends] + tokens
        for end in reversed(ends):
            token = getattr(self.config, f"{end}_end_token_id", None)
            if token is None:
                self.text(1)
            else:
                self.ids.append(token)


def _add_encoder_inputs(sample: dict[str, Any], config: Any, generator: torch.Generator) -> None:
    vision = config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def patches(grids: Tensor) -> Tensor:
        return torch.randn(int(grids.prod(-1).sum()), patch, generator=generator)

    if "image_grid_thw" in sample:
        sample["pixel_values"] = patches(sample["image_grid_thw"])
    if "video_grid_thw" in sample:
        sample["pixel_values_videos"] = patches(sample["video_grid_thw"])
    if "feature_attention_mask" in sample:
        mask = sample["feature_attention_mask"]
        mel = torch.randn(mask.shape[0], config.audio_config.num_mel_bins, mask.shape[1], generator=generator)
        sample["input_features"] = mel * mask[:, None]
