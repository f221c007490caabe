"""Frames of a video → patches, as the stock video processors make them, without torchvision.

Two rules exist. `Qwen3VLVideoProcessor` (Qwen3-VL, Qwen3.5) samples from the first to the last frame, and
its `size` bounds the pixels of the whole video; `Qwen2VLVideoProcessor` (Qwen3-Omni) samples at even steps
from the first frame, a whole number of temporal patches, and its `size` bounds the pixels of a frame.

N: frames; P: patches; C: numbers in a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_video

Grid = tuple[int, int, int]
"""Time, height and width in patches."""

BICUBIC = 3
"""`PIL.Image.Resampling.BICUBIC`"""

COMMON: dict[str, Any] = {
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "num_frames": None,
    "cap_pixels_per_frame": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3VLVideoProcessor": COMMON
    | {
        "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "fps": 2,
        "max_video_tokens": 768,
    },
    "Qwen2VLVideoProcessor": COMMON
    | {
        "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
        "patch_size": 14,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "fps": None,
        "max_video_tokens": 128000,
    },
}
"""What the stock video processors take where a checkpoint says nothing."""

NOT_DONE = ("do_resize", "do_rescale", "do_normalize")

OPTIONS = ("min_pixels", "max_pixels", "total_pixels", "fps", "nframes", "min_frames", "max_frames")
"""What `FrameRules.changed` knows; pixels are those of a frame, `total_pixels` those of the video."""


@dataclass(frozen=True)
class FrameRules:
    """Which frames of a video are taken, to what size, and how they become patches."""

    whole_video: bool
    """Whether the pixel bounds hold for the whole video (Qwen3-VL) or for a frame (Qwen2-VL)."""
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    min_frames: int
    max_frames: int
    fps: float | None
    num_frames: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    cap_tokens: int | None
    """`max_video_tokens` where `cap_pixels_per_frame` is on."""
    frame_min_pixels: int | None = None
    frame_max_pixels: int | None = None
    """Bounds of one frame, asked for by the user."""

    @staticmethod
    def of(settings: Any) -> FrameRules:
        """The rules of a stock video processor, or of its settings."""
        kind = getattr(settings, "video_processor_type", None) or type(settings).__name__
        if kind not in DEFAULTS:
            raise ValueError(f"video processor {kind!r} is not known; known are {', '.join(DEFAULTS)}")
        given = {key: getattr(settings, key, None) for key in DEFAULTS[kind]}
        values = DEFAULTS[kind] | {key: value for key, value in given.items() if value is not None}
        size = values["size"]
        off = [key for key in NOT_DONE if not values[key]]
        if off or int(values["resample"]) != BICUBIC:
            what = f"{off[0]}=False" if off else f"resample={values['resample']}"
            raise ValueError(f"{kind} has {what}; frames are resized by bicubic (3), rescaled and normalised")
        return FrameRules(
            kind == "Qwen3VLVideoProcessor",
            values["patch_size"],
            values["merge_size"],
            values["temporal_patch_size"],
            int(size["shortest_edge"]),
            int(size["longest_edge"]),
            values["min_frames"],
            values["max_frames"],
            values["fps"],
            values["num_frames"],
            tuple(values["image_mean"]),
            tuple(values["image_std"]),
            values["rescale_factor"],
            values["max_video_tokens"] if values["cap_pixels_per_frame"] else None,
        )

    def changed(self, options: Mapping[str, Any]) -> FrameRules:
        """The rules with a user's wishes for one video."""
        unknown = [key for key in options if key not in OPTIONS]
        if unknown:
            raise ValueError(f"video option {unknown[0]!r} is not supported; known are {', '.join(OPTIONS)}")
        if "fps" in options and "nframes" in options:
            raise ValueError("a video has both fps and nframes; give one of them")
        names = {"min_pixels": "frame_min_pixels", "max_pixels": "frame_max_pixels"}
        changes: dict[str, Any] = {
            names.get(key, key): options[key] if key == "fps" else int(options[key])
            for key in options
            if key not in ("nframes", "total_pixels")
        }
        if "fps" in options:
            changes |= {"num_frames": None}
        if "nframes" in options:
            changes |= {"num_frames": int(options["nframes"]), "fps": None}
        if "total_pixels" in options:
            if not self.whole_video:
                raise ValueError("total_pixels is for models that bound the whole video; use max_pixels")
            changes |= {"max_pixels": int(options["total_pixels"])}
        return replace(self, **changes)

    def indices(self, num_frames: int, fps: float) -> list[int]:
        """Which of a video's frames are taken."""
        if num_frames < 1 or not fps > 0:
            raise ValueError(f"a video of {num_frames} frames at {fps} frames a second cannot be sampled")
        if self.whole_video:
            wanted = self.num_frames
            if wanted is None:
                rate = 2 if self.fps is None else self.fps
                wanted = min(max(int(num_frames / fps * rate), self.min_frames), self.max_frames, num_frames)
            return [int(i) for i in np.linspace(0, num_frames - 1, wanted).round()]
        step = self.temporal_patch_size
        if self.num_frames is not None:
            wanted = round(self.num_frames / step) * step
        else:
            most = floor(min(self.max_frames, num_frames) / step) * step
            rate = 1.0 if self.fps is None else self.fps
            seen = min(max(num_frames / fps * rate, self.min_frames), most, num_frames)
            wanted = floor(seen / step) * step
        if not 0 < wanted <= num_frames:
            raise ValueError(f"{wanted} frames cannot be taken from a video of {num_frames}")
        # In torch's float32, as the stock processor counts: the last bits decide which frame is taken.
        taken: list[int] = torch.arange(0, num_frames, num_frames / wanted).int().tolist()
        return taken

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of the frames of a video of `num_frames` sampled ones."""
        if min(num_frames, height, width) < 1:
            raise ValueError(f"a video of {num_frames} frames of {height}×{width} pixels is empty")
        factor = self.patch_size * self.merge_size
        lowest, highest = self.min_pixels, self.max_pixels
        whole = num_frames if self.whole_video else 1
        if self.cap_tokens is not None:
            if self.whole_video:
                share = min(self.cap_tokens * factor**2, highest // num_frames)
            else:
                budget = int(self.cap_tokens * factor * factor * 0.9)
                share = min(highest, budget * self.temporal_patch_size // num_frames)
            highest = max(share, int(lowest * 1.05)) * whole
        if self.frame_min_pixels is not None:
            lowest = self.frame_min_pixels * whole
        if self.frame_max_pixels is not None:
            highest = self.frame_max_pixels * whole
        if lowest > highest:
            raise ValueError(
                f"videos have at least {lowest} and at most {highest} pixels; min_pixels "
                "must not exceed max_pixels"
            )
        if self.whole_video:
            new = resize_video(num_frames, height, width, self.temporal_patch_size, factor, lowest, highest)
        else:
            new = resize_frame(height, width, factor, lowest, highest)
        if min(new) < factor:
            raise ValueError(f"frames of {height}×{width} pixels are less than one patch of {factor}")
        return int(new[0]), int(new[1])

    def grid(self, num_frames: int, height: int, width: int) -> Grid:
        """Of a video of `num_frames` sampled frames."""
        new_height, new_width = self.size(num_frames, height, width)
        steps = -(-num_frames // self.temporal_patch_size)
        return steps, new_height // self.patch_size, new_width // self.patch_size

    def patches(self, frames_NHW3: NDArray[np.uint8]) -> tuple[Tensor, Grid]:
        """`[P, C]` float32 and the grid, of sampled frames."""
        if frames_NHW3.ndim != 4 or frames_NHW3.shape[3] != 3 or frames_NHW3.dtype != np.uint8:
            raise ValueError(
                f"frames have shape {frames_NHW3.shape} and dtype {frames_NHW3.dtype}; they are [N, H, W, 3] "
                "uint8"
            )
        num_frames, height, width, _ = frames_NHW3.shape
        size = self.size(num_frames, height, width)
        frames_N3HW = torch.from_numpy(np.ascontiguousarray(frames_NHW3)).permute(0, 3, 1, 2).contiguous()
        if size != (height, width):
            frames_N3HW = torch.nn.functional.interpolate(
                frames_N3HW, size=size, mode="bicubic", align_corners=False, antialias=True
            )
        # Rescaling and normalising in one step, in the stock order: other orders differ in the last bit.
        mean, std = (torch.tensor(x) * (1.0 / self.rescale_factor) for x in (self.mean, self.std))
        pixels = frames_N3HW.float().sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))
        if missing := -num_frames % self.temporal_patch_size:
            pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
        time, height, width = grid = self.grid(num_frames, height, width)
        patch, merge = self.patch_size, self.merge_size
        split = pixels.view(
            *(time, self.temporal_patch_size, 3),
            *(height // merge, merge, patch, width // merge, merge, patch),
        )
        # Time, blocks of merged patches, the patches of a block; a patch is channel, time, height, width.
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * height * width, -1), grid

    def timestamps(self, indices: Sequence[int], fps: float) -> list[float]:
        """Seconds of each step of the grid: half way between the first and the last frame that it merges."""
        step = self.temporal_patch_size
        padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
        return [(padded[i] / fps + padded[i + step - 1] / fps) / 2 for i in range(0, len(padded), step)]
