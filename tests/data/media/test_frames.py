"""Frames become what the stock video processors make of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.utils import is_torchvision_available

from seqbraid.data.media.frames import DEFAULTS, FrameRules
from seqbraid.data.media.processor import VideoSettings, load_processor
from seqbraid.data.tiny import tiny_training_model

KINDS = tuple(DEFAULTS)
TINY: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * 8 * 8, "longest_edge": 8 * 32 * 32},
}

with_torchvision = pytest.mark.skipif(
    not is_torchvision_available(), reason="the stock video processors need torchvision"
)


def noise(num_frames: int, height: int, width: int) -> Any:
    return np.random.default_rng(num_frames).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def smooth(num_frames: int, height: int, width: int) -> Any:
    """A picture that moves, dark to bright, so that resampling has something to get wrong at both ends."""
    t, y, x, c = np.ogrid[:num_frames, :height, :width, :3]
    wave = np.sin(x / 5 + t) * np.cos(y / 7 + c)
    return ((wave > 0) * 255 * np.abs(wave) ** 0.3).astype(np.uint8)


@with_torchvision
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [TINY, TINY | {"cap_pixels_per_frame": True, "max_video_tokens": 9}, {}])
def test_patches_equal_the_stock_processor(kind: str, values: dict[str, Any]) -> None:
    import transformers

    stock = getattr(transformers, kind)(**values)
    if "cap_pixels_per_frame" in values and not hasattr(type(stock), "cap_pixels_per_frame"):
        pytest.skip("this release of transformers knows no cap")
    rules = FrameRules.of(stock)
    assert rules == FrameRules.of(VideoSettings(kind, **values))
    for num_frames, height, width, fps, asked in [
        (9, 20, 30, 3.0, 2.0),
        (40, 64, 33, 24.0, 2.0),
        (61, 17, 90, 29.97, 4.0),
        (7, 16, 16, 12.5, 25.0),
        (100, 48, 40, 30.0, 1.0),
        (4, 9, 130, 1.0, 2.0),
    ]:
        if not values:  # a patch of these is larger
            height, width = 4 * height, 4 * width
        for make in (noise, smooth):
            video = make(num_frames, height, width)
            wanted = stock(
                videos=[video],
                video_metadata=[{"total_num_frames": num_frames, "fps": fps, "duration": num_frames / fps}],
                fps=asked,
                do_sample_frames=True,
                return_metadata=True,
                return_tensors="pt",
            )
            changed = rules.changed({"fps": asked})
            indices = changed.indices(num_frames, fps)
            assert indices == np.asarray(wanted["video_metadata"][0].frames_indices).tolist()
            patches, grid = changed.patches(video[indices])
            assert list(grid) == wanted["video_grid_thw"][0].tolist()
            assert grid == changed.grid(len(indices), height, width)
            assert torch.equal(patches, wanted["pixel_values_videos"])


@with_torchvision
def test_defaults_and_timestamps_are_the_stock_ones(tmp_path: Path) -> None:
    import transformers

    for kind in KINDS:
        stock = getattr(transformers, kind)()
        assert FrameRules.of(stock) == FrameRules.of(VideoSettings(kind))
        for key in ("resample", "rescale_factor", "do_resize", "do_rescale", "do_normalize"):
            assert getattr(stock, key) == DEFAULTS[kind][key]
    _, processor = tiny_training_model("qwen3_vl")
    processor.save_pretrained(tmp_path)
    stock = load_processor(tmp_path)
    video = noise(9, 20, 30)
    out = stock(
        text=["<|video_pad|>"],
        videos=[video],
        video_metadata=[{"total_num_frames": 9, "fps": 2.7, "duration": 9 / 2.7}],
    )
    rules = FrameRules.of(stock.video_processor)
    indices = rules.indices(9, 2.7)
    stamps = [f"<{seconds:.1f} seconds>" for seconds in rules.timestamps(indices, 2.7)]
    text = stock.decode(out["input_ids"][0])
    assert text.count("seconds") == len(stamps) and all(stamp in text for stamp in stamps)


def test_defaults_are_those_of_the_stock_class() -> None:
    known = {key for key in DEFAULTS["Qwen3VLVideoProcessor"] if hasattr(Qwen3VLVideoProcessor, key)}
    assert {"size", "patch_size", "fps", "min_frames", "max_frames", "image_mean", "image_std"} <= known
    for key in known:
        assert getattr(Qwen3VLVideoProcessor, key) == DEFAULTS["Qwen3VLVideoProcessor"][key], key


def test_sampled_frames_are_those_of_the_stock_rule() -> None:
    """The rule itself needs no torchvision."""
    rules = FrameRules.of(VideoSettings("Qwen3VLVideoProcessor"))
    stock = Qwen3VLVideoProcessor()
    for num_frames in (1, 2, 3, 5, 8, 31, 240, 2001):
        for fps in (1.0, 12.5, 24.0, 29.97):
            for asked in (0.5, 2.0, 3.3):
                metadata = SimpleNamespace(total_num_frames=num_frames, fps=fps)
                wanted = stock.sample_frames(metadata, fps=asked).tolist()
                assert rules.changed({"fps": asked}).indices(num_frames, fps) == wanted
        wanted = stock.sample_frames(SimpleNamespace(total_num_frames=num_frames, fps=9.0), num_frames=2)
        assert rules.changed({"nframes": 2}).indices(num_frames, 9.0) == wanted.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_patches_hold_the_pixels_in_the_order_of_the_grid(kind: str) -> None:
    """Without resizing, each number of a patch can be found by hand."""
    rules = FrameRules.of(VideoSettings(kind, **TINY, image_mean=[0.5] * 3, image_std=[0.5] * 3))
    video = noise(3, 16, 24)
    patches, grid = rules.patches(video)
    assert grid == (2, 4, 6) and patches.shape == (48, 3 * 2 * 4 * 4)
    row = 0
    for time in range(2):
        for block_y in range(2):
            for block_x in range(3):
                for y in (2 * block_y, 2 * block_y + 1):
                    for x in (2 * block_x, 2 * block_x + 1):
                        pair = [
                            video[min(2 * time + step, 2)] for step in range(2)
                        ]  # the last frame is repeated
                        crop = np.stack([f[4 * y : 4 * y + 4, 4 * x : 4 * x + 4] for f in pair])
                        expected = crop.transpose(3, 0, 1, 2).reshape(-1) / 127.5 - 1
                        assert np.allclose(patches[row].numpy(), expected, atol=1e-6)
                        row += 1


def test_wishes_bound_frames_and_pixels() -> None:
    rules = FrameRules.of(VideoSettings("Qwen3VLVideoProcessor", **TINY))
    whole = rules.grid(8, 64, 64)
    small = rules.changed({"max_pixels": 16 * 16}).grid(8, 64, 64)
    assert whole == (4, 8, 8) and small == (4, 4, 4)  # 32×32 and 16×16 pixels a frame
    assert rules.changed({"total_pixels": 8 * 8 * 8}).grid(8, 64, 64) == (4, 2, 2)
    assert len(rules.changed({"max_frames": 5}).indices(1000, 10.0)) == 5
    assert len(rules.changed({"min_frames": 7}).indices(1000, 1000.0)) == 7
    of_frames = FrameRules.of(VideoSettings("Qwen2VLVideoProcessor", **TINY))
    assert of_frames.changed({"max_pixels": 16 * 16, "min_pixels": 64}).grid(8, 64, 64) == (4, 4, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.changed({"video_start": 1}), "video_start"),
        (lambda r: r.changed({"fps": 1, "nframes": 2}), "both fps and nframes"),
        (
            lambda r: r.changed({"min_pixels": 10**6, "max_pixels": 10}).grid(4, 9, 9),
            "must not exceed max_pixels",
        ),
        (lambda r: r.indices(0, 1.0), "0 frames"),
        (lambda r: r.indices(5, 0.0), "0.0 frames a second"),
        (lambda r: r.patches(np.zeros((2, 8, 8))), "uint8"),
        (lambda r: r.grid(4, 8, 8 * 1000), "aspect ratio"),
        (lambda r: FrameRules.of(VideoSettings("Qwen3VLVideoProcessor", do_resize=False)), "do_resize=False"),
        (lambda r: FrameRules.of(object()), "not known"),
    ],
)
def test_what_cannot_be_read_is_refused(change: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        change(FrameRules.of(VideoSettings("Qwen3VLVideoProcessor", **TINY)))
