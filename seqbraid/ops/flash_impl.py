"""FlashAttention-3 and -4 in place of torch's own FlashAttention-2, where the user has switched them on.

`torch.nn.attention.activate_flash_attention_impl("FA3")` puts an installed package behind the very operators
that our varlen blocks call. They take any lengths and are as fast as dense kernels, so with one of them every
block goes there. What they compute is looked at once, on small blocks, before it is believed: a ring needs
their LSE, and a backward that accepts an LSE which is not the block's own.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .attention_kernels import (
    DenseShape,
    VarlenShape,
    math_backward,
    math_forward,
    varlen_backward,
    varlen_forward,
)

TOLERANCE = 0.02
"""Relative error that bfloat16 explains; a dropped LSE gradient is off by 0.2 and more."""


def active_flash_impl(device: torch.device) -> str | None:
    """The implementation that replaces torch's own on this device, after a look at its results."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    name: str | None = current() if device.type == "cuda" else None
    if name is not None:
        _check(name, device)
    return name


@cache
def _check(name: str, device: torch.device) -> None:
    errors = {shape: block_error(device, *shape) for shape in ((True, 64, 64), (False, 40, 100))}
    worst = max(errors.values())
    if not worst <= TOLERANCE:
        raise ValueError(
            f"flash attention implementation {name} is off by {worst:.3f} on {device} (at most {TOLERANCE} "
            "is "
            "rounding); switch it off with torch.nn.attention.restore_flash_attention_impl()"
        )


def block_error(device: torch.device, causal: bool, queries: int, keys: int) -> float:
    """The largest relative error of two blocks' out, LSE and gradients, with an out and LSE of more keys than
    theirs.
    """
    generator = torch.Generator(device).manual_seed(0)
    heads = ((4, queries), (2, keys), (2, keys), (4, queries))
    q, k, v, dout = (
        torch.randn(2 * rows, h, 64, device=device, dtype=torch.bfloat16, generator=generator)
        for h, rows in heads
    )
    cu_q, cu_k = (torch.arange(3, device=device, dtype=torch.int32) * n for n in (queries, keys))
    shape = VarlenShape(cu_q, cu_k, queries, keys, causal, None)
    wide_q, wide_k, wide_v, wide_dout = (
        x.unflatten(0, (2, -1)).transpose(1, 2).float() for x in (q, k, v, dout)
    )
    mask = DenseShape(causal, None)
    out, lse = varlen_forward(q, k, v, shape, 0.125)
    wanted_out, wanted_lse = math_forward(wide_q, wide_k, wide_v, mask, 0.125)
    found = [(out, _packed(wanted_out)), (lse.T, wanted_lse.transpose(1, 2).flatten(0, 1))]
    # As if other keys had been seen as well.
    global_out, global_lse = 0.7 * wanted_out, wanted_lse + 0.2
    packed_lse = global_lse.transpose(0, 1).flatten(1).contiguous()
    gradients = varlen_backward(dout, q, k, v, _packed(global_out).to(q.dtype), packed_lse, shape, 0.125)
    wanted = math_backward(wide_dout, wide_q, wide_k, wide_v, global_out, global_lse, mask, 0.125)
    found += [(a, _packed(b)) for a, b in zip(gradients, wanted, strict=True)]
    return max(float((a.float() - b).norm() / b.norm()) for a, b in found)


def _packed(x_BHSD: Tensor) -> Tensor:
    return x_BHSD.transpose(1, 2).flatten(0, 1)
