"""Rows arrive in rank order, and their gradients go back to the rows they came from."""

from __future__ import annotations

import torch
from torch import Tensor

from seqbraid import Mesh
from seqbraid.comm import Group
from seqbraid.comm.rows import RowPlan, exchange_rows
from tests.helpers import ranks

WANTED = [[[0, 1], [], [2]], [[1, 1], [0], []], [[0], [2, 0], [1]]]
"""Which rows of which rank (inner) each rank (outer) wants; some more than once, some of its own."""


def exchanged(dtype: torch.dtype, columns: int | None) -> tuple[Tensor, Tensor, dict[str, int]]:
    """On one rank: what arrived, the gradient of what was sent, and the bytes."""
    mesh = Mesh(ring=3)
    group, rank = Group.of(mesh.process_group("sequence")), mesh.sequence_rank
    wanted = [per_owner[rank] for per_owner in WANTED]
    plan = RowPlan(
        rows=torch.tensor([row for rows in wanted for row in rows], dtype=torch.long),
        send=[len(rows) for rows in wanted],
        receive=[len(rows) for rows in WANTED[rank]],
        is_local=False,
    )
    x = (torch.arange(6.0).view(3, 2) + 10 * rank).to(dtype)
    x = (x[:, 0] if columns is None else x[:, :columns]).contiguous().requires_grad_()
    arrived = exchange_rows(x, plan, group, "rows")
    # Each rank weighs what it got by a number of its own, so that the way back shows.
    arrived.backward(torch.full_like(arrived, (256.0, 1.0, 3.0)[rank]))
    assert x.grad is not None
    return arrived.detach(), x.grad, dict(group.sent)


def test_rows_arrive_and_gradients_return() -> None:
    results = ranks.run(exchanged, 3, torch.float32, 2)
    for rank, (arrived, _, _) in enumerate(results):
        expected = [
            [10.0 * owner + 2 * row, 10.0 * owner + 2 * row + 1]
            for owner, rows in enumerate(WANTED[rank])
            for row in rows
        ]
        assert arrived.tolist() == expected
    # Rank 0: row 0 went to 0 and 2, row 1 to 0 and twice to 1. Rank 1: row 0 to 1 and 2, row 2 to 2.
    assert [grad[:, 0].tolist() for _, grad, _ in results] == [[259, 258, 0], [4, 0, 3], [0, 3, 256]]
    sent = [found for _, _, found in results]
    assert sent == [
        {"rows": 24, "rows gradient": 8},
        {"rows": 16, "rows gradient": 16},
        {"rows": 8, "rows gradient": 24},
    ]


def test_gradients_of_16_bits_are_summed_in_float32() -> None:
    """256 + 1 + 1 is 258; in bfloat16, step by step, it would stay 256. 256 + 3 rounds to 260 in the end.

    Of rows without columns, whose sum torch does not widen by itself.
    """
    results = ranks.run(exchanged, 3, torch.bfloat16, None)
    assert all(grad.dtype == torch.bfloat16 for _, grad, _ in results)
    assert [grad.tolist() for _, grad, _ in results] == [[260, 258, 0], [4, 0, 3], [0, 3, 256]]


def test_a_local_plan_needs_no_group() -> None:
    """No collective is made: this group has no process group behind it."""
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    plan = RowPlan(torch.tensor([2, 0, 2]), send=[0, 3], receive=[0, 3], is_local=True)
    arrived = exchange_rows(x, plan, Group(None, rank=1, size=2), "rows")
    assert arrived.tolist() == [[4, 5], [0, 1], [4, 5]]
    arrived.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[1, 1], [0, 0], [2, 2]]
