"""Media models, packed and split over ranks, equal the stock model on each sample alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from seqbraid import Mesh, SequenceLayout
from seqbraid.data.pack import build_row
from seqbraid.models.tiny.media import MEDIA_FAMILIES, mixed_samples, tiny_media_config, tiny_media_model
from seqbraid.models.tiny.media_samples import media_sample
from seqbraid.sequence_parallel.media import MediaPlan
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from tests.helpers import ranks
from tests.helpers.references import stored

CASES = [(family, *mesh) for mesh in ((1, 1), (2, 2)) for family in MEDIA_FAMILIES]
CASES += [("qwen3_5", 2, 1), ("qwen3_vl_moe", 1, 2), ("qwen3_5_moe", 4, 2), ("qwen3_omni", 4, 2)]
"""Family, ring and ulysses; `ranks_grid.py` has the others."""

WITHOUT_MEDIA = [(family, "one image") for family in ("qwen3_vl_moe", "qwen3_5", "qwen3_omni")]
WITHOUT_MEDIA += [(family, "no media") for family in ("qwen3_vl", "qwen3_5_moe", "qwen3_omni")]


def rows(family: str) -> dict[str, list[dict[str, Any]]]:
    """The mix; one image of one token among text, which most ranks see nothing of; text alone; and, for two
    data ranks that take turns, media for the first alone."""
    config = tiny_media_config(family)

    def made(items: list[str], *text: int) -> dict[str, Any]:
        return media_sample(config, items, sum(text), text, max_side=1, encoder_inputs=True)

    return {
        "mixed": mixed_samples(config),
        "one image": [made(["image"], 2, 3), *(made([], n) for n in (61, 50, 40, 7))],
        "no media": [made([], n) for n in (61, 1, 40, 7)],
        "in turn": [made(["image", "video"], 2, 3, 9), made([], 40), made(["image"], 5, 6), made([], 20)],
    }


def prepared(family: str, row: str) -> str:
    """The stock measurements of a row."""

    def make() -> Any:
        samples = rows(family)[row]
        shared = rows_of(len(samples), 2) if row == "in turn" else None
        return samples, stock_references(tiny_media_model(family), samples, shared)

    return stored(make, family, row)


def verdicts(path: str, family: str, mesh: dict[str, int], cases: list[dict[str, Any]]) -> list[Any]:
    samples, references = torch.load(path, weights_only=False)
    ours, found = Mesh(**mesh), []
    for case in cases:
        parity = check_parity(tiny_media_model(family), samples, ours, references=references, **case)
        found.append((parity.holds, parity.worst))
    return found


@pytest.mark.parametrize(("family", "ring", "ulysses"), CASES)
def test_split_media_equal_each_sample_alone(family: str, ring: int, ulysses: int) -> None:
    mesh = {"ring": ring, "ulysses": ulysses}
    cases = [{"policy": "zigzag"}, {"policy": "balanced"}]
    for per_rank in ranks.run(verdicts, ring * ulysses, prepared(family, "mixed"), family, mesh, cases):
        for holds, worst in per_rank:
            assert holds, worst


@pytest.mark.parametrize(("family", "row"), WITHOUT_MEDIA)
def test_ranks_without_media(family: str, row: str) -> None:
    layout = SequenceLayout([len(sample["input_ids"]) for sample in rows(family)[row]], ring=2, ulysses=2)
    items = [media.item for media in build_row(rows(family)[row], tiny_media_config(family)).media or ()]
    owners = [r for r in range(4) if len(MediaPlan.of(layout, items, r).local_rows)]
    assert len(owners) == (row == "one image")
    mesh, cases = {"ring": 2, "ulysses": 2}, [{"policy": "zigzag"}, {"policy": "balanced"}]
    for per_rank in ranks.run(verdicts, 4, prepared(family, row), family, mesh, cases):
        for holds, worst in per_rank:
            assert holds, worst


def test_an_image_of_the_mix_is_on_three_ranks_and_more() -> None:
    for family in MEDIA_FAMILIES:
        row = build_row(rows(family)["mixed"], tiny_media_config(family))
        large = max(row.media or (), key=lambda media: media.item.num_features)
        for policy in ("zigzag", "balanced"):
            layout = SequenceLayout(row.lengths, ring=4, ulysses=2, policy=policy)
            assert sum(len(MediaPlan.of(layout, [large.item], r).local_rows) > 0 for r in range(8)) >= 3


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_omni"])
def test_text_beside_images_on_data_ranks(family: str) -> None:
    """One data rank has text alone, the other has media: no hang, and the same gradient."""
    mesh = {"dp_shard": 2, "ring": 2}
    path = prepared(family, "in turn")
    for per_rank in ranks.run(verdicts, math.prod(mesh.values()), path, family, mesh, [{}]):
        for holds, worst in per_rank:
            assert holds, worst
