"""One thread, since the models are tiny, and what the examples in docstrings take for granted."""

import os
import tempfile
from typing import Any

# Ranks talk through gloo here, and runs would take a GPU that is there; `CUDA_VISIBLE_DEVICES=0` shows it.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import torch

import seqbraid

torch.set_num_threads(1)

# Where runs keep what they unpack and tokenize: not among the user's own.
_CACHES = tempfile.TemporaryDirectory(prefix="seqbraid-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHES.name

# They have no examples, and need Triton to be imported.
collect_ignore_glob = ["seqbraid/ops/*_triton.py"]
collect_ignore: list[str] = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("tests/kernels")  # `make test` runs them by themselves


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace["seqbraid"] = seqbraid
    doctest_namespace["torch"] = torch
