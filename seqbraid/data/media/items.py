"""The media of a conversation: measured by their headers first, decoded for the encoders later.

Each kind is kept in the order of the text, as the stock processors take them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import compress, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from ...models.families import MediaFamily
from ...models.media import MediaSize
from ...models.media_tokens import times
from ..records.parts import MediaRef
from .files import MediaFiles
from .frames import FrameRules, Grid

IMAGE_OPTIONS = ("min_pixels", "max_pixels")


@dataclass(frozen=True)
class MediaOptions:
    """How media are read where a record does not say it for an item of its own."""

    min_pixels: int | None = None
    """Of an image; the processor's where left out, as with all of these."""
    max_pixels: int | None = None
    video_min_pixels: int | None = None
    """Of a frame."""
    video_max_pixels: int | None = None
    fps: float | None = None
    """Frames taken from a second of video."""
    min_frames: int | None = None
    max_frames: int | None = None
    use_audio_in_video: bool = False
    """Use the audio of videos too, for models with an audio encoder."""

    def image(self) -> dict[str, Any]:
        """In the words of a content part."""
        return _given(min_pixels=self.min_pixels, max_pixels=self.max_pixels)

    def video(self) -> dict[str, Any]:
        """In the words of a content part."""
        return _given(
            min_pixels=self.video_min_pixels,
            max_pixels=self.video_max_pixels,
            fps=self.fps,
            min_frames=self.min_frames,
            max_frames=self.max_frames,
        )


class ImageItem(NamedTuple):
    """An image, not decoded yet."""

    ref: MediaRef
    size: dict[str, int]
    """What the stock image processor takes as `size`."""
    grid: Grid


class VideoItem(NamedTuple):
    """A video, not decoded yet."""

    ref: MediaRef
    rules: FrameRules
    indices: list[int]
    """The frames that are taken."""
    fps: float
    """Of the file."""
    grid: Grid
    seconds_per_grid: float


class ClipItem(NamedTuple):
    """A sound, not decoded yet."""

    ref: MediaRef
    num_samples: int
    mel_frames: int


class MediaItems(NamedTuple):
    """The media of a conversation; the sounds of videos are among the clips."""

    images: list[ImageItem]
    videos: list[VideoItem]
    clips: list[ClipItem]

    def sizes(self) -> dict[str, list[MediaSize]]:
        """By kind."""
        return {
            "image": [image.grid for image in self.images],
            "video": [video.grid for video in self.videos],
            "audio": [clip.mel_frames for clip in self.clips],
        }


