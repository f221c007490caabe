"""Rotary positions of the thinker of qwen3_omni_moe: text, images, videos, audio, and audio in video.

T: tokens of one sample; N: tokens of one item; 3: time, height, width. The time axis counts
`position_id_per_seconds` a second and need not hit whole numbers, so everything is float32 and is added in
the order in which the stock model adds it: the sums are then equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .media_tokens import (
    AUDIO,
    IMAGE,
    KINDS,
    TEXT,
    VIDEO,
    Ints,
    as_vector,
    audio_tokens,
    media_config,
    mel_frames,
    placeholder_kinds,
    runs,
    times,
    token_grids,
)

Floats32 = NDArray[np.float32]
ONE = np.float32(1)


SECONDS_KEYS = ("second_per_grid_ts", "video_second_per_grid")
"""Two names for one thing: processors say the second, older ones and our samples the first."""


def omni_positions(
    input_ids_T: Any,
    config: Any,
    image_grids: Any = None,
    video_grids: Any = None,
    seconds_per_grid: Any = None,
    mel_frames: Any = None,
    use_audio_in_video: bool = False,
) -> Tensor:
    """`[3, T]` float32, as the stock thinker has it for this sample alone.

    Args:
        input_ids_T: token ids with every placeholder written out.
        config: of the thinker or of the whole model.
        image_grids: `[images, 3]`, time, height and width in patches.
        video_grids: `[videos, 3]`.
        seconds_per_grid: `[videos]`, seconds from one step of a video's time axis to the next.
        mel_frames: `[clips]`, of all clips in the order of their tokens, those of videos included.
        use_audio_in_video: each video has its sound among its tokens, ordered by time.
    """
    config = media_config(config)
    ids_T = as_vector(input_ids_T, "input_ids")
    merge_size = config.vision_config.spatial_merge_size
    items = _Items(
        token_grids(image_grids, "image_grid_thw", merge_size),
        token_grids(video_grids, "video_grid_thw", merge_size),
        np.asarray([] if mel_frames is None else mel_frames).astype(np.int64),
        np.asarray([] if seconds_per_grid is None else seconds_per_grid, np.float32),
        config,
    )
    types_T = placeholder_kinds(ids_T, config)
    row = _Row(len(ids_T))
    for start, length in zip(*(x.tolist() for x in runs(types_T != TEXT)), strict=True):
        types_N = types_T[start : start + length]
        opening = _opening(ids_T, start, types_N, use_audio_in_video, config)
        if start - opening < row.filled:
            raise ValueError(
                f"the media at token {start} directly follows the item before it: put an end token and a "
                "start token between two items"
            )
        row.text(start - opening - row.filled)
        row.text(opening)
        row.block(*items.next_block(types_N, row.next_position, start))
        # The end tokens, apart from the text that follows: the stock model rounds between the two.
        row.text(min(opening, len(ids_T) - row.filled))
    row.text(len(ids_T) - row.filled)
    items.check_all_used()
    return torch.from_numpy(row.positions_3T)


class _Row:
    """Positions of a sample, written from left to right."""

    def __init__(self, length: int) -> None:
        self.positions_3T = np.empty((3, length), np.float32)
        self.filled = 0
        self.next_position = np.float32(0)

    def text(self, length: int) -> None:
        self.block(_count(length) + self.next_position, self.next_position + np.float32(length))

    def block(self, block_3N: Floats32, next_position: np.float32) -> None:
        stop = self.filled + block_3N.shape[-1]
        self.positions_3T[:, self.filled : stop] = block_3N
        self.filled, self.next_position = stop, next_position


class _Items:
    """The media of a sample, taken in the order of their tokens."""

    def __init__(self, images: Ints, videos: Ints, clips: Ints, seconds: Floats32, config: Any) -> None:
        if seconds.shape != (len(videos),) or not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ValueError(
                f"second_per_grid_ts is {seconds.tolist()} for {len(videos)} videos; give one number of "
                "seconds above 0 for each video of video_grid_thw"
            )
        if clips.ndim != 1 or (clips < 1).any():
            raise ValueError(f"the clips have {clips.tolist()} mel frames; each needs at least 1")
        self.items = {IMAGE: images, VIDEO: videos, AUDIO: clips}
        self.used = {IMAGE: 0, VIDEO: 0, AUDIO: 0}
        self.seconds = seconds
        self.rate = config.position_id_per_seconds
        self.config = config

    def next_block(self, types_N: Ints, start: np.float32, token: int) -> tuple[Floats32, np.float32]:
        """Positions of the next item, and where the text after it starts."""
        found = np.bincount(types_N, minlength=len(KINDS)).tolist()
        if not found[AUDIO]:
            block_3N = self._grid(IMAGE if found[IMAGE] else VIDEO, found, start, token)
            return block_3N, block_3N.max() + ONE
        audio_N = self._audio(found, start, token)
        if not found[VIDEO]:
            return audio_N, audio_N[-1] + ONE
        video_3N = self._grid(VIDEO, found, start, token)
        self._check_order(types_N, video_3N, audio_N)
        return _by_time(video_3N, audio_N)

    def check_all_used(self) -> None:
        """Every item must have had its tokens."""
        for kind, items in self.items.items():
            if self.used[kind] != len(items):
                raise ValueError(
                    f"{KINDS[kind]} {self.used[kind]} has no placeholders: {len(items)} of this kind were "
                    f"given, found the tokens of {self.used[kind]}"
                )

    def _grid(self, kind: int, found: list[int], start: np.float32, token: int) -> Floats32:
        number, grid = self._take(kind, found, token)
        frames, height, width = grid.tolist()
        self._check_count(kind, number, frames * height * width, found, token, f"{times(grid)} tokens")
        # The steps of an image's time axis, should it have any, are seconds.
        seconds = ONE if kind == IMAGE else self.seconds[number]
        block = np.empty((3, frames, height, width), np.float32)
        block[0] = (_count(frames) * seconds * np.float32(self.rate))[:, None, None]
        block[1] = _count(height)[:, None]
        block[2] = _count(width)
        return block.reshape(3, -1) + start

    def _audio(self, found: list[int], start: np.float32, token: int) -> Floats32:
        number, frames = self._take(AUDIO, found, token)
        expected = audio_tokens(int(frames), self.config)
        self._check_count(AUDIO, number, expected, found, token, f"{frames} mel frames")
        return _count(expected) + start

    def _take(self, kind: int, found: list[int], token: int) -> tuple[int, Any]:
        number = self.used[kind]
        if number >= len(self.items[kind]):
            raise ValueError(
                f"{found[kind]} {KINDS[kind]} placeholders at token {token} belong to no {KINDS[kind]}: "
                f"{number} of this kind were given, found the tokens of one more"
            )
        self.used[kind] += 1
        return number, self.items[kind][number]

    def _check_count(
        self, kind: int, number: int, expected: int, found: list[int], token: int, size: str
    ) -> None:
        if found[kind] != expected:
            raise ValueError(
                f"{KINDS[kind]} {number} ({size}) needs {expected} {KINDS[kind]} placeholders, found "
                f"{found[kind]} at token {token}"
            )

    def _check_order(self, types_N: Ints, video_3N: Floats32, audio_N: Floats32) -> None:
        """The processor orders the placeholders by time with a setting of its own; where that is another than
        the config's, the stock model gives sound the positions of frames."""
        times_N = np.empty(len(types_N), np.float32)
        times_N[types_N == VIDEO] = video_3N[0]
        times_N[types_N == AUDIO] = audio_N
        # Half a position leaves room for the rounding of times that meet.
        if (np.diff(times_N) < -0.5).any():
            raise ValueError(
                f"video {self.used[VIDEO] - 1} and its audio (clip {self.used[AUDIO] - 1}) are not in "
                f"temporal order at the config's position_id_per_seconds={self.rate}; use the same "
                "setting in the processor"
            )


