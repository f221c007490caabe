"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = tiny_model("qwen3_5")
    exec(example, {"hf_model": model, "samples": random_samples([5, 70, 3], 97)})
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
    assert (tmp_path / "out" / "model.safetensors").exists()
