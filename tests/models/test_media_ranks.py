"""Media models, packed and split over ranks, equal the stock model on each sample alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from seqbraid import Mesh
from seqbraid.verify.parity import check_parity, stock_references
from seqbraid.verify.tiny_media import MEDIA_FAMILIES, mixed_samples, tiny_media_config, tiny_media_model
from tests import ranks

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]


def prepared(folder: Path, family: str) -> str:
    path = folder / f"{family}.pt"
    if not path.exists():
        samples = mixed_samples(tiny_media_config(family))
        torch.save((samples, stock_references(tiny_media_model(family), samples)), path)
    return str(path)


def verdicts(path: str, family: str, mesh: dict[str, int], cases: list[dict[str, Any]]) -> list[Any]:
    samples, references = torch.load(path, weights_only=False)
    found = []
    for case in cases:
        parity = check_parity(tiny_media_model(family), samples, Mesh(**mesh), references=references, **case)
        found.append((parity.holds, parity.worst))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
@pytest.mark.parametrize("family", MEDIA_FAMILIES)
def test_split_media_equal_each_sample_alone(folder: Path, family: str, ring: int, ulysses: int) -> None:
    mesh = {"ring": ring, "ulysses": ulysses}
    cases = [{"policy": "zigzag"}, {"policy": "balanced"}]
    for per_rank in ranks.run(verdicts, ring * ulysses, prepared(folder, family), family, mesh, cases):
        for holds, worst in per_rank:
            assert holds, worst


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "qwen3_omni"])
def test_text_beside_images_on_data_ranks(folder: Path, family: str) -> None:
    """Some data ranks have text alone, some have media: no hang, and the same gradient."""
    mesh = {"dp_shard": 2, "ring": 2}
    for per_rank in ranks.run(
        verdicts, math.prod(mesh.values()), prepared(folder, family), family, mesh, [{}]
    ):
        for holds, worst in per_rank:
            assert holds, worst
