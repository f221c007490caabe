"""RMSNorm, rotary embedding and gates over the rows of a tensor, several of them in one pass over memory.

Letters: T tokens, H heads (1 where a row is a token), D width of a row, R columns that are turned.

`plain_rows.py` says what is computed; models run their stock modules in its place. The Triton kernels
compute in float32 and round once, at the end, to the type of the rows. Stock modules round more often: the
normed row before it is multiplied with the weight, the weighted one before its gate, and each product and sum
of the rotation. So ours are no further from float32 than they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .comparison import differentiated, largest_error, numbers, too_far
from .kernels import Candidate, Op
from .plain_rows import Norm, Rotation, plain_rows
from .triton_status import RowsNeed, rows_unfit, triton_missing

WIDEST = 16384
"""Columns of a row that a program can hold."""


def fused_rows(
    x_THD: Tensor, norm: Norm | None, turn: Rotation | None = None, gate_THD: Tensor | None = None
) -> Tensor:
    """`plain_rows` in one pass, forward and backward."""
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
        turn: Rotation | None,
    ) -> Tensor:
        # A rotation needs nothing of what it turned.
        ctx.save_for_backward(None if norm is None else x_THD, weight_D, gate_THD, *(turn or (None, None)))
        ctx.numbers = (0.0, 0.0) if norm is None else (norm.eps, norm.centre)
        return _forward(x_THD, norm, turn, gate_THD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        x_THD, weight_D, gate_THD, cos, sin = ctx.saved_tensors
        norm = None if weight_D is None else Norm(weight_D, *ctx.numbers)
        dx, dweight, dgate = _backward(
            dout_THD, x_THD, norm, None if cos is None else Rotation(cos, sin), gate_THD
        )
        return dx, None if dweight is None else dweight.to(weight_D.dtype), dgate, None, None


def _forward(x_THD: Tensor, norm: Norm | None, turn: Rotation | None, gate_THD: Tensor | None) -> Tensor:
    from . import rows_triton

    gate_THD = None if gate_THD is None else _unit_stride(gate_THD)
    out: Tensor = rows_triton.forward(_unit_stride(x_THD), _contiguous(norm), _contiguous(turn), gate_THD)
    return out


def _backward(
    dout_THD: Tensor, x_THD: Tensor | None, norm: Norm | None, turn: Rotation | None, gate_THD: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the rows, of the norm's weight in float32, and of the gate."""
    from . import rows_triton

    x_THD, gate_THD = (None if x is None else _unit_stride(x) for x in (x_THD, gate_THD))
    found: tuple[Tensor, Tensor | None, Tensor | None] = rows_triton.backward(
        _unit_stride(dout_THD), x_THD, _contiguous(norm), _contiguous(turn), gate_THD
    )
    return found


def _unit_stride(x_THD: Tensor) -> Tensor:
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


def _contiguous(given: Any) -> Any:
    """A norm or a rotation whose tensors have no gaps."""
    return given and type(given)(*(x.contiguous() if isinstance(x, Tensor) else x for x in given))


@cache
def rows_wrong(need: RowsNeed) -> str | None:
    """What a comparison with float64 on this device says against the kernels; None where they agree."""
    return too_far(lambda: max(_distance(need, case) for case in ("gated", "turned")), need.dtype)


def _distance(need: RowsNeed, case: str) -> float:
    """The largest relative error of the output and of the gradients, for rows of 96 numbers, a third of them
    so small that eps counts.
    """
    x, gate, dout = (numbers((5, 3, 96), phase).to(need.dtype) for phase in (0.3, 1.1, 2.7))
    x[:, 0] *= 1e-3
    weight, angle = numbers((96,), 0.7).to(need.dtype), numbers((5, 64), 1.9)
    turn = Rotation(angle.cos().to(need.dtype), angle.sin().to(need.dtype)) if case == "turned" else None
    leaves, centre = ([x, weight], 1.0) if turn else ([x, weight, gate], 0.0)

    def plain(x: Tensor, weight: Tensor, *gates: Tensor) -> Tensor:
        return plain_rows(
            x, Norm(weight, 1e-6, centre), turn and Rotation(*(t.double() for t in turn)), *gates
        )

    wanted = differentiated(plain, leaves, dout)
    low = [leaf.to(need.device) for leaf in leaves]
    given = (
        Norm(low[1], 1e-6, centre),
        turn and Rotation(*(t.to(need.device) for t in turn)),
        None if turn else low[2],
    )
    found = (_forward(low[0], *given), *_backward(dout.to(need.device), low[0], *given))
    return largest_error([t for t in found if t is not None], wanted)


ROWS_BY_TRITON = Candidate("triton", rows_unfit, triton_missing, rows_wrong)
NORM = Op("norm", (ROWS_BY_TRITON, Candidate("torch")))
ROTARY = Op("rotary", (ROWS_BY_TRITON, Candidate("torch")))
