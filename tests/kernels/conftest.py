"""Triton kernels on the CPU: with TRITON_INTERPRET=1 Triton runs their programs in numpy, one
after the other.

So mistakes in what they compute are seen here, races between programs or warps are not; on a GPU,
`benchmarks/repeats.py` looks for those.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def interpret(patch: pytest.MonkeyPatch) -> None:
    """What the interpreter needs to run our kernels and flash-linear-attention's: no GPU is chosen, nothing
    is timed to choose a configuration, and indices of loops are Triton's.
    """
    from fla.ops.common import chunk_delta_h
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import _implicit_cvt

    def indices(*bounds: Any) -> Iterator[Any]:
        return map(_implicit_cvt, builtins.range(*map(int, bounds)))

    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(Autotuner, "_bench", lambda self, *args, **kwargs: [0.0, 0.0, 0.0])
    patch.setattr(chunk_delta_h, "range", indices, raising=False)
