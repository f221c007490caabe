"""Families and meshes of ring and ulysses that the tests of this folder leave out: `make matrix`."""

from __future__ import annotations

from typing import Any

import pytest

from seqbraid.models.tiny.media import MEDIA_FAMILIES
from tests.models import test_gated_delta_ranks, test_media_ranks, test_parity_ranks

MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2), (2, 4)]
PLAIN = [(family, *mesh) for family in ("llama", "qwen3", "qwen3_moe") for mesh in MESHES]
GATED_DELTA = [
    (family, *mesh) for family in test_gated_delta_ranks.FAMILIES for mesh in ((2, 1), (1, 2), (2, 2), (4, 1))
]
EIGHT = [
    (family, *case) for family in test_gated_delta_ranks.FAMILIES for case in (("states", 4), ("heads", 8))
]
MEDIA = [(family, *mesh) for family in MEDIA_FAMILIES for mesh in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2))]
WITHOUT_MEDIA = [(family, row) for family in MEDIA_FAMILIES for row in ("one image", "no media")]


def others(cases: list[Any], tested: list[Any]) -> list[Any]:
    """What no test has."""
    assert set(tested) <= set(cases)
    return [case for case in cases if case not in tested]


@pytest.mark.parametrize(("family", "ring", "ulysses"), others(PLAIN, test_parity_ranks.CASES))
def test_split_equals_each_sample_alone(family: str, ring: int, ulysses: int) -> None:
    test_parity_ranks.test_split_equals_each_sample_alone(family, ring, ulysses)


@pytest.mark.parametrize(("family", "micro_batches"), [("llama", 3), ("qwen3_moe", 1)])
def test_data_ranks_and_accumulation(family: str, micro_batches: int) -> None:
    test_parity_ranks.test_data_ranks_and_accumulation(family, micro_batches)


@pytest.mark.parametrize(("family", "ring", "ulysses"), others(GATED_DELTA, test_gated_delta_ranks.CASES))
def test_split_hybrids_equal_each_sample_alone(family: str, ring: int, ulysses: int) -> None:
    test_gated_delta_ranks.test_split_equals_each_sample_alone(family, ring, ulysses)


@pytest.mark.parametrize(("family", "method", "num_key"), others(EIGHT, test_gated_delta_ranks.EIGHT))
def test_split_over_eight_ranks(family: str, method: str, num_key: int) -> None:
    test_gated_delta_ranks.test_split_over_eight_ranks(family, method, num_key)


def test_states_take_fewer_key_heads_than_ranks() -> None:
    test_gated_delta_ranks.test_states_take_fewer_key_heads_than_ranks(2)


def test_data_ranks_beside_the_ring() -> None:
    test_gated_delta_ranks.test_data_ranks_beside_the_ring(
        [{"gated_delta": "states"}, {"gated_delta": "heads", "micro_batches": 2}]
    )


@pytest.mark.parametrize(("family", "ring", "ulysses"), others(MEDIA, test_media_ranks.CASES))
def test_split_media_equal_each_sample_alone(family: str, ring: int, ulysses: int) -> None:
    test_media_ranks.test_split_media_equal_each_sample_alone(family, ring, ulysses)


@pytest.mark.parametrize(("family", "row"), others(WITHOUT_MEDIA, test_media_ranks.WITHOUT_MEDIA))
def test_ranks_without_media(family: str, row: str) -> None:
    test_media_ranks.test_ranks_without_media(family, row)