class MediaReader:
    """Reads media as a model's own processor does.

    Args:
        processor: the stock processor; a tokenizer where the model takes text alone.
        family: of the model; None where it takes text alone.
        files: where the media lie.
        options: for items that bring none of their own.
    """

    def __init__(
        self, processor: Any, family: MediaFamily | None, files: MediaFiles, options: MediaOptions
    ) -> None:
        self.processor, self.files, self.options = processor, files, options
        self.kinds: tuple[str, ...] = family.kinds if family else ()
        if options.use_audio_in_video and "audio" not in self.kinds:
            raise ValueError("use_audio_in_video is set, but this model has no audio encoder; leave it out")
        if not family:
            return
        if not processor.image_processor.do_resize:
            raise ValueError(
                "the image processor has do_resize=False, but images must be resized to "
                "whole patches; set do_resize=True"
            )
        self.frame_rules = _frame_rules(processor).changed(options.video())

    def measure(self, refs: Sequence[MediaRef]) -> MediaItems:
        """What the headers tell of these media, in their order."""
        items = MediaItems([], [], [])
        sounds: list[MediaRef] = []
        for ref in refs:
            if ref.kind not in self.kinds:
                raise ValueError(
                    f"the conversation has the {ref.kind} {ref.source[:99]!r}, but the model takes only "
                    f"{', '.join(self.kinds) or 'text'}"
                )
            if ref.kind == "image":
                items.images.append(self._image(ref))
            elif ref.kind == "video":
                items.videos.append(self._video(ref))
            if ref.kind == "audio" or (ref.kind == "video" and self.options.use_audio_in_video):
                sounds.append(ref)
        items.clips.extend(self._clips(sounds))
        return items

    def sizes(self, items: MediaItems) -> list[MediaSize]:
        """Of all media, kind after kind, as `pack` takes them."""
        sizes = items.sizes()
        return [size for kind in self.kinds for size in sizes[kind]]

    def decode(self, items: MediaItems, is_own: Sequence[bool] | None = None) -> dict[str, Any]:
        """What the model's encoders take, by the processor's names: of all media, or of our own among them,
        which are told in the order of `sizes`. If a clip is ours, all clips of the sample are decoded: they
        are padded to the longest.
        """
        flags = iter(repeat(True) if is_own is None else is_own)
        sizes = items.sizes()
        own = {kind: list(islice(flags, len(sizes[kind]))) for kind in self.kinds}
        found: dict[str, Any] = {}
        if items.images:
            images = [self._image_pixels(image) for image in compress(items.images, own["image"])]
            found |= {"pixel_values": torch.cat(images)} if images else {}
            found["image_grid_thw"] = torch.tensor([image.grid for image in items.images])
        if items.videos:
            videos = [self._video_pixels(video) for video in compress(items.videos, own["video"])]
            found |= {"pixel_values_videos": torch.cat(videos)} if videos else {}
            found["video_grid_thw"] = torch.tensor([video.grid for video in items.videos])
        if any(own.get("audio", ())):
            found |= self._mel(items.clips)
        elif items.clips:
            frames = torch.tensor([clip.mel_frames for clip in items.clips])
            found["feature_attention_mask"] = (torch.arange(int(frames.max())) < frames[:, None]).int()
        if "audio" in self.kinds and items.videos:  # a text sample is to be cut as any other model's
            found["use_audio_in_video"] = self.options.use_audio_in_video
            found["second_per_grid_ts"] = torch.tensor([video.seconds_per_grid for video in items.videos])
        return found

    def _image(self, ref: MediaRef) -> ImageItem:
        options = {**self.options.image(), **ref.options}
        unknown = [key for key in options if key not in IMAGE_OPTIONS]
        if unknown:
            raise ValueError(
                f"image {ref.source[:100]!r}: option {unknown[0]!r} is not supported; known are "
                f"{', '.join(IMAGE_OPTIONS)}"
            )
        stock = self.processor.image_processor
        low = int(options.get("min_pixels", stock.size["shortest_edge"]))
        high = int(options.get("max_pixels", stock.size["longest_edge"]))
        width, height = self.files.image_size(ref)
        factor = stock.patch_size * stock.merge_size
        if low > high:
            raise ValueError(f"image {ref.source[:100]!r}: min_pixels={low} is more than max_pixels={high}")
        with _named("image", ref):
            new_height, new_width = smart_resize(height, width, factor, low, high)
            if min(new_height, new_width) < factor:
                raise ValueError(f"{width}×{height} pixels are less than one patch of {factor} pixels")
        grid = (1, new_height // stock.patch_size, new_width // stock.patch_size)
        return ImageItem(ref, {"shortest_edge": low, "longest_edge": high}, grid)

    def _video(self, ref: MediaRef) -> VideoItem:
        info = self.files.video_info(ref)
        with _named("video", ref):
            rules = self.frame_rules.changed(ref.options)
            indices = rules.indices(info.num_frames, info.fps)
            grid = rules.grid(len(indices), info.height, info.width)
        if rules.num_frames is not None:
            rate = len(indices) * info.fps / info.num_frames
        else:
            rate = 1.0 if rules.fps is None else rules.fps
        return VideoItem(ref, rules, indices, info.fps, grid, rules.temporal_patch_size / rate)

    def _clips(self, refs: Sequence[MediaRef]) -> list[ClipItem]:
        if not refs:
            return []
        stock = self.processor.feature_extractor
        lengths = [self.files.audio_info(ref).num_samples_at(stock.sampling_rate) for ref in refs]
        # The clips of a sample are padded to the longest, and only whole frames of that are kept.
        most = max(lengths) // stock.hop_length
        clips = [
            ClipItem(ref, length, min(-(-length // stock.hop_length), most))
            for ref, length in zip(refs, lengths, strict=True)
        ]
        for clip in clips:
            # Shorter ones could not be mirrored at their ends by the Fourier transform.
            if clip.mel_frames < 1 or most * stock.hop_length <= stock.n_fft // 2:
                raise ValueError(
                    f"audio {clip.ref.source!r} is too short: {clip.num_samples} samples at "
                    f"{stock.sampling_rate} Hz"
                )
        return clips

    def _image_pixels(self, image: ImageItem) -> Tensor:
        picture = self.files.image(image.ref)
        with _named("image", image.ref):
            found = self.processor.image_processor(images=[picture], size=image.size, return_tensors="pt")
        _check_grid("image", image.ref, tuple(found["image_grid_thw"][0].tolist()), image.grid)
        return found["pixel_values"]

    def _video_pixels(self, video: VideoItem) -> Tensor:
        frames = self.files.video(video.ref, video.indices)
        with _named("video", video.ref):
            pixels, grid = video.rules.patches(frames)
        _check_grid("video", video.ref, grid, video.grid)
        return pixels

    def _mel(self, clips: Sequence[ClipItem]) -> dict[str, Tensor]:
        stock = self.processor.feature_extractor
        sounds: list[NDArray[np.float32]] = []
        for clip in clips:
            sound = self.files.audio(clip.ref, stock.sampling_rate)
            if len(sound) != clip.num_samples:
                raise ValueError(
                    f"audio {clip.ref.source!r} has {len(sound)} samples, not {clip.num_samples} as its "
                    "header says"
                )
            sounds.append(sound)
        found = stock(
            sounds,
            sampling_rate=stock.sampling_rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = found["attention_mask"]
        assert mask.sum(1).tolist() == [clip.mel_frames for clip in clips], "mel frames as measured"
        return {"input_features": found["input_features"], "feature_attention_mask": mask}


def _frame_rules(processor: Any) -> FrameRules:
    """The rules of the video processor, with the sizes that the stock processor puts over them."""
    rules = FrameRules.of(processor.video_processor)
    stock = type(processor)
    settings = getattr(stock, "videos_kwargs", None)
    if settings is None:  # up to transformers 5.22
        arguments = getattr(import_module(stock.__module__), f"{stock.__name__}Kwargs", None)
        settings = getattr(arguments, "_defaults", {}).get("videos_kwargs", {})
    size = settings.get("size")
    if size is None:
        return rules
    return replace(rules, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])


def _check_grid(kind: str, ref: MediaRef, found: Sequence[int], expected: Grid) -> None:
    if tuple(found) != expected:
        raise ValueError(
            f"{kind} {ref.source[:99]!r} has {times(found)} patches when decoded, but {times(expected)} by "
            "its header"
        )


@contextmanager
def _named(kind: str, ref: MediaRef) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{kind} {ref.source[:100]!r}: {error}") from error


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}
