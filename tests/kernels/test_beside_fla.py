"""What is compared on a CPU holds where flash-linear-attention is installed too, though transformers then
takes its kernels, which need a GPU, for stock models on any device.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from seqbraid.models.stock import OFTEN_REPLACED, in_torch
from seqbraid.models.tiny.samples import random_samples
from seqbraid.verify.run import load_model


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_text", "qwen3_next"])
def test_parity(name: str) -> None:
    """As a user runs it: without the interpreter, with which the kernels would run here too."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "seqbraid", "verify", "--model", name]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_its_functions_are_put_back() -> None:
    model = load_model("qwen3_5_text")
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    replaced = any(hasattr(before.get(name), "__wrapped__") for name in OFTEN_REPLACED)
    ids = random_samples((70,), model.config.vocab_size)[0]["input_ids"]
    with pytest.raises(RuntimeError, match="inner"), in_torch(model):
        assert (vars(module) != before) == replaced
        assert model(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits.isfinite().all()
        raise RuntimeError("inner")
    assert vars(module) == before
