"""Linear layers of many experts on rows sorted by expert: each row by the weight of its own.

Letters: P rows, L experts, I channels in, O channels out. A weight is `[L, O, I]`, as of linear layers, or
`[L, I, O]`.

`F.grouped_mm` does all experts in one call and needs no counts on the host. Where it cannot be taken, as in
float64, a loop over the experts does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .comparison import differentiated, largest_error, numbers, too_far
from .kernels import Candidate, Kernels, Op


class GroupedNeed(NamedTuple):
    """What a grouped product is needed for."""

    device: torch.device
    dtype: torch.dtype
    inputs: int
    outputs: int


def grouped_linear(
    x_PI: Tensor,
    weight: Tensor,
    ends_L: Tensor,
    sizes: Callable[[], Sequence[int]],
    kernels: Kernels,
    transposed: bool = False,
) -> Tensor:
    """Each row by the weight of its expert, `[P, O]`; differentiable.

    Args:
        x_PI: the rows, those of the first expert first.
        weight: `[L, O, I]`, or `[L, I, O]` where it is `transposed`.
        ends_L: where the rows of each expert end, in int32, on the device of the rows.
        sizes: gives how many rows each expert has, on the host; called where a loop needs them.
        kernels: the choices of the model.
        transposed: whether inputs come before outputs.
    """
    inputs, outputs = weight.shape[1:] if transposed else weight.shape[:0:-1]
    need = GroupedNeed(x_PI.device, x_PI.dtype, inputs, outputs)
    weight_LIO = weight if transposed else weight.transpose(1, 2)
    # Without rows there is nothing to compute, but every weight gets its zero.
    if len(x_PI) and kernels.choose(EXPERTS, need) == "grouped_mm":
        return F.grouped_mm(x_PI, weight_LIO, offs=ends_L)
    return looped(x_PI, weight_LIO, tuple(sizes()))


def looped(x_PI: Tensor, weight_LIO: Tensor, sizes: Sequence[int]) -> Tensor:
    """One product after another."""
    out: Tensor = _Looped.apply(x_PI, weight_LIO, sizes)  # type: ignore[no-untyped-call]
    return out


class _Looped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PI: Tensor, weight_LIO: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x_PI, weight_LIO)
        ctx.sizes = sizes
        out_PO = x_PI.new_empty(len(x_PI), weight_LIO.shape[2])
        for expert, rows in _rows(sizes):
            torch.mm(x_PI[rows], weight_LIO[expert], out=out_PO[rows])
        return out_PO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_PO: Tensor) -> tuple[Tensor | None, ...]:
        x_PI, weight_LIO = ctx.saved_tensors
        dx = torch.empty_like(x_PI) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight_LIO) if ctx.needs_input_grad[1] else None
        for expert, rows in _rows(ctx.sizes):
            if dx is not None:
                torch.mm(dout_PO[rows], weight_LIO[expert].T, out=dx[rows])
            if dweight is not None:
                dweight[expert] = x_PI[rows].T @ dout_PO[rows]
        return dx, dweight, None


def _rows(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size


def _unfit(need: GroupedNeed) -> str | None:
    step = 16 // need.dtype.itemsize
    if need.inputs % step or need.outputs % step:
        return f"it needs rows of a multiple of 16 bytes, not {need.inputs} and {need.outputs} × {need.dtype}"
    if need.device.type == "cuda":
        if need.dtype != torch.bfloat16:
            return f"on a GPU it takes bfloat16, not {need.dtype}"
        if torch.cuda.get_device_capability(need.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0"
    elif need.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {need.dtype}"
    return None


def _missing() -> str | None:
    return None if hasattr(F, "grouped_mm") else f"torch {torch.__version__} has no grouped_mm"


@cache
def _wrong_for(device: torch.device, dtype: torch.dtype) -> str | None:
    return too_far(lambda: _distance(device, dtype), dtype)


def _wrong(need: GroupedNeed) -> str | None:
    return _wrong_for(need.device, need.dtype)


def _distance(device: torch.device, dtype: torch.dtype) -> float:
    sizes = (3, 0, 5, 11)
    shapes = ((19, 32), (4, 48, 32), (19, 48))
    x, weight, dout = (
        numbers(shape, phase).to(dtype) for shape, phase in zip(shapes, (0.3, 1.1, 2.7), strict=True)
    )
    wanted = differentiated(lambda x, w: looped(x, w.transpose(1, 2), sizes), (x, weight), dout)
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), torch.enable_grad():
        inputs = [x.to(device).requires_grad_() for x in (x, weight)]
        out = F.grouped_mm(inputs[0], inputs[1].transpose(1, 2), offs=ends)
        found = torch.autograd.grad(out, inputs, dout.to(device))
    return largest_error([out.detach(), *found], wanted)


EXPERTS = Op("experts", (Candidate("grouped_mm", _unfit, _missing, _wrong), Candidate("torch")))
