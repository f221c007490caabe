"""The demo's samples and rows hold what they say."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from seqbraid.data.pack import pack
from seqbraid.train.demo.digits import (
    HELD_OUT,
    IMAGE,
    LONG,
    VISION_END,
    VISION_START,
    Digits,
    held_out_rows,
    load_digits,
    make_sample,
    num_tokens,
    patches,
    predicted_digits,
    tiny_reader,
    train_and_held_out,
    training_rows,
    training_samples,
)


def numbered(count: int) -> Digits:
    """Digits that can be told apart: every pixel of image n is n / 100."""
    images = (torch.arange(count) / 100)[:, None, None].expand(count, 8, 8)
    return Digits(images, torch.arange(count) % 10)


def number_of(sample: dict[str, torch.Tensor]) -> list[int]:
    """Which of the numbered digits a sample holds, read from its pixels."""
    return ((sample["pixel_values"][::16, 0] + 1) * 8 * 100).round().long().tolist()


def test_patches_of_a_token_are_neighbours() -> None:
    """16 patches of 2 × 2 pixels; each block of 2 × 2 patches makes a token, as the stock tower merges."""
    image = torch.arange(64.0).view(8, 8) / 4
    expected = []
    for block_y, block_x in [(0, 0), (0, 4), (4, 0), (4, 4)]:
        for patch_y, patch_x in [(0, 0), (0, 2), (2, 0), (2, 2)]:
            y, x = block_y + patch_y, block_x + patch_x
            expected.append([image[y + dy, x + dx].item() / 8 - 1 for dy in (0, 1) for dx in (0, 1)])
    assert torch.equal(patches(image[None]), torch.tensor(expected))


def test_a_sample_is_images_each_followed_by_its_digit() -> None:
    sample = make_sample(Digits(torch.zeros(2, 8, 8), torch.tensor([7, 3])))
    image = [VISION_START, IMAGE, IMAGE, IMAGE, IMAGE, VISION_END]
    assert sample["input_ids"].tolist() == [*image, 7, *image, 3]
    assert sample["labels"].tolist() == [-100] * 6 + [7] + [-100] * 6 + [3]
    assert sample["pixel_values"].shape == (32, 4)
    assert sample["image_grid_thw"].tolist() == [[1, 4, 4]] * 2


def test_held_out_digits_are_never_trained_on() -> None:
    digits = numbered(1797)
    train, held_out = train_and_held_out(digits, seed=3)
    assert len(held_out) == HELD_OUT
    numbers = torch.cat([train.images[:, 0, 0], held_out.images[:, 0, 0]])
    assert torch.equal(numbers.sort().values, digits.images[:, 0, 0])


def test_rows_are_full_mixed_and_the_same_for_a_seed() -> None:
    digits = numbered(1500)
    rows = list(islice(training_rows(digits, 512, seed=1), 60))
    again = list(islice(training_rows(digits, 512, seed=1), 60))
    assert [[number_of(s) for s in row] for row in rows] == [[number_of(s) for s in row] for row in again]
    tokens = [sum(map(num_tokens, row)) for row in rows]
    assert max(tokens) <= 512 and sum(tokens) > 0.9 * 512 * 60
    assert {num_tokens(sample) >= 7 * LONG[0] for row in rows for sample in row} == {True, False}


def test_every_digit_is_in_a_sample_before_any_comes_again() -> None:
    samples = training_samples(numbered(200), np.random.default_rng(0))
    numbers = [number for sample in islice(samples, 100) for number in number_of(sample)]
    assert sorted(numbers[:200]) == sorted(numbers[200:400]) == list(range(200))
    assert numbers[:200] != numbers[200:400] != sorted(numbers[200:400])


def test_held_out_rows_hold_every_digit_once_in_order() -> None:
    rows = held_out_rows(numbered(297), 512)
    assert [number for row in rows for sample in row for number in number_of(sample)] == list(range(297))
    assert max(sum(map(num_tokens, row)) for row in rows) <= 512


def test_predictions_are_read_before_each_digit() -> None:
    sample = make_sample(Digits(torch.zeros(3, 8, 8), torch.tensor([7, 3, 0])))
    logits_TV = torch.zeros(21, 16)
    for place, digit in [(5, 7), (12, 4), (19, 0)]:
        logits_TV[place, digit] = 1.0
    assert predicted_digits([logits_TV], [sample]).tolist() == [7, 4, 0]


def test_the_bundled_digits_can_be_packed_for_the_reader() -> None:
    model = tiny_reader(seed=0)
    assert 6e5 < sum(p.numel() for p in model.parameters()) < 9e5
    assert set(model.config.text_config.layer_types) == {"linear_attention", "full_attention"}
    digits = load_digits()
    assert len(digits) == 1797 and digits.images.max() == 16 and digits.labels[:3].tolist() == [0, 1, 2]
    batch = pack([make_sample(digits.part(torch.arange(5)))], model.config)
    assert batch.label_tokens == 5
