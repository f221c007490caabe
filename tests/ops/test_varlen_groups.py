"""Blocks that share one varlen call are the blocks, whatever lies between and behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqbraid.ops import blocks
from seqbraid.ops.attention import (
    BlockBackward,
    block_attention,
    block_attention_backward,
    merge_block_attention,
)
from seqbraid.ops.attention_kernels import VarlenShape
from seqbraid.ops.blocks import Block, BlockPlan, VarlenGroup
from seqbraid.ops.flash_impl import FlashImpl
from tests.helpers.plain import SCALE, relative, varlen_backward, varlen_forward

ROWS = 200


def forward_elsewhere(
    q: Tensor, k: Tensor, v: Tensor, shape: VarlenShape, scale: float, place: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A kernel that writes where it likes, as torch's do."""
    return varlen_forward(q, k, v, shape, scale)


def backward_elsewhere(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return varlen_backward(*arguments[:8])


IMPLS = {
    "in place": FlashImpl("plain", varlen_forward, varlen_backward),
    "elsewhere": FlashImpl("plain", forward_elsewhere, backward_elsewhere),
}

PLANS = {
    "all rows": BlockPlan.causal([(0, 120), (120, 1), (121, 79)]),
    "a few rows behind": BlockPlan.causal([(0, 120), (120, 75)]),
    "many rows behind": BlockPlan.causal([(0, 30), (30, 5)]),
    "rows before": BlockPlan.causal([(7, 100), (107, 93)]),
    "a hole": BlockPlan.causal([(0, 90), (110, 90)]),
    "many holes": BlockPlan.causal([(10 * i, 7) for i in range(20)]),
    "one token": BlockPlan.causal([(0, 1)]),
    "windows": BlockPlan.causal([(0, 120), (120, 77)], window=9),
    "keys of two calls": BlockPlan((Block(0, 100, 0, 195, False), Block(100, 195, 100, 195, True))),
    "prefixes of keys": BlockPlan(
        (Block(0, 50, 0, 60, False), Block(50, 198, 0, 100, False), Block(198, 199, 60, 61, False))
    ),
}


@pytest.fixture(params=IMPLS)
def varlen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "uses_varlen", lambda q, v: True)
    monkeypatch.setattr(blocks, "flash_impl", lambda q, k, windowed, kernels: IMPLS[request.param])


def fresh(plan: BlockPlan) -> BlockPlan:
    return BlockPlan(plan.blocks)


def row() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4, 4)
    return [torch.randn(ROWS, h, 8, dtype=torch.float64, generator=generator) for h in heads]


@pytest.mark.parametrize("name", PLANS)
def test_one_call_is_the_blocks(name: str, varlen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, (q, k, v, dout, out_before) = PLANS[name], row()
    lse_before = out_before[..., 0].T.contiguous()

    def results(plan: BlockPlan) -> list[Tensor]:
        out, lse = block_attention(q, k, v, plan, SCALE)
        merged, merged_lse = out_before.clone(), lse_before.clone()
        merge_block_attention(merged, merged_lse, q, k, v, plan, SCALE)
        # As if other keys had been seen as well.
        seen_lse = torch.where(lse.isinf(), 0.0, lse + 0.2)
        gradients = block_attention_backward(dout, q, k, v, 0.7 * out, seen_lse, plan, SCALE)
        dq = out_before.clone()
        added = BlockBackward(dout, q, k, v, (0.7 * out, seen_lse), plan, SCALE, adds=True).start()
        return [out, lse.exp(), merged, merged_lse, *gradients, *added.add(dq, dq), dq]

    one_call = fresh(plan)
    found = results(one_call)
    assert all(isinstance(group, VarlenGroup) for group in one_call.groups(q, v))
    monkeypatch.setattr(blocks, "uses_varlen", lambda q, v: False)
    apart = fresh(plan)
    wanted = results(apart)
    assert not any(isinstance(group, VarlenGroup) for group in apart.groups(q, v))
    for a, b in zip(found, wanted, strict=True):
        assert b.norm() > 1e-2
        assert relative(a, b) < 1e-13
    covered = torch.zeros(ROWS, dtype=torch.bool)
    for block in plan.blocks:
        covered[block.q_start : block.q_stop] = True
    assert (found[0][~covered] == 0).all() and (found[4][~covered] == 0).all()
