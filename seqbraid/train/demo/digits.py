"""What the demo learns: handwritten digits among text, and the tiny model that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from ...layout.labels import IGNORE
from ...layout.streaming import StreamingPacker

IMAGE_SIDE = 8
GREY_LEVELS = 16
PATCH_SIDE = 2
MERGE_SIDE = 2
GRID_SIDE = IMAGE_SIDE // PATCH_SIDE
IMAGE_TOKENS = (GRID_SIDE // MERGE_SIDE) ** 2

IMAGE, VIDEO, VISION_START, VISION_END = 10, 11, 12, 13
"""Token ids from 0 to 9 are the digits themselves."""
VOCABULARY = 16

HELD_OUT = 297
SHORT, LONG = (4, 8), (16, 40)
"""Fewest and most digits of a sample; long ones are cut over ranks, short ones stay whole."""
LONG_SHARE = 0.15
BUFFERED_SAMPLES = 64

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Digits:
    """Images `[N, 8, 8]` from 0 (paper) to 16 (ink), and what they show."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, index: Tensor) -> Digits:
        """Some of the digits, in this order."""
        return Digits(self.images[index], self.labels[index])


def load_digits() -> Digits:
    """The 1,797 digits that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError:
        raise ValueError(
            "the demo uses the digits of scikit-learn, which is not installed; run `pip install "
            "'seqbraid[demo]'`"
        ) from None
    found = bundled()
    return Digits(torch.tensor(found.images, dtype=torch.float32), torch.tensor(found.target))


def train_and_held_out(digits: Digits, seed: int) -> tuple[Digits, Digits]:
    """Two parts that share no image."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(digits)))
    return digits.part(order[HELD_OUT:]), digits.part(order[:HELD_OUT])


def make_sample(digits: Digits) -> Sample:
    """Each image, as its placeholder tokens, and then its digit, the only token with a label."""
    num_digits = len(digits)
    around = torch.tensor([VISION_START, *[IMAGE] * IMAGE_TOKENS, VISION_END]).expand(num_digits, -1)
    ids_ND = torch.cat([around, digits.labels[:, None]], dim=1)
    labels_ND = torch.full_like(ids_ND, IGNORE)
    labels_ND[:, -1] = digits.labels
    return {
        "input_ids": ids_ND.flatten(),
        "labels": labels_ND.flatten(),
        "mm_token_type_ids": (ids_ND == IMAGE).long().flatten(),
        "pixel_values": patches(digits.images),
        "image_grid_thw": torch.tensor([[1, GRID_SIDE, GRID_SIDE]]).expand(num_digits, 3),
    }


def patches(images: Tensor) -> Tensor:
    """`[N·16, 4]`: pixels from −1 to 1, patch by patch, the four patches of a token behind each other."""
    cells = IMAGE_SIDE // (PATCH_SIDE * MERGE_SIDE)
    shape = (len(images), cells, MERGE_SIDE, PATCH_SIDE, cells, MERGE_SIDE, PATCH_SIDE)
    pixels = (images * (2 / GREY_LEVELS) - 1).view(shape)
    return pixels.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, PATCH_SIDE**2)


def training_rows(digits: Digits, row_tokens: int, seed: int) -> Iterator[list[Sample]]:
    """Rows of training samples without end."""
    packer: StreamingPacker[Sample] = StreamingPacker(row_tokens, num_tokens, BUFFERED_SAMPLES, seed=seed)
    return packer.pack(training_samples(digits, np.random.default_rng(seed)))


def training_samples(digits: Digits, rng: np.random.Generator) -> Iterator[Sample]:
    """A few or many digits to a sample: all of them once, in random order, and then again."""
    while True:
        order = torch.from_numpy(rng.permutation(len(digits)))
        while len(order):
            fewest, most = LONG if rng.random() < LONG_SHARE else SHORT
            size = int(rng.integers(fewest, most + 1))
            yield make_sample(digits.part(order[:size]))
            order = order[size:]


def held_out_rows(digits: Digits, row_tokens: int) -> list[list[Sample]]:
    """Every digit once, in order, the most of a short sample at a time."""
    samples = [make_sample(digits.part(index)) for index in torch.arange(len(digits)).split(SHORT[1])]
    per_row = row_tokens // num_tokens(samples[0])
    return [samples[i : i + per_row] for i in range(0, len(samples), per_row)]


def predicted_digits(logits: Iterable[Tensor], samples: Iterable[Sample]) -> Tensor:
    """What each sample's `[T, V]` logits say before every digit."""
    found = [
        logits_TV[:-1][sample["labels"][1:] != IGNORE].argmax(dim=1)
        for logits_TV, sample in zip(logits, samples, strict=True)
    ]
    return torch.cat(found)


def num_tokens(sample: Sample) -> int:
    """Tokens of a sample, those of its images included."""
    return len(sample["input_ids"])


def tiny_reader(seed: int) -> PreTrainedModel:
    """A Qwen3.5 with vision: three gated-delta layers to one full-attention layer, over a small tower."""
    width = 96
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
        "pad_token_id": None,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": 4,
        "in_channels": 1,
        "patch_size": PATCH_SIDE,
        "spatial_merge_size": MERGE_SIDE,
        "temporal_patch_size": 1,
        "num_position_embeddings": GRID_SIDE**2,
        "out_hidden_size": width,
    }
    config = Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = Qwen3_5ForConditionalGeneration(config)
    return model.train()
