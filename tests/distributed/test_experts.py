"""Experts over ranks: loss and every gradient are those of the stock model in one process."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from tests.helpers import ranks
from tests.models.tiny_types import tiny_type_model

LENGTHS = (30, 64, 5, 1, 2, 100, 17, 40)


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    if family == "mixtral":
        return tiny_type_model(family, dtype, **changes)
    return tiny_model(family, dtype=dtype, **changes)


def references(
    folder: Path, family: str, rows: list[list[int]] | None, changes: dict[str, Any], **data: Any
) -> str:
    """What stock makes of a case: made once by the test process, read by all ranks."""
    path = folder / f"{zlib.crc32(repr((family, rows, changes, data)).encode())}.pt"
    if not path.exists():
        samples = random_samples(data.get("lengths", LENGTHS), 97, seed=3, ignored="some")
        torch.save((samples, stock_references(build(family, **changes), samples, rows)), path)
    return str(path)


def verdict(
    path: str, family: str, mesh: dict[str, int], changes: dict[str, Any], case: dict[str, Any]
) -> tuple[bool, str]:
    samples, found = torch.load(path, weights_only=False)
    parity = check_parity(build(family, **changes), samples, Mesh(**mesh), references=found, **case)
    return parity.holds, parity.reason


def size_of(mesh: dict[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis != "ep")


def assert_holds(
    folder: Path, family: str, mesh: dict[str, int], changes: dict[str, Any] | None = None, **case: Any
) -> None:
    data = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    # The loss of routers is that of a row.
    rows = rows_of(len(LENGTHS), data, case.get("micro_batches", 1))
    path = references(folder, family, rows, changes or {})
    for holds, reason in ranks.run(verdict, size_of(mesh), path, family, mesh, changes or {}, case):
        assert holds, (mesh, reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2, "ep": 2},
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 4, "ep": 4},
    ],
)
def test_gradients_are_stocks(folder: Path, mesh: dict[str, int]) -> None:
    assert_holds(folder, "qwen3_moe", mesh)
