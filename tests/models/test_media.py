"""Media samples: what is refused, and that an item's features are those of the item alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid.models.families import family_of
from seqbraid.models.media import MediaInput, sample_media
from seqbraid.models.media_tokens import audio_tokens
from seqbraid.models.parts import ModelParts, towers_of
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import tiny_media_config, tiny_media_model
from seqbraid.models.tiny.media_samples import media_sample
from seqbraid.models.towers import Towers
from tests.helpers.plain import relative


def sample(family: str, items: list[str], **changes: Any) -> dict[str, Any]:
    text = [3] * (len(items) + 1)
    made = media_sample(tiny_media_config(family), items, 5, text, max_side=3, encoder_inputs=True)
    return {key: value for key, value in (made | changes).items() if value is not None}


def nan_pixels() -> torch.Tensor:
    pixels = sample("qwen3_vl", ["image"])["pixel_values"].clone()
    pixels[3, 2] = float("nan")
    return pixels


ONE_TOKEN = {"input_ids": torch.tensor([1, 2, 100, 3]), "labels": None, "mm_token_type_ids": None}
NO_IMAGE = {"pixel_values": None, "image_grid_thw": None}
SMALL_GRID = {"image_grid_thw": torch.tensor([[1, 2, 2]])}
SHORT_MASK = {"feature_attention_mask": torch.ones(1, 3)}


@pytest.mark.parametrize(
    ("family", "items", "changes", "message"),
    [
        ("qwen3_vl", ["image"], ONE_TOKEN, r"sample 1: image 0 .* needs 6 image placeholders, found 1"),
        ("qwen3_vl", ["image"], NO_IMAGE, "sample 1: 6 image placeholders .* belong to no image"),
        (
            "qwen3_vl",
            ["image"],
            SMALL_GRID,
            "sample 1: pixel_values has 24 patches, but image_grid_thw has 4",
        ),
        (
            "qwen3_vl",
            ["video"],
            {"video_grid_thw": None},
            "sample 1: pixel_values_videos has 72 patches, but",
        ),
        ("qwen3_vl", ["image"], {"pixel_values": None}, "sample 1 has only one of pixel_values and"),
        ("qwen3_vl", [], {"input_features": torch.zeros(1, 16, 8)}, "sample 1: key 'input_features' is not"),
        ("qwen3_5", [], {"frames": [1]}, "sample 1: key 'frames' is not known for qwen3_5; known are"),
        (
            "qwen3_omni",
            ["audio"],
            SHORT_MASK,
            r"sample 1: feature_attention_mask has shape \(1, 3\), input_features",
        ),
        ("qwen3_omni", ["audio"], {"feature_attention_mask": None}, "sample 1: input_features need"),
        ("qwen3_omni", ["audio"], {"input_features": None}, "sample 1 has only one of input_features"),
    ],
)
def test_refused_with_the_sample_named(
    family: str, items: list[str], changes: dict[str, Any], message: str
) -> None:
    good = sample(family, [])
    with pytest.raises(ValueError, match=message):
        sb.pack([good, sample(family, items, **changes)], tiny_media_config(family))


def test_nan_pixels_are_found_when_asked_for() -> None:
    config, samples = (
        tiny_media_config("qwen3_vl"),
        [sample("qwen3_vl", ["image"], pixel_values=nan_pixels())],
    )
    assert sb.pack(samples, config).media is not None
    with pytest.raises(ValueError, match="sample 0: image 0 holds NaN or infinity"):
        sb.pack(samples, config, check_media=True)


def test_a_text_batch_is_refused_by_a_media_model() -> None:
    model = sb.parallelize(tiny_media_model("qwen3_vl"))
    batch = sb.pack([{"input_ids": [1, 2, 3]}], tiny_model("llama", vocab_size=120).config)
    with pytest.raises(ValueError, match="packed for a text model; pass this model's config to pack"):
        model(batch)


def clips(lengths: tuple[int, ...]) -> list[MediaInput]:
    config = tiny_media_config("qwen3_omni")
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        mel = torch.randn(1, 16, length, generator=generator)
        ids = [1, *[config.audio_token_id] * audio_tokens(length, config), 2]
        media = {"input_features": mel, "feature_attention_mask": torch.ones(1, length)}
        family = family_of(config)
        assert family is not None
        found += sample_media(media, 0, 0, torch.tensor(ids), config, family)
    return found


def test_a_clip_is_not_changed_by_longer_ones_beside_it() -> None:
    """The stock tower does change it, once convolutions have biases."""
    model = tiny_media_model("qwen3_omni")
    towers = Towers(ModelParts.of(model))
    together = clips((70, 300, 5, 100, 70, 1, 130))
    with torch.no_grad():
        counts = [media.item.num_features for media in together]
        beside = towers.features(together, torch.zeros(())).split(counts)
        alone = [towers.features([media], torch.zeros(())) for media in together]
        stock = towers._listen([media.payload for media in together], towers.audio).split(counts)
    for a, b in zip(beside, alone, strict=True):
        assert relative(a, b) < 1e-5
    assert relative(stock[0], alone[0][:, :32]) > 1e-3


def test_frozen_towers_have_no_backward() -> None:
    model = tiny_media_model("qwen3_vl")
    towers_of(model).visual.requires_grad_(False)
    braided = sb.parallelize(model)
    batch = sb.pack([sample("qwen3_vl", ["image", "video"])], model.config)
    assert batch.media is not None
    assert not braided._adapter.towers.features(batch.media.own, torch.zeros(())).requires_grad
    braided(batch).loss.backward()
    assert all(p.grad is None for p in towers_of(model).visual.parameters())

    towers_of(model).visual.merger.requires_grad_(True)
    braided(batch).loss.backward()
    found = {
        name.split(".")[0] for name, p in towers_of(model).visual.named_parameters() if p.grad is not None
    }
    assert found == {"merger"}
