"""Videos become what the stock processors make of them, sound included."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import is_torchvision_available

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.media.processor import load_processor
from seqbraid.data.pack import pack
from seqbraid.models.positions import sample_positions
from tests.helpers.conversations import (
    FPS,
    FRAMES,
    Sounding,
    check_labels,
    parts_of,
    random_record,
    stock_sample,
)


def stub_video_processor(processor: Any, grids: list[Sequence[int]], indices: list[list[int]]) -> Any:
    """The stock processor with a video processor that only knows the grids, which is all its text needs."""

    class Stub:
        merge_size = processor.video_processor.merge_size
        temporal_patch_size = processor.video_processor.temporal_patch_size

        def __call__(self, *_: Any, **__: Any) -> dict[str, Any]:
            metadata = [SimpleNamespace(fps=float(FPS), frames_indices=list(i)) for i in indices]
            return {"video_grid_thw": torch.tensor(grids), "video_metadata": metadata}

    stub = copy.copy(processor)
    stub.video_processor = Stub()
    return stub


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "qwen3_omni", "qwen3_omni with sound"])
def test_videos_get_the_stock_text_and_frames(name: str, models: Any, folder: Path) -> None:
    with_sound = name.endswith("sound")
    model, processor = models[name.split()[0]]
    omni = name.startswith("qwen3_omni")
    options: dict[str, Any] = {"fps": 3.0, "max_frames": 6, "use_audio_in_video": with_sound}
    if omni:
        options |= {"video_min_pixels": 64, "video_max_pixels": 512}
    media = Sounding(folder)
    encoder = SampleEncoder(processor, model.config, media, **options)
    chance = random.Random(1)
    for rounds in (1, 2, 3):
        record = random_record(chance, ["image", "video", *["audio"] * omni], rounds)
        record["messages"][-2]["content"].append({"type": "video", "video": "ball.mp4"})
        sample = encoder.encode(record)
        assert encoder.length(record) == len(sample["input_ids"])
        check_labels(encoder, sample, record)
        videos = parts_of(record, "video")
        rules = encoder.media.frame_rules
        indices = rules.indices(FRAMES, FPS)
        patches, grid = rules.patches(media.video("ball.mp4", indices))
        assert len(indices) == 6 and sample["video_grid_thw"].tolist() == [list(grid)] * len(videos)
        assert torch.equal(sample["pixel_values_videos"], patches.repeat(len(videos), 1))
        stub = stub_video_processor(processor, [grid] * len(videos), [indices] * len(videos))
        wanted = stock_sample_with_videos(stub, record, media, with_sound, model.config if omni else None)
        assert sample["input_ids"].tolist() == wanted["input_ids"][0].tolist()
        if omni:
            assert sample["second_per_grid_ts"].tolist() == pytest.approx([2 / 3.0] * len(videos))
            assert sample["use_audio_in_video"] == with_sound
            for key in ("input_features", "feature_attention_mask"):
                assert (key in sample) == (key in wanted)
                assert key not in sample or torch.equal(sample[key], wanted[key])
        pack([sample], model.config)
        check_positions(model, sample)


def stock_sample_with_videos(stub: Any, record: Any, media: Any, with_sound: bool, omni: Any) -> Any:
    text = stub.apply_chat_template(copy.deepcopy(record["messages"]), tokenize=False)
    refs = [part for m in record["messages"] if not isinstance(m["content"], str) for part in m["content"]]
    sounds = [
        media.audio(part["audio"], 16000)
        if part["type"] == "audio"
        else media.audio(SimpleNamespace(kind="video"), 16000)
        for part in refs
        if part["type"] == "audio" or (part["type"] == "video" and with_sound)
    ]
    given: dict[str, Any] = {"videos": [np.zeros((2, 8, 8, 3), np.uint8)] * len(parts_of(record, "video"))}
    if images := [media.image(source) for source in parts_of(record, "image")]:
        given["images"] = images
    if omni:
        given |= {"fps": 3.0} | heard_by(stub, refs, with_sound)
        # The processor has a setting of its own for what the config says as well; the two must agree.
        given["position_id_per_seconds"] = omni.position_id_per_seconds
    if sounds:
        given["audio"] = sounds
    return stub(text=[text], **given, return_tensors="pt")


def heard_by(stub: Any, refs: list[dict[str, Any]], with_sound: bool) -> dict[str, Any]:
    """How the stock processor is told which sounds are those of videos; newer releases do not guess."""
    if not hasattr(stub, "load_audio_from_video"):
        return {"use_audio_in_video": with_sound}
    videos = count()
    slots = [
        next(videos) if part["type"] == "video" else None
        for part in refs
        if part["type"] in ("audio", "video")
    ]
    return {"load_audio_from_video": True, "audio_from_video_indices": slots} if with_sound else {}


def test_the_stock_processor_of_omni_has_sizes_of_its_own(models: Any, folder: Path) -> None:
    """Which it hands to the video processor with every call, over those that the checkpoint has."""
    omni = models["qwen3_omni"][1]
    module, newer = sys.modules[type(omni).__module__], type(omni).valid_processor_kwargs
    arguments = getattr(module, "Qwen3OmniMoeProcessorKwargs", newer)  # up to transformers 5.22
    stock = omni._merge_kwargs(arguments)["videos_kwargs"]["size"]
    for name, expected in (("qwen3_omni", stock["longest_edge"]), ("qwen3_vl", 8 * 32 * 32)):
        encoder = SampleEncoder(models[name][1], models[name][0].config, MediaFiles(folder))
        assert encoder.media.frame_rules.max_pixels == expected


def check_positions(model: Any, sample: dict[str, Any]) -> None:
    """Equal to the stock model's own."""
    ids = sample["input_ids"][None]
    grids = {key: sample.get(key) for key in ("image_grid_thw", "video_grid_thw")}
    found = sample_positions(sample, model.config)[1:]
    if "use_audio_in_video" in sample:
        mask = sample.get("feature_attention_mask")
        wanted, _ = model.get_rope_index(
            ids,
            **grids,
            attention_mask=torch.ones_like(ids),
            use_audio_in_video=sample["use_audio_in_video"],
            audio_seqlens=None if mask is None else mask.sum(1),
            second_per_grids=sample["second_per_grid_ts"],
        )
    else:
        types = torch.zeros_like(ids)
        types[ids == model.config.image_token_id] = 1
        types[ids == model.config.video_token_id] = 2
        wanted, _ = model.model.get_rope_index(ids, mm_token_type_ids=types.int(), **grids)
    assert torch.equal(found, wanted[:, 0].to(found.dtype))


@pytest.mark.skipif(not is_torchvision_available(), reason="the stock video processors need torchvision")
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_omni"])
def test_videos_equal_the_stock_processor(name: str, models: Any, folder: Path, tmp_path: Path) -> None:
    model, processor = models[name]
    processor.save_pretrained(tmp_path)
    stock, media = load_processor(tmp_path), MediaFiles(folder)
    record = random_record(random.Random(0), ["image", "video"], 2)
    record["messages"][-2]["content"].append({"type": "video", "video": "ball.mp4"})
    sample = SampleEncoder(stock, model.config, media, fps=3.0).encode(record)
    videos = [media.video("ball.mp4", range(FRAMES)) for _ in parts_of(record, "video")]
    metadata = {"total_num_frames": FRAMES, "fps": float(FPS), "duration": FRAMES / FPS}
    given = {"fps": 3.0, "do_sample_frames": True, "video_metadata": [metadata] * len(videos)}
    wanted = stock_sample(stock, record, media, videos=videos, videos_kwargs=given)
    for key in ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert (key in sample) == (key in wanted), key
        if key in sample:
            assert torch.equal(sample[key].flatten(), wanted[key].flatten()), key
