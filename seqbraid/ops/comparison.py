"""Kernels are compared with float64, on small inputs on the device at hand, before they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""How far a kernel may be from float64, on inputs of these numbers, to be used."""


def numbers(shape: tuple[int, ...], phase: float) -> Tensor:
    """Made without a generator: a step draws no random numbers."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 12.9898 + phase).sin().reshape(shape) * 1.5


def differentiated(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor
) -> tuple[Tensor, ...]:
    """Of a function in float64: what it gives, and the gradients of its inputs.

    What is saved on the way is no business of a checkpoint around the call.
    """
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), torch.enable_grad():
        wide = [x.double().requires_grad_() for x in inputs]
        out = function(*wide)
        return out.detach(), *torch.autograd.grad(out, wide, dout.double())


def too_far(run: Callable[[], float], dtype: torch.dtype) -> str | None:
    """Why a kernel is not to be used, by the error that a comparison finds; None where it may be."""
    try:
        off = run()
    except Exception as error:  # a compiler that fails says so in many ways
        return f"it fails here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    limit = CLOSE[dtype]
    return None if off <= limit else f"it differs from float64 by {off:.1e}, more than {limit:.0e}"


def largest_error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference, each over the size of what is wanted; what is no number is infinitely far."""
    pairs = ((a.cpu().double(), b) for a, b in zip(got, wanted, strict=True))
    off = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return max(x if x == x else float("inf") for x in off)
