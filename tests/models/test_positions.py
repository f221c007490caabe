"""Positions of samples equal those of the stock models, without a model."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from itertools import pairwise, product
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as stock_omni
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

from seqbraid.models.media_tokens import audio_tokens, num_media_tokens, token_types
from seqbraid.models.positions import sample_positions
from seqbraid.models.positions_omni import omni_positions
from seqbraid.models.positions_vision import vision_positions
from seqbraid.models.tiny.media_samples import item_kinds, media_sample, random_items

NUM_SAMPLES = 2000
START, IMAGE, VIDEO, END = 151652, 151655, 151656, 151653
AUDIO_START, AUDIO = 151647, 151646
STOCK = {
    "qwen3_vl": Qwen3VLModel,
    "qwen3_vl_moe": Qwen3VLMoeModel,
    "qwen3_5": Qwen3_5Model,
    "qwen3_5_moe": Qwen3_5MoeModel,
}
OMNI_STOCK = stock_omni.Qwen3OmniMoePreTrainedModelForConditionalGeneration


def omni_config(**changes: Any) -> Any:
    """As checkpoints have it; the defaults lack the ids, and in older releases have another window."""
    own = {"vision_start_token_id": START, "vision_end_token_id": END, "audio_config": {"n_window": 50}}
    return AutoConfig.for_model("qwen3_omni_moe", thinker_config=own | changes)


def stock_vision(sample: dict[str, Any], config: Any) -> Tensor:
    """The real `get_rope_index`, on an object that has nothing else of the model."""
    cls: Any = STOCK[config.model_type]
    bare = SimpleNamespace(config=config)
    bare.get_vision_position_ids = MethodType(cls.get_vision_position_ids, bare)
    positions, _ = cls.get_rope_index(
        bare,
        sample["input_ids"][None],
        sample["mm_token_type_ids"][None],
        sample.get("image_grid_thw"),
        sample.get("video_grid_thw"),
    )
    return positions[:, 0]


def stock_thinker(sample: dict[str, Any], config: Any) -> Tensor:
    cls: Any = OMNI_STOCK
    thinker = config.thinker_config
    bare = SimpleNamespace(config=thinker, spatial_merge_size=thinker.vision_config.spatial_merge_size)
    bare.get_llm_pos_ids_for_vision = MethodType(cls.get_llm_pos_ids_for_vision, bare)
    ids = sample["input_ids"][None]
    mask = sample.get("feature_attention_mask")
    positions, _ = cls.get_rope_index(
        bare,
        ids,
        sample.get("image_grid_thw"),
        sample.get("video_grid_thw"),
        torch.ones_like(ids),
        sample["use_audio_in_video"],
        None if mask is None else mask.sum(1),
        sample.get("second_per_grid_ts"),
    )
    return positions[:, 0]


def check_against_stock(sample: dict[str, Any], config: Any, what: str) -> None:
    positions = sample_positions(sample, config)
    omni = config.model_type.startswith("qwen3_omni")
    expected = (stock_thinker if omni else stock_vision)(sample, config)
    assert positions.dtype == expected.dtype == (torch.float32 if omni else torch.int64)
    assert torch.equal(positions[0].long(), torch.arange(len(sample["input_ids"]))), what
    assert torch.equal(positions[1:], expected), what


def kinds_of(items: list[str]) -> set[str]:
    several = {f"several: {item}" for item, count in Counter(items).items() if count > 1}
    return set(items) | several or {"text only"}


@pytest.mark.parametrize("family", STOCK)
def test_vision_positions_equal_the_stock_model(family: str) -> None:
    seen: set[str] = set()
    configs = [AutoConfig.for_model(family, vision_config={"spatial_merge_size": size}) for size in (2, 1, 3)]
    for seed in range(NUM_SAMPLES):
        config = configs[seed % 3]
        items = random_items(config, random.Random(seed))
        sample = media_sample(config, items, seed, max_side=6, max_frames=5)
        check_against_stock(sample, config, f"{family}, seed {seed}, {items}")
        types = sample["mm_token_type_ids"].tolist()
        touching = any(a and b and a != b for a, b in pairwise(types))
        seen |= kinds_of(items) | {f"first {types[0]}", f"last {types[-1]}", f"touching {touching}"}
    # A generator that no longer makes one of these would leave it untested.
    assert {"text only", "image", "video", "several: image", "several: video"} <= seen
    assert {"first 1", "first 2", "last 1", "last 2", "touching True"} <= seen


@pytest.mark.parametrize("rate", [25, 13])
def test_omni_positions_equal_the_stock_model_to_the_last_bit(rate: int) -> None:
    seen: set[str] = set()
    num_fractional = 0
    config = omni_config(position_id_per_seconds=rate)
    for seed in range(NUM_SAMPLES):
        chance = random.Random(seed)
        items = random_items(config, chance)
        text = [chance.choice((0, 0, 1, 3)) for _ in items] + [chance.choice((0, 2)) if items else 7]
        sample = media_sample(config, items, seed, text, max_side=6, max_frames=5)
        check_against_stock(sample, config, f"seed {seed}, {items}")
        num_fractional += bool((sample_positions(sample, config) % 1).any())
        gaps = zip(pairwise(items), text[1:], strict=False)
        seen |= kinds_of(items) | {f"{a}, {b}" for (a, b), length in gaps if not length}
        if items:
            seen |= {f"first {items[0]} {text[0]}", f"last {items[-1]} {text[-1]}"}
    for item in (kinds := item_kinds(config)):
        assert {"text only", item, f"several: {item}", f"first {item} 0", f"last {item} 0"} <= seen
    for a, b in product(kinds, kinds):
        assert {f"{a}, {b}"} <= seen or {a, b} == {"video", "video with audio"}
    assert num_fractional > NUM_SAMPLES / 5, "few samples had positions that float32 has to round"


def test_omni_positions_round_where_the_stock_model_rounds() -> None:
    """Where a position passes a power of two, its fraction loses a digit, so the order of the sums shows."""
    config = omni_config()
    for seed in range(1500):
        chance = random.Random(seed)
        items = chance.choice((["video", "video"], ["video with audio"] * 2))
        # Powers of two in the text at the end, and where the second item starts.
        before_second = chance.choice((*range(108, 122), *range(230, 250)))
        text = chance.choice(([chance.randrange(70), chance.randrange(5), 400], [0, before_second, 3]))
        sample = media_sample(config, items, seed, text, max_side=1, max_frames=3, max_mel_frames=20)
        check_against_stock(sample, config, f"seed {seed}, {items}")


def test_long_omni_samples_equal_the_stock_model() -> None:
    config = omni_config()
    items, text = ["video with audio", "image", "audio", "video with audio"], [20_000, 3, 2, 30_000, 5]
    for seed in range(10):
        sample = media_sample(config, items, seed, text, max_mel_frames=1500, max_frames=12)
        check_against_stock(sample, config, f"seed {seed}")


def test_thinker_config_alone_gives_the_same() -> None:
    config = omni_config()
    sample = media_sample(config, ["audio", "video", "image"], seed=3)
    assert torch.equal(sample_positions(sample, config), sample_positions(sample, config.thinker_config))


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_text_models_count(family: str) -> None:
    positions = sample_positions({"input_ids": [4, 5, 6]}, AutoConfig.for_model(family))
    assert positions.tolist() == [[0, 1, 2]] * 4


def test_a_sample_of_a_processor_may_be_lists_or_have_a_batch_dimension() -> None:
    config = AutoConfig.for_model("qwen3_vl")
    sample = media_sample(config, ["image", "video"], seed=1)
    batched = {key: value[None] if value.ndim == 1 else value for key, value in sample.items()}
    lists = {key: value.tolist() for key, value in sample.items()}
    del lists["mm_token_type_ids"]
    expected = sample_positions(sample, config)
    assert torch.equal(sample_positions(batched, config), expected)
    assert torch.equal(sample_positions(lists, config), expected)


def test_touching_images_and_frames_are_placed_each_by_its_own_grid() -> None:
    # One row of two, then two rows of one, then a video of two frames of one token each, then text.
    types = [0, 1, 1, 1, 1, 2, 2, 0]
    positions = vision_positions(types, [[1, 2, 4], [1, 4, 2]], [[2, 2, 2]], merge_size=2)
    assert positions.tolist() == [
        [0, 1, 1, 3, 3, 5, 6, 7],
        [0, 1, 1, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 3, 5, 6, 7],
    ]


def test_sound_after_the_last_frame_decides_where_text_goes_on() -> None:
    """By hand: vision_start, audio_start, a 1×1×3 frame at 0, two audio tokens, two ends, text."""
    config = omni_config().thinker_config
    video, audio = config.video_token_id, config.audio_token_id
    ids = [config.vision_start_token_id, config.audio_start_token_id, *[video] * 3, audio, audio, 1, 2, 3]
    positions = omni_positions(ids, config, None, [[1, 2, 6]], [1.0], [16], use_audio_in_video=True)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 3, 4, 5, 6],
        [0, 1, 2, 2, 2, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


# Lengths of items.


def test_audio_tokens_equal_the_stock_formula() -> None:
    formula = stock_omni._get_feat_extract_output_lengths
    takes_window = "n_window" in inspect.signature(formula).parameters
    for window in (49, 50, 51, 52) if takes_window else (50,):
        config = omni_config(audio_config={"n_window": window})
        frames = torch.arange(1, 1000)
        expected = formula(frames, window) if takes_window else formula(frames)
        assert [audio_tokens(n, config) for n in frames.tolist()] == expected.tolist()


@pytest.mark.parametrize("window", [3, 10, 25, 50, 64])
def test_audio_tokens_are_what_the_convolutions_leave(window: int) -> None:
    config = omni_config(audio_config={"n_window": window})
    encoder = stock_omni.Qwen3OmniMoeAudioEncoder
    with torch.device("meta"):
        tower = encoder(encoder.config_class(d_model=8, encoder_layers=0, encoder_attention_heads=1,
                                             downsample_hidden_size=2, output_dim=2))  # fmt: skip
        for frames in (1, 7, 8, 9, 2 * window - 1, 2 * window, 2 * window + 1, 5 * window):
            left = 0
            for chunk in torch.empty(1, tower.num_mel_bins, frames).split(2 * window, dim=-1):
                left += tower.conv2d3(tower.conv2d2(tower.conv2d1(chunk[None]))).shape[-1]
            assert audio_tokens(frames, config) == left


def test_number_of_tokens_of_a_grid() -> None:
    assert num_media_tokens([3, 4, 8], 2) == 3 * 2 * 4
    assert num_media_tokens(torch.tensor([1, 6, 3]), 3) == 2
    with pytest.raises(ValueError, match=r"1×4×7 patches.*multiples of the merge size 2"):
        num_media_tokens([1, 4, 7], 2)


def test_token_types_go_by_the_ids_of_the_config() -> None:
    ids = [5, IMAGE, VIDEO, AUDIO, START]
    assert token_types(ids, omni_config()).tolist() == [0, 1, 2, 3, 0]
    assert token_types(torch.tensor([ids]), AutoConfig.for_model("qwen3_vl")).tolist() == [0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("items", "text", "message"),
    [
        (["audio"], None, r"unknown items \['audio'\]; qwen3_vl knows image, video"),
        (["image"], [1], "text has 1 numbers for 1 items; give 2"),
    ],
)
def test_impossible_random_samples_are_refused(
    items: list[str], text: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        media_sample(AutoConfig.for_model("qwen3_vl"), items, text=text)


def test_encoder_inputs_of_random_samples_fit_their_grids() -> None:
    config = omni_config()
    sample = media_sample(config, ["image", "video", "audio", "image"], seed=2, encoder_inputs=True)
    assert sample["pixel_values"].shape == (int(sample["image_grid_thw"].prod(-1).sum()), 3 * 2 * 16 * 16)
    assert sample["input_features"].shape[0] == 1
    sample_positions(sample, config)


# What is refused.

ONE_IMAGE = {"input_ids": [1, *[IMAGE] * 4, 2], "image_grid_thw": [[1, 4, 4]]}
TWO_IMAGES = {"input_ids": [IMAGE, IMAGE, 1, IMAGE], "image_grid_thw": [[1, 2, 4], [1, 2, 2]]}
ONE_VIDEO = {"input_ids": [1, VIDEO, 2, VIDEO, 3], "video_grid_thw": [[2, 2, 2]]}


@pytest.mark.parametrize(
    ("sample", "changes", "message"),
    [
        (ONE_IMAGE, {"input_ids": [IMAGE] * 3}, r"image 0 \(1×2×2 tokens\) needs 4 .*found 3 at token 0"),
        (ONE_IMAGE, {"input_ids": [1, 2]}, "image 0 .*needs 4 image placeholders, found 0"),
        (ONE_IMAGE, {"input_ids": [IMAGE, IMAGE, 1, IMAGE, IMAGE]}, "image 0 .*needs 4 .*found 2 at token 0"),
        (ONE_IMAGE, {"image_grid_thw": None}, "4 image placeholders from token 1 on belong to no image"),
        (ONE_IMAGE, {"image_grid_thw": [[1, 4, 4], [1, 2, 2]]}, "image 1 .*needs 1 .*found 0"),
        (ONE_IMAGE, {"image_grid_thw": [[1, 4, 5]]}, "image_grid_thw: item 0 is 1×4×5 patches"),
        (ONE_IMAGE, {"image_grid_thw": [1, 4, 4]}, r"image_grid_thw has shape \(3,\)"),
        (TWO_IMAGES, {"image_grid_thw": [[1, 2, 2], [1, 2, 2]]}, "image 0 .*needs 1 .*found 2 at token 0"),
        (TWO_IMAGES, {"image_grid_thw": [[1, 2, 2], [1, 2, 4]]}, "image 0 .*needs 1 .*found 2 at token 0"),
        (TWO_IMAGES, {"image_grid_thw": [[1, 2, 4], [1, 2, 4]]}, "image 1 .*needs 2 .*found 1 at token 3"),
        (TWO_IMAGES, {"image_grid_thw": [[1, 2, 4]]},
         "1 image placeholders from token 3 on .* 2 in all, found 3"),
        (ONE_VIDEO, {"video_grid_thw": [[1, 2, 2], [2, 2, 2]]}, "video 1, frame 1 .*needs 1 .*found 0"),
        (ONE_VIDEO, {"video_grid_thw": [[2, 2, 4]]}, "video 0, frame 0 .*needs 2 .*found 1 at token 1"),
        (ONE_VIDEO, {"input_features": 0},
         "key 'input_features' is not known for qwen3_vl; known are input_ids"),
        (ONE_VIDEO, {"second_per_grid_ts": [1.0]}, "key 'second_per_grid_ts' is not known for qwen3_vl"),
        (ONE_VIDEO, {"pixel_values": torch.zeros(4, 8)},
         "pixel_values has 4 patches, but image_grid_thw has 0"),
        (ONE_VIDEO, {"pixel_values_videos": torch.zeros(7, 8)}, "has 7 patches, but video_grid_thw has 8"),
        (ONE_VIDEO, {"mm_token_type_ids": [0, 2, 0, 1, 0]},
         "says 1 for token 3, whose id 151656 is of type 2"),
        (ONE_VIDEO, {"mm_token_type_ids": [0, 2]}, "2 mm_token_type_ids for 5 input_ids"),
    ],
)  # fmt: skip
def test_vision_samples_that_disagree_are_refused(
    sample: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = AutoConfig.for_model("qwen3_vl")
    assert sample_positions(sample, config).shape == (4, len(sample["input_ids"]))
    with pytest.raises(ValueError, match=message):
        sample_positions(sample | changes, config)


CLIP = {
    "input_ids": [1, AUDIO_START, *[AUDIO] * 14, 2],
    "feature_attention_mask": torch.ones(1, 101),
    "input_features": torch.zeros(1, 128, 101),
}
OMNI_IMAGE = {"input_ids": [START, *[IMAGE] * 4, END], "image_grid_thw": [[1, 4, 4]]}
OMNI_VIDEO = {
    "input_ids": [START, VIDEO, VIDEO, END],
    "video_grid_thw": [[2, 2, 2]],
    "second_per_grid_ts": [1.0],
}
# At 25 positions a second the second frame comes after two audio tokens, which last 8 frames each.
SOUND = OMNI_VIDEO | {
    "input_ids": [START, AUDIO_START, VIDEO, AUDIO, AUDIO, VIDEO, 5, END],
    "feature_attention_mask": torch.ones(1, 16),
    "use_audio_in_video": True,
}


@pytest.mark.parametrize(
    ("sample", "changes", "message"),
    [
        (CLIP, {"input_ids": [1, AUDIO_START, *[AUDIO] * 13, 2]},
         r"audio 0 \(101 mel frames\) needs 14 audio placeholders, found 13 at token 2"),
        (CLIP, {"input_ids": [1, 2]}, "audio 0 has no placeholders: 1 of this kind were given"),
        (CLIP, {"feature_attention_mask": None, "input_features": None},
         "14 audio placeholders at token 2 belong"),
        (CLIP, {"feature_attention_mask": None}, "need feature_attention_mask"),
        (CLIP, {"feature_attention_mask": torch.ones(1, 100)},
         r"shape \(1, 100\), input_features \(1, 128, 101\)"),
        (CLIP, {"audio_feature_lengths": [100]}, r"audio_feature_lengths is \[100\], but .* \[101\] frames"),
        (CLIP, {"feature_attention_mask": torch.zeros(1, 101)}, "mel frames; each needs at least 1"),
        (OMNI_IMAGE, {"image_grid_thw": [[1, 2, 4]]},
         r"image 0 \(1×1×2 tokens\) needs 2 .*found 4 at token 1"),
        (OMNI_IMAGE, {"image_grid_thw": [[1, 4, 4]] * 2}, "image 1 has no placeholders"),
        (OMNI_IMAGE, {"input_ids": [1, *[IMAGE] * 4, END]},
         r"image placeholders at token 1 follow the tokens \[1\]"),
        (OMNI_IMAGE, {"input_ids": [START, *[IMAGE] * 4, START, *[IMAGE] * 4, END]},
         "directly follows the item before it"),
        (OMNI_VIDEO, {"second_per_grid_ts": None}, r"second_per_grid_ts is \[\] for 1 videos"),
        (OMNI_VIDEO, {"second_per_grid_ts": [0.0]}, "seconds above 0"),
        (OMNI_VIDEO, {"video_second_per_grid": [1.0]}, "two names for the same thing"),
        (OMNI_VIDEO, {"use_audio_in_video": True}, "video at token 1 has no audio among its tokens"),
        (SOUND, {"use_audio_in_video": False}, "needs use_audio_in_video=True"),
        (SOUND, {"feature_attention_mask": torch.ones(1, 17)},
         r"audio 0 \(17 mel frames\) needs 3 .*found 2"),
        (SOUND, {"video_grid_thw": [[3, 2, 2]]}, "video 0 .*needs 3 video placeholders, found 2 at token 2"),
        (SOUND, {"input_ids": [START, AUDIO_START, VIDEO, VIDEO, AUDIO, AUDIO, 5, END]},
         "not in temporal order"),
        (SOUND, {"pixel_value": 0}, "key 'pixel_value' is not known for qwen3_omni_moe"),
    ],
)  # fmt: skip
def test_omni_samples_that_disagree_are_refused(
    sample: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = omni_config()
    assert sample_positions(sample, config).shape == (4, len(sample["input_ids"]))
    with pytest.raises(ValueError, match=message):
        sample_positions(sample | changes, config)
