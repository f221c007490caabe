"""RMSNorm, rotary embedding and gates over the rows of a tensor, several of them in one pass over memory.

Letters: T tokens, H heads (1 where a row is a token), D width of a row, R columns that are turned.

The plain versions say what is computed; models run their stock modules in their place. The Triton kernels
compute in float32 and round once, at the end, to the type of the rows. Stock modules round more often: the
normed row before it is multiplied with the weight, the weighted one before its gate, and each product and sum
of the rotation. So ours are no further from float32 than they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import Candidate, Op
from .triton_status import RowsNeed, rows_unfit, triton_missing

WIDEST = 16384
"""Columns of a row that a program can hold."""

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""How far the kernels may be from float64, on rows of these numbers, to be used."""


class Norm(NamedTuple):
    """What a row is normed by: x / sqrt(mean(x²) + eps) · (centre + weight)."""

    weight_D: Tensor
    eps: float
    centre: float
    """0, or 1 where weights are kept as what is added to 1."""


class Turn(NamedTuple):
    """The rotation of the first R columns of each token's rows, half against half."""

    cos_TR: Tensor
    sin_TR: Tensor


def plain_rows(x_THD: Tensor, norm: Norm | None, turn: Turn | None = None, gate_THD: Tensor | None = None) -> Tensor:
    """Norm, turn, gate, each if given, by their definitions."""
    if norm is not None:
        mean_TH1 = x_THD.pow(2).mean(-1, keepdim=True)
        x_THD = x_THD * torch.rsqrt(mean_TH1 + norm.eps) * (norm.centre + norm.weight_D)
    if turn is not None:
        cos_T1R, sin_T1R = (x[:, None] for x in turn)
        x_THR, rest = x_THD.split([cos_T1R.shape[-1], x_THD.shape[-1] - cos_T1R.shape[-1]], dim=-1)
        first, second = x_THR.chunk(2, dim=-1)
        x_THD = torch.cat([x_THR * cos_T1R + torch.cat([-second, first], -1) * sin_T1R, rest], -1)
    return x_THD if gate_THD is None else x_THD * torch.nn.functional.silu(gate_THD)


def fused_rows(x_THD: Tensor, norm: Norm | None, turn: Turn | None = None, gate_THD: Tensor | None = None) -> Tensor:
    """The same in one pass, forward and backward."""
    out: Tensor = _Rows.apply(  # type: ignore[no-untyped-call]
        x_THD, None if norm is None else norm.weight_D, gate_THD, norm, turn
    )
    return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_THD: Tensor,
        weight_D: Tensor | None,
        gate_THD: Tensor | None,
        norm: Norm | None,
        turn: Turn | None,
    ) -> Tensor:
        # A rotation needs nothing of what it turned.
        ctx.save_for_backward(None if norm is None else x_THD, weight_D, gate_THD, *(turn or (None, None)))
        ctx.numbers = (0.0, 0.0) if norm is None else (norm.eps, norm.centre)
        out, _ = _kernels(x_THD, weight_D, gate_THD, turn, *ctx.numbers, dout=None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        x_THD, weight_D, gate_THD, cos, sin = ctx.saved_tensors
        turn = None if cos is None else Turn(cos, sin)
        dx, others = _kernels(x_THD, weight_D, gate_THD, turn, *ctx.numbers, dout=dout_THD)
        dweight = None if weight_D is None else others[0].to(weight_D.dtype)
        return dx, dweight, others[1], None, None


def _kernels(
    x: Tensor | None, weight: Tensor | None, gate: Tensor | None, turn: Turn | None, eps: float, centre: float,
    dout: Tensor | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The forward, or the backward of a gradient."""
    from . import rows_triton

    x, gate, dout = (None if t is None else _unit_stride(t) for t in (x, gate, dout))
    turn = None if turn is None else Turn(*(t.contiguous() for t in turn))
    given = (None if weight is None else weight.contiguous(), eps, centre, gate, turn)
    if dout is None:
        return rows_triton.forward(x, *given), None
    dx, *others = rows_triton.backward(dout, x, *given)
    return dx, others


def _unit_stride(x_THD: Tensor) -> Tensor:
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


@cache
def rows_wrong(need: RowsNeed) -> str | None:
    """What a comparison with float64 on this device says against the kernels; None where they agree."""
    try:
        off = max(_distance(need, case) for case in ("gate", "turn"))
    except Exception as error:  # a compiler that fails says so in many ways
        return f"its kernels fail here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    limit = CLOSE[need.dtype]
    return None if off <= limit else f"a comparison with float64 is off by {off:.1e}, more than {limit:.0e}"


def _distance(need: RowsNeed, case: str) -> float:
    """The largest relative error of the output and of the gradients, for rows of 96 numbers."""
    shape = (5, 3, 96)
    x, gate, dout = (_numbers(shape, phase) for phase in (0.3, 1.1, 2.7))
    weight, turn, centre = _numbers((96,), 0.7), None, 0.0
    leaves = [x, weight, gate]
    if case == "turn":
        angle = _numbers((5, 64), 1.9)
        turn, centre, leaves = Turn(angle.cos(), angle.sin()), 1.0, [x, weight]
    with without_saving(), torch.enable_grad():
        wide = [leaf.to(need.dtype).double().requires_grad_() for leaf in leaves]
        rounded = None if turn is None else Turn(*(t.to(need.dtype).double() for t in turn))
        out = plain_rows(wide[0], Norm(wide[1], 1e-6, centre), rounded, *wide[2:])
        wanted = [out, *torch.autograd.grad(out, wide, dout.to(need.dtype).double())]
    low = [leaf.to(need.device, need.dtype) for leaf in (*leaves, dout)]
    there = None if turn is None else Turn(*(t.to(need.device, need.dtype) for t in turn))
    given = (low[0], low[1], low[2] if case == "gate" else None, there, 1e-6, centre)
    found, _ = _kernels(*given, dout=None)
    dx, (dweight, dgate) = _kernels(*given, dout=low[-1])
    got = [found, dx, dweight] + ([dgate] if case == "gate" else [])
    return max(relative(a, b) for a, b in zip(got, wanted, strict=True))


def relative(got: Tensor, wanted: Tensor) -> float:
    """The size of the difference over that of what is wanted; what is not a number is infinitely far."""
    off = float((got.detach().cpu().double() - wanted.detach()).norm() / wanted.detach().norm())
    return off if off == off else float("inf")


def _numbers(shape: tuple[int, ...], phase: float) -> Tensor:
    """Without a generator: a step draws no random numbers."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 12.9898 + phase).sin().reshape(shape) * 1.5


@contextmanager
def without_saving() -> Iterator[None]:
    """Whatever saves tensors for a backward here is none of an enclosing checkpoint's business."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


ROWS_BY_TRITON = Candidate("triton", rows_unfit, triton_missing, rows_wrong)
NORM = Op("norm", (ROWS_BY_TRITON, Candidate("torch")))
ROTARY = Op("rotary", (ROWS_BY_TRITON, Candidate("torch")))
