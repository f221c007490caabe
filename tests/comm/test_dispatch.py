"""Tokens to their experts and back: each once for each of its experts, in the order of its picks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from seqbraid.comm.dispatch import NAME, Dispatch
from seqbraid.comm.group import Group
from seqbraid.mesh import Mesh
from tests.helpers import ranks

EXPERTS, PICKS, WIDTH = 8, 3, 5


def tokens(rank: int, count: int, first: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    index = torch.stack([torch.randperm(EXPERTS - first, generator=random)[:PICKS] for _ in range(count)])
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=random), first + index


def travelled(counts: tuple[int, ...], first: int) -> Any:
    """On a rank: experts multiply by their number and add it to themselves; and what left this rank."""
    mesh = Mesh(dp_shard=len(counts), ep=len(counts))
    group = Group.of(mesh.process_group("ep"))
    x_TD, index_TK = tokens(group.rank, max(1, counts[group.rank]), first)
    x_TD, index_TK = x_TD[: counts[group.rank]].requires_grad_(), index_TK[: counts[group.rank]]
    waits = []
    with patch.object(Tensor, "tolist", lambda x, right=Tensor.tolist: waits.append(1) or right(x)):
        dispatch = Dispatch.of(index_TK, EXPERTS, group)
    assert len(waits) == (group.size > 1), "the host waits for the device once"
    x_PD = dispatch.to_experts(x_TD)
    local = EXPERTS // group.size
    expert_P = dispatch.rows.expert_P + group.rank * local
    assert dispatch.rows.sizes == tuple(dispatch.rows.counts_L.tolist())
    assert expert_P.tolist() == sorted(expert_P.tolist()) and len(x_PD) == len(expert_P)
    y_TKD = dispatch.from_experts(x_PD * expert_P[:, None] + expert_P[:, None]).view(-1, PICKS, WIDTH)
    weights = torch.arange(1.0, PICKS + 1, dtype=torch.float64)[:, None]
    (y_TKD * weights).sum().backward()  # type: ignore[no-untyped-call]
    wanted = x_TD[:, None] * index_TK[..., None] + index_TK[..., None]
    dx = (index_TK * weights[:, 0]).sum(1, keepdim=True).expand_as(x_TD)
    near = (index_TK // local == group.rank).sum()
    left = int(index_TK.numel() - near) * WIDTH * 8
    assert x_TD.grad is not None and dispatch.counts_E.sum() == index_TK.numel()
    sent = (group.sent[NAME], group.sent[f"{NAME} gradient"])
    return torch.equal(y_TKD, wanted), bool(torch.allclose(x_TD.grad, dx, rtol=1e-12)), sent, left


@pytest.mark.parametrize("first", [0, 5])  # with 5, only the last rank of two or four has tokens
@pytest.mark.parametrize("counts", [(7,), (7, 4), (9, 0), (0, 0), (3, 0, 6, 2)], ids=str)
def test_tokens_come_back_to_their_place(counts: tuple[int, ...], first: int) -> None:
    found = ranks.run(travelled, len(counts), counts, first)
    for there, gradient, *_ in found:
        assert there and gradient
    for at in (0, 1):
        # What leaves a rank comes back to it, and so do the gradients of both ways.
        assert sum(sent[at] for *_, sent, _ in found) == 2 * sum(left for *_, left in found)
