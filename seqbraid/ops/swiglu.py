"""silu(gate) · up, the gate of an MLP, in one pass over memory.

Letters: N tokens, I channels between an MLP's projections.

The kernel computes in float32 and rounds once; the stock modules round silu(gate) before they multiply it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .comparison import differentiated, largest_error, numbers, too_far
from .kernels import Candidate, Op
from .triton_status import RowsNeed, rows_unfit, triton_missing


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """By its definition."""
    return torch.nn.functional.silu(gate) * up


def fused_swiglu(gate: Tensor, up: Tensor, in_place: bool) -> Tensor:
    """The same in one pass. `in_place` puts the gradients where gate and up were: for tensors that nobody
    else has, and a backward that runs once.
    """
    out: Tensor = _SwiGLU.apply(gate, up, in_place)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, in_place: bool) -> Tensor:
        from . import swiglu_triton

        gate_NI, up_NI = (_rows(x) for x in (gate, up))
        ctx.save_for_backward(gate_NI, up_NI)
        ctx.in_place, ctx.is_done = in_place, False
        return swiglu_triton.forward(gate_NI, up_NI).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from . import swiglu_triton

        if ctx.is_done:
            raise RuntimeError(
                "backward was called a second time, but the MLP's gate and up were freed "
                "by the first; run the forward again"
            )
        ctx.is_done = ctx.in_place
        gate_NI, up_NI = ctx.saved_tensors
        found = swiglu_triton.backward(_rows(dout), gate_NI, up_NI, ctx.in_place)
        return *(x.view(dout.shape) for x in found), None


def _rows(x: Tensor) -> Tensor:
    rows_NI = x.flatten(0, -2)
    return rows_NI if rows_NI.stride(-1) == 1 else rows_NI.contiguous()


@cache
def swiglu_wrong(need: RowsNeed) -> str | None:
    """What a comparison with float64 on this device says against the kernel; None where they agree."""
    return too_far(lambda: _distance(need), need.dtype)


def _distance(need: RowsNeed) -> float:
    from . import swiglu_triton

    gate, up, dout = (numbers((5, 1100), phase).to(need.dtype) for phase in (0.3, 1.1, 2.7))
    wanted = differentiated(plain_swiglu, (gate, up), dout)
    gate, up, dout = (x.to(need.device) for x in (gate, up, dout))
    found = swiglu_triton.forward(gate, up)
    return largest_error([found, *swiglu_triton.backward(dout, gate, up, in_place=True)], wanted)


SWIGLU = Op("swiglu", (Candidate("triton", rows_unfit, triton_missing, swiglu_wrong), Candidate("torch")))
