"""The examples of docs/pipeline.md and docs/mtp.md run, and give what one process without them gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from tests.helpers.ranks import run

DOCS = Path(__file__).parents[1] / "docs"
LENGTHS = (30, 7, 21, 12)


def example(page: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def alone() -> tuple[float, dict[str, Any]]:
    samples = random_samples(LENGTHS, 97)
    model = sb.parallelize(tiny_model("qwen3_5"))
    out = model(sb.pack(samples, model.config))
    return float(out.mean_loss), {"sb": sb, "samples": samples, "hf_model": tiny_model("qwen3_5")}


def _pipeline_of_four() -> float:
    samples = random_samples(LENGTHS, 97)
    mesh = sb.Mesh(pp=4, dp_shard=2)
    rows = [[sample] for sample in samples[mesh.data_rank :: 2]]
    scope: dict[str, Any] = {"sb": sb, "hf_model": tiny_model("qwen3_5"), "rows": rows}
    exec(example("pipeline.md"), scope)
    return float(scope["out"].mean_loss)


def test_the_example_of_pipeline_stages_gives_the_loss_of_one_process() -> None:
    loss, _ = alone()
    assert run(_pipeline_of_four, 8) == pytest.approx([loss] * 8, rel=1e-5)


def test_the_example_of_multi_token_prediction_adds_its_loss() -> None:
    loss, scope = alone()
    scope["mesh"] = sb.Mesh()
    exec(example("mtp.md").replace("depth=1", "depth=1, fresh=True", 1), scope)  # tiny models have no source
    out = scope["out"]
    assert float(out.mean_loss) == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(out.loss, out.mean_loss + 0.3 * out.mtp_loss, rtol=1e-5) and out.mtp_loss > 0
