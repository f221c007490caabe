"""Packed equals the stock model on each sample alone: loss, logits and every parameter gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from seqbraid.models.tiny.decoders import FAMILIES, tiny_model
from seqbraid.models.tiny.samples import LENGTHS, random_samples
from seqbraid.verify.parity import check_parity, stock_references
from seqbraid.verify.reference import Measurement

RISING = (1, 1, *LENGTHS)
ORDERS = {
    "rising": RISING,
    "falling": RISING[::-1],
    "mixed": (130, 1, 257, 1, 64, 2, 1, 65, 63),
    "ones first and last": (1, 65, 1, 130, 63, 257, 64, 2, 1),
}
assert all(sorted(order) == list(RISING) for order in ORDERS.values())


@lru_cache(maxsize=1)
def stock(family: str, ignored: str) -> tuple[PreTrainedModel, list[dict[str, Any]], list[Measurement]]:
    """A model, samples of rising length, and what the model makes of each alone: the same in any order."""
    model, samples = tiny_model(family), random_samples(RISING, 97, seed=3, ignored=ignored)
    return model, samples, stock_references(model, samples)


def places(order: tuple[int, ...]) -> list[int]:
    """Of the rising samples: which one stands where in this order."""
    unused = list(range(len(RISING)))
    return [unused.pop(next(i for i, n in enumerate(unused) if RISING[n] == length)) for length in order]


@pytest.mark.parametrize(("order", "ignored"), zip(ORDERS, ("none", "some", "some", "whole"), strict=True))
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_each_sample_alone(family: str, order: str, ignored: str) -> None:
    model, samples, references = stock(family, ignored)
    row = places(ORDERS[order])
    ordered = [replace(found, logits=[found.logits[i] for i in row]) for found in references]
    parity = check_parity(model, [samples[i] for i in row], case=f"{family} {order}", references=ordered)
    assert parity.holds, parity.worst
    assert len(parity.lines) > 10


@pytest.mark.parametrize("layout", [{"pad_to": 1024}, {"multiple_of": 100}, {"fp8": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_nobody(family: str, layout: dict[str, int]) -> None:
    model, samples, references = stock(family, "some")
    parity = check_parity(model, samples, references=references, **layout)
    assert parity.holds, parity.worst


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    model = tiny_model(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    parity = check_parity(
        model, random_samples(LENGTHS, 97), multiple_of=100
    )  # with padding, which no expert gets
    assert parity.holds, parity.worst


def test_one_token_alone_has_no_label() -> None:
    parity = check_parity(tiny_model("qwen3_5"), random_samples([1], 97))
    assert parity.holds, parity.worst
