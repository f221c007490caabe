"""Losses of log-probabilities, entropies, fields and sums over samples equal plain code on stock models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import mixed_samples, tiny_media_config, tiny_media_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.verify.loss_mutants import LOSS_MUTANTS
from seqbraid.verify.objective import POLICY, with_fields
from seqbraid.verify.parity import check_parity, rows_of, stock_references
from seqbraid.verify.verdict import ALLOWANCE
from tests.helpers import ranks

LENGTHS = (1, 2, 63, 65, 130, 40)
PLAIN = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5")
WINDOWS = ("gemma3", "gpt_oss")
MEDIA = ("qwen3_vl", "qwen3_omni")

MESHES: dict[str, dict[str, int]] = {
    "ring": {"ring": 2},
    "ulysses": {"ulysses": 2},
    "both": {"ring": 2, "ulysses": 2},
    "tp": {"tp": 2},
    "data": {"dp_shard": 2},
    "stages": {"pp": 2, "ring": 2},
}
CASES = [(family, mesh) for family in (*PLAIN, *MEDIA) for mesh in ("both", "tp")]
CASES += [(family, mesh) for family in ("llama", "qwen3_5") for mesh in ("ring", "ulysses", "data")]
CASES += [(family, "ulysses") for family in WINDOWS]
CASES += [(family, "stages") for family in ("qwen3", "qwen3_moe", "qwen3_vl")]
"""`losses_grid.py` has the others."""


def make(family: str) -> Any:
    return tiny_media_model(family) if family in MEDIA else tiny_model(family)


def samples_of(family: str) -> list[dict[str, Any]]:
    if family in MEDIA:
        return with_fields(mixed_samples(tiny_media_config(family)))
    return with_fields(random_samples(LENGTHS, 97, seed=3))


def prepared(folder: Path, family: str, data_ranks: int) -> str:
    """The stock measurements, in which the routers' loss is that of each data rank's row."""
    path = folder / f"{family}-{data_ranks}.pt"
    if not path.exists():
        samples = samples_of(family)
        rows = rows_of(len(samples), data_ranks)
        torch.save((samples, stock_references(make(family), samples, rows, POLICY)), path)
    return str(path)


def verdict(path: str, family: str, axes: dict[str, int]) -> Any:
    samples, references = torch.load(path, weights_only=False)
    # One rank of a row has the sequences whole, which windows want.
    policy = "zigzag" if axes.get("ring", 1) * axes.get("ulysses", 1) > 1 else "balanced"
    mesh = sb.Mesh(**axes)
    parity = check_parity(make(family), samples, mesh, policy=policy, references=references, objective=POLICY)
    return parity.holds, parity.worst


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_a_loss_of_tokens_and_samples_equals_plain_code(folder: Path, family: str, mesh: str) -> None:
    axes = MESHES[mesh]
    path = prepared(folder, family, axes.get("dp_shard", 1))
    for holds, worst in ranks.run(verdict, math.prod(axes.values()), path, family, axes):
        assert holds, worst


def caught(path: str, name: str) -> tuple[float, bool]:
    """On one rank: how far off the check is with the defect, and whether it holds without."""
    (mutant,) = (m for m in LOSS_MUTANTS if m.name == name)
    with mutant.switched_on():
        _, worst = verdict(path, mutant.check, mutant.mesh)
    return worst.ratio, verdict(path, mutant.check, mutant.mesh)[0]


@pytest.mark.parametrize("mutant", LOSS_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(folder: Path, mutant: Any) -> None:
    path = prepared(folder, mutant.check, 1)
    for ratio, healthy in ranks.run(caught, mutant.world_size, path, mutant.name):
        assert healthy and ratio > 10 * ALLOWANCE
