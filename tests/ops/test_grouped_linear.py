"""Linear layers of many experts: each row by the weight of its own, by one call or by a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqbraid.ops.grouped_linear import EXPERTS, GroupedNeed, grouped_linear, looped
from seqbraid.ops.kernels import KernelOptions, Kernels

CPU = torch.device("cpu")
SIZES = [(3, 0, 5, 11), (0, 0, 7, 0), (0, 0, 0, 0), (1, 1, 1, 1)]


def inputs(sizes: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = (8, 12) if transposed else (12, 8)
    x = torch.randn(sum(sizes), 8, dtype=dtype, generator=random)
    weight = torch.randn(len(sizes), *shape, dtype=dtype, generator=random)
    return x.requires_grad_(), weight.requires_grad_()


def by_definition(x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    parts = [rows @ w for rows, w in zip(x.split(list(sizes)), weight, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("kernel", "dtype"), [("torch", torch.float64), ("grouped_mm", torch.float32)])
def test_rows_meet_the_weight_of_their_expert(
    sizes: tuple[int, ...], kernel: str, dtype: torch.dtype, transposed: bool
) -> None:
    x, weight = inputs(sizes, dtype, transposed)
    dout = torch.linspace(-1, 1, len(x) * 12, dtype=dtype).view(-1, 12)
    wanted = by_definition(x, weight if transposed else weight.transpose(1, 2), sizes)
    expected = torch.autograd.grad(wanted, (x, weight), dout)
    ends, kernels = torch.tensor(sizes).cumsum(0).int(), Kernels(KernelOptions(experts=kernel))
    out = grouped_linear(x, weight, ends, lambda: sizes, kernels, transposed)
    found = torch.autograd.grad(out, (x, weight), dout)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, theirs in zip((out, *found), (wanted, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_loop_gives_the_gradients_that_are_asked_for() -> None:
    x, weight = inputs((3, 0, 5), torch.float64, True)
    torch.autograd.gradcheck(lambda a, b: looped(a, b, (3, 0, 5)), (x, weight))
    looped(x.detach(), weight, (3, 0, 5)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is None and weight.grad is not None and weight.grad[1].abs().max() == 0
    looped(x, weight.detach(), (3, 0, 5)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None


@pytest.mark.parametrize(
    ("need", "kernel", "reason"),
    [
        (GroupedNeed(CPU, torch.float32, 8, 12), "grouped_mm", None),
        (GroupedNeed(CPU, torch.float32, 8, 6), "torch", "a multiple of 16 bytes, not 8 and 6"),
        (GroupedNeed(CPU, torch.float64, 8, 12), "torch", "takes float32 and bfloat16, not torch.float64"),
    ],
)
def test_the_table_says_what_is_taken_and_why(need: Any, kernel: str, reason: str | None) -> None:
    assert Kernels().choose(EXPERTS, need) == kernel
    found = EXPERTS.candidates[0].why_not(need)
    assert found is None if reason is None else reason in str(found)


def test_on_a_gpu_it_takes_bfloat16() -> None:
    need = GroupedNeed(torch.device("cuda"), torch.float32, 8, 12)
    assert "takes bfloat16, not torch.float32" in str(EXPERTS.candidates[0].unfit(need))
