"""Defects of media training: each is caught, and without it the same check holds."""

from __future__ import annotations

from typing import Any

import pytest

from seqbraid import Mesh
from seqbraid.models.tiny.media import tiny_media_config, tiny_media_model
from seqbraid.models.tiny.media_samples import media_sample
from seqbraid.verify.media_mutants import MEDIA_MUTANTS, encoder_skipped
from seqbraid.verify.parity import check_parity
from tests.helpers import ranks
from tests.models.test_media_ranks import prepared, verdicts


def caught(path: str, name: str) -> Any:
    """On one rank: how far the check is off with the defect, and whether it holds without."""
    (mutant,) = (m for m in MEDIA_MUTANTS if m.name == name)
    mesh = {"ring": mutant.ring, "ulysses": mutant.ulysses}
    cases = [{"policy": "zigzag"}]
    with mutant.switched_on():
        ((_, worst),) = verdicts(path, mutant.check, mesh, cases)
    ((healthy, _),) = verdicts(path, mutant.check, mesh, cases)
    return worst.ratio, healthy


@pytest.mark.parametrize("mutant", MEDIA_MUTANTS, ids=lambda mutant: mutant.name)
def test_media_mutant_is_caught(mutant: Any) -> None:
    path = prepared(mutant.check, "mixed")
    for ratio, healthy in ranks.run(caught, mutant.ring * mutant.ulysses, path, mutant.name):
        assert healthy
        assert ratio > 1000


def text_beside_an_image(skipped: bool) -> Any:
    """Two data ranks, one of them with text alone."""
    family = "qwen3_vl"
    config = tiny_media_config(family)
    mixed = [
        media_sample(config, ["image"], 1, [4, 5], encoder_inputs=True),
        media_sample(config, [], 2, [20], encoder_inputs=True),
    ]
    if skipped:
        with encoder_skipped():
            return check_parity(tiny_media_model(family), mixed, Mesh(dp_shard=2)).holds
    return check_parity(tiny_media_model(family), mixed, Mesh(dp_shard=2)).holds


def test_a_rank_that_skips_the_encoder_is_caught() -> None:
    assert ranks.run(text_beside_an_image, 2, False) == [True, True]
    try:
        found = ranks.run(text_beside_an_image, 2, True, limit=20.0)
    except ranks.RankError:  # the others wait for it, or say that it is missing
        return
    assert not any(found)
