"""A flash attention implementation that replaces torch's is looked at before it is believed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seqbraid.ops import flash_impl
from seqbraid.ops.attention_kernels import DenseShape, VarlenShape, dense_backward, dense_forward

CPU = torch.device("cpu")


def dense_of(shape: VarlenShape) -> DenseShape:
    return DenseShape(shape.causal, None)


def stacked(x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    return x.unflatten(0, (len(cu) - 1, -1)).transpose(1, 2)


def packed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def forward(q: Any, k: Any, v: Any, shape: VarlenShape, scale: float) -> Any:
    out, lse = dense_forward(
        stacked(q, shape.cu_q), stacked(k, shape.cu_k), stacked(v, shape.cu_k), dense_of(shape), scale
    )
    return packed(out), lse.transpose(0, 1).flatten(1)


def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, shape: VarlenShape, scale: float) -> Any:
    lse = lse.unflatten(1, (2, -1)).transpose(0, 1).contiguous()
    tensors = [
        stacked(x, cu) for x, cu in ((dout, shape.cu_q), (q, shape.cu_q), (k, shape.cu_k), (v, shape.cu_k))
    ]
    return [
        packed(x) for x in dense_backward(*tensors, stacked(out, shape.cu_q), lse, dense_of(shape), scale)
    ]


def with_its_own_statistics(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, shape: Any, scale: float
) -> Any:
    return backward(dout, q, k, v, *forward(q, k, v, shape, scale), shape, scale)


@pytest.mark.parametrize("causal", [True, False])
def test_a_right_kernel_passes_and_one_with_its_own_statistics_does_not(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    """The CPU's kernels in the place of varlen ones."""
    monkeypatch.setattr(flash_impl, "varlen_forward", forward)
    monkeypatch.setattr(flash_impl, "varlen_backward", backward)
    keys = 64 if causal else 100
    assert flash_impl.block_error(CPU, causal, 64, keys) < flash_impl.TOLERANCE
    monkeypatch.setattr(flash_impl, "varlen_backward", with_its_own_statistics)
    assert flash_impl.block_error(CPU, causal, 64, keys) > 5 * flash_impl.TOLERANCE
    with pytest.raises(ValueError, match=r"FA9 is off by .* switch it off with"):
        flash_impl._check("FA9", CPU)


def test_no_replacement_on_the_cpu() -> None:
    assert flash_impl.active_flash_impl(CPU) is None
