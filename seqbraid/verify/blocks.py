"""Parity of the attention blocks alone: sequences cut in two, merged through their LSE, against
one whole call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.tiny.samples import LENGTHS
from ..ops import attention
from ..ops.blocks import Block, BlockPlan
from ..ops.reference import attention_reference
from .verdict import Parity, Quantity

FLOOR = 1e-14
"""In float64 two orders of the same sums agree to this."""


def check_blocks(seed: int = 0) -> Parity:
    """Cut every sequence in two at odd places, compute and merge the blocks, and compare out,
    LSE and gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    q, k, v, dout = (
        torch.randn(total, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)
    )
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    near: list[Block] = []
    far: list[Block] = []
    for start, length in zip(starts, LENGTHS, strict=True):
        cut, stop = start + (length + 1) // 3, start + length
        near.append(Block(cut, stop, cut, stop, causal=True))
        if cut > start:
            near.append(Block(start, cut, start, cut, causal=True))
            far.append(Block(cut, stop, start, cut, causal=False))
    whole = BlockPlan.causal(list(zip(starts, LENGTHS, strict=True)))
    plans = [BlockPlan(tuple(blocks)) for blocks in (near, far)]
    out, lse = attention.block_attention(q, k, v, plans[0], 0.3)
    attention.merge_block_attention(out, lse, q, k, v, plans[1], 0.3)
    got = [out, lse, *_backward(dout, q, k, v, out, lse, plans)]
    expected_out, expected_lse = attention.block_attention(q, k, v, whole, 0.3)
    wanted = [expected_out, expected_lse, *_autograd(dout, q, k, v, starts)]
    names = ("out", "lse", "dq", "dk", "dv")
    return Parity(
        "blocks",
        tuple(
            Quantity(name, float((a - b).norm() / b.norm()), FLOOR)
            for name, a, b in zip(names, got, wanted, strict=True)
        ),
        dtype="float64",
    )


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plans: list[BlockPlan]
) -> list[Tensor]:
    parts = [attention.block_attention_backward(dout, q, k, v, out, lse, plan, 0.3) for plan in plans]
    return [a + b for a, b in zip(*parts, strict=True)]


def _autograd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: list[int]) -> tuple[Tensor, ...]:
    """The gradient of plain causal attention, sequence by sequence, by autograd."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    outs = []
    for start, length in zip(starts, LENGTHS, strict=True):
        rows = slice(start, start + length)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        out, _ = attention_reference(*(x[rows] for x in inputs), seen, 0.3)
        outs.append(out)
    return torch.autograd.grad(torch.cat(outs), inputs, dout)
