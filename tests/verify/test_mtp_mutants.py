"""Defects of multi-token prediction: each is caught, and without it the same check holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.media import tiny_media_config, tiny_media_model
from seqbraid.models.tiny.media_samples import media_sample
from seqbraid.models.tiny.mtp import with_mtp
from seqbraid.models.tiny.samples import random_samples
from seqbraid.verify.mtp_mutants import MTP_MUTANTS
from seqbraid.verify.parity import check_parity, stock_references
from tests.helpers import ranks


def case(check: str) -> tuple[PreTrainedModel, list[dict[str, Any]]]:
    if check == "qwen3_5":
        return with_mtp(tiny_model("qwen3_5"), depth=2), random_samples((13, 2, 1, 22, 5), 97, seed=3)
    config = tiny_media_config("qwen3_5")
    samples = [media_sample(config, ["image"], 1, [4, 5], max_side=2, encoder_inputs=True)]
    samples += [media_sample(config, [], 2, [9], encoder_inputs=True)]
    return with_mtp(tiny_media_model("qwen3_5"), depth=2), samples


def ratio(path: str, name: str | None, mesh: dict[str, int]) -> float:
    """On one rank: how far the check is off, with a defect or without."""
    check, references = torch.load(path, weights_only=False)
    model, samples = case(check)
    if name is None:
        return check_parity(model, samples, Mesh(**mesh), references=references).worst.ratio
    (mutant,) = (m for m in MTP_MUTANTS if m.name == name)
    with mutant.switched_on():
        return check_parity(model, samples, Mesh(**mesh), references=references).worst.ratio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize("mutant", MTP_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(folder: Path, mutant: Any) -> None:
    path = folder / f"{mutant.check}.pt"
    if not path.exists():
        torch.save((mutant.check, stock_references(*case(mutant.check))), path)
        assert ratio(str(path), None, {}) < 10
    if mutant.ring == 1:
        assert ratio(str(path), mutant.name, {}) > 100
        return
    assert max(ranks.run(ratio, 2, str(path), None, mutant.mesh)) < 10
    assert min(ranks.run(ratio, 2, str(path), mutant.name, mutant.mesh)) > 100
