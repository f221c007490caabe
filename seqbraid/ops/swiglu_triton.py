# mypy: ignore-errors
"""`swiglu.py` as Triton kernels: each number is read once and written once, and is float32 in between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns that a program has."""


@triton.jit
def _swiglu_forward_kernel(gate, up, out, gate_stride, up_stride, I: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * I + column, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    dout, gate, up, dgate, dup, gate_stride, up_stride, dgate_stride, dup_stride,
    I: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    d = tl.load(dout + row * I + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    p = tl.sigmoid(g)
    tl.store(dgate + row * dgate_stride + column, d * u * (p + g * p * (1.0 - p)), mask=inside)
    tl.store(dup + row * dup_stride + column, d * g * p, mask=inside)


def forward(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """silu(gate) · up, of rows whose numbers lie side by side."""
    num_rows, width = gate_NI.shape
    out_NI = torch.empty(gate_NI.shape, dtype=gate_NI.dtype, device=gate_NI.device)
    if num_rows:
        with torch.cuda.device(gate_NI.device):
            _swiglu_forward_kernel[(num_rows, triton.cdiv(width, BLOCK))](
                gate_NI, up_NI, out_NI, gate_NI.stride(0), up_NI.stride(0), I=width, BLOCK=BLOCK
            )
    return out_NI


def backward(dout_NI: Tensor, gate_NI: Tensor, up_NI: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """Their gradients, over them if they are needed no more."""
    num_rows, width = gate_NI.shape
    dgate_NI, dup_NI = (
        x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate_NI, up_NI)
    )
    if num_rows:
        with torch.cuda.device(gate_NI.device):
            _swiglu_backward_kernel[(num_rows, triton.cdiv(width, BLOCK))](
                dout_NI.contiguous(), gate_NI, up_NI, dgate_NI, dup_NI, gate_NI.stride(0), up_NI.stride(0),
                dgate_NI.stride(0), dup_NI.stride(0), I=width, BLOCK=BLOCK,
            )  # fmt: skip
    return dgate_NI, dup_NI
