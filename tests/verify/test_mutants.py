"""Every planted defect is caught, and without it the same check holds."""

from __future__ import annotations

import pytest

from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.verify.blocks import check_blocks
from seqbraid.verify.mutants import MUTANTS
from seqbraid.verify.run import verify_model
from seqbraid.verify.verdict import Parity


def run_check(check: str) -> Parity:
    return check_blocks() if check == "blocks" else verify_model(tiny_model(check), check)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant) -> None:  # type: ignore[no-untyped-def]
    with mutant.switched_on():
        mutated = run_check(mutant.check)
    assert not mutated.holds
    assert mutated.worst.ratio > 100
    healthy = run_check(mutant.check)
    assert healthy.holds, healthy.worst


def test_a_zero_gradient_does_not_pass() -> None:
    """The measure itself: a gradient replaced by zeros is an error of one, not of nothing."""
    from seqbraid.models.tiny.samples import random_samples
    from seqbraid.verify import parity
    from seqbraid.verify.reference import stock_step

    reference = stock_step(tiny_model("llama"), random_samples([5, 9], 97))
    for name in reference.gradients:
        broken = {**reference.gradients, name: reference.gradients[name] * 0}
        got = parity.compare(
            "", parity.Measurement(reference.loss, reference.logits, broken), reference, [reference]
        )
        assert not got.holds and got.worst.name == name and abs(got.worst.error - 1) < 1e-6


def test_a_floor_that_hides_everything_does_not_hold() -> None:
    """Orders that were not equally valid give a large floor; a small ratio to it proves nothing."""
    from seqbraid.verify.verdict import Quantity

    assert Quantity("", error=1e-4, floor=1e-4).holds
    assert not Quantity("", error=1e-4, floor=0.5).holds
    assert not Quantity("", error=float("nan"), floor=1e-6).holds