def _by_time(video_3N: Floats32, audio_N: Floats32) -> tuple[Floats32, np.float32]:
    """Merge a video and its sound by time, the video first where they meet.

    What follows starts after the part that lasts longer, as in the stock model: height and width of the
    frames do not count once sound comes after them.
    """
    video_at_N = np.arange(video_3N.shape[1]) + audio_N.searchsorted(video_3N[0])
    is_audio = np.ones(video_3N.shape[1] + len(audio_N), bool)
    is_audio[video_at_N] = False
    merged_3N = np.empty((3, len(is_audio)), np.float32)
    merged_3N[:, video_at_N] = video_3N
    merged_3N[:, is_audio] = audio_N
    last = video_3N.max() if video_3N[0, -1] > audio_N[-1] else audio_N[-1]
    return merged_3N, last + ONE


def _opening(ids_T: Ints, start: int, types_N: Ints, audio_in_video: bool, config: Any) -> int:
    """Start tokens before the media at `start`: one, or two where a video and its sound share a block."""
    vision_start, audio_start = getattr(config, "vision_start_token_id", None), config.audio_start_token_id
    kinds = [KINDS[kind] for kind in np.unique(types_N)]
    if vision_start is None and kinds != ["audio"]:
        raise ValueError(
            "the config has no vision_start_token_id, which marks where images and videos start; set it"
        )
    before = ids_T[max(start - 2, 0) : start].tolist()
    in_video = before == [vision_start, audio_start]
    if in_video and kinds == ["video", "audio"] and audio_in_video:
        return 2
    starts = audio_start if kinds == ["audio"] else vision_start
    if in_video or len(kinds) > 1 or before[-1:] != [starts]:
        raise ValueError(
            f"the {' and '.join(kinds)} placeholders at token {start} follow the tokens {before}, with "
            f"use_audio_in_video={audio_in_video}; an image or a video follows vision_start "
            f"({vision_start}), audio follows audio_start ({audio_start}), a video with its audio follows "
            "both and needs use_audio_in_video=True"
        )
    if audio_in_video and kinds == ["video"]:
        raise ValueError(
            f"the video at token {start} has no audio among its tokens, with use_audio_in_video=True; the "
            "setting applies to all videos of a sample"
        )
    return 1


def _count(length: int) -> Floats32:
    return np.arange(length, dtype=np.float32)


def omni_sample_positions(sample: Mapping[str, Any], ids_T: Ints, config: Any) -> Tensor:
    """Those of a sample of Qwen3-Omni."""
    seconds = [sample[key] for key in SECONDS_KEYS if sample.get(key) is not None]
    if len(seconds) > 1:
        raise ValueError(f"{' and '.join(SECONDS_KEYS)} are two names for the same thing; give one of them")
    return omni_positions(
        ids_T,
        config,
        sample.get("image_grid_thw"),
        sample.get("video_grid_thw"),
        seconds[0] if seconds else None,
        mel_frames(sample),
        bool(sample.get("use_audio_in_video", False)),
    )
