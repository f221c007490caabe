"""Packed equals the stock model on each sample alone: loss, logits and every parameter gradient."""

from __future__ import annotations

import pytest

from seqbraid.verify.parity import check_parity
from seqbraid.verify.samples import LENGTHS, random_samples
from seqbraid.verify.tiny import FAMILIES, tiny_model

ORDERS = {
    "rising": LENGTHS,
    "falling": LENGTHS[::-1],
    "mixed": (130, 1, 257, 64, 2, 65, 63),
    "ones first and last": (1, 65, 1, 130, 63, 257, 64, 2, 1),
}


@pytest.mark.parametrize("ignored", ["none", "some", "whole"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_each_sample_alone(family: str, order: str, ignored: str) -> None:
    samples = random_samples(ORDERS[order], 97, seed=len(order), ignored=ignored)
    parity = check_parity(tiny_model(family), samples, case=f"{family} {order}")
    assert parity.holds, parity.worst
    assert len(parity.lines) > 10


@pytest.mark.parametrize("layout", [{"pad_to": 1024}, {"multiple_of": 100}, {"fp8": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_nobody(family: str, layout: dict[str, int]) -> None:
    parity = check_parity(tiny_model(family), random_samples(LENGTHS, 97), **layout)
    assert parity.holds, parity.worst


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    model = tiny_model(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    parity = check_parity(model, random_samples(LENGTHS, 97))
    assert parity.holds, parity.worst


def test_one_token_alone_has_no_label() -> None:
    parity = check_parity(tiny_model("qwen3_5"), random_samples([1], 97))
    assert parity.holds, parity.worst
