"""The chunked loss equals torch's own on full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from seqbraid.ops import linear_cross_entropy as module
from seqbraid.ops.linear_cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, None])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_sum_and_gradients_equal_full_logits(chunk_tokens: int | None, with_bias: bool, ignored: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 12, dtype=torch.float64), torch.randn(33, 12, dtype=torch.float64)
    bias = torch.randn(33, dtype=torch.float64) if with_bias else None
    targets = torch.randint(0, 33, (50,))
    targets[{"none": slice(0, 0), "some": slice(3, 40, 3), "all": slice(None)}[ignored]] = -100
    wanted = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = F.linear(hidden, weight, bias)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    loss, correct = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens)
    torch.testing.assert_close(loss, expected)
    assert correct == ((logits.argmax(-1) == targets) & (targets != -100)).sum()
    for got, reference in zip(
        torch.autograd.grad(loss * 0.37, wanted), torch.autograd.grad(expected * 0.37, wanted), strict=True
    ):
        assert (reference.norm() > 0) == (ignored != "all")
        assert (got - reference).norm() <= 1e-13 * reference.norm()


def test_no_gradient_is_made_for_what_needs_none() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4)
    linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, -100, 5])).loss.backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, -100, 5])).loss > 0


def test_bfloat16_sums_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(300, 8), torch.randn(20, 8), torch.randint(0, 20, (300,))
    low = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    high = [x.detach().float().requires_grad_() for x in low]
    loss = linear_cross_entropy(*low, targets, chunk_tokens=16).loss
    expected = F.cross_entropy(high[0] @ high[1].T, targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert abs(loss - expected) < 2e-3 * expected
    for got, reference in zip(
        torch.autograd.grad(loss, low), torch.autograd.grad(expected, high), strict=True
    ):
        assert (got.float() - reference).norm() < 2e-2 * reference.norm()


@pytest.mark.parametrize(
    ("hidden_size", "chunk_bytes", "rows"),
    [(100, 0, 100), (100, 100 * 7 * 4, 100), (100, 150 * 7 * 4, 150), (8, 0, 16), (8, 300 * 7 * 4, 200)],
)
def test_default_chunks_grow_with_the_hidden_size(
    monkeypatch: pytest.MonkeyPatch, hidden_size: int, chunk_bytes: int, rows: int
) -> None:
    """So that reading the weight and adding to its gradient, once a chunk, takes a fixed part of the time."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp_.default:
                seen.append(len(out))
            return out

    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    with Watch(), torch.no_grad():
        linear_cross_entropy(
            torch.randn(200, hidden_size), torch.randn(7, hidden_size), torch.arange(200) % 7
        )
    assert max(seen) == rows


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"targets \[T\]"):
        linear_cross_entropy(torch.randn(3, 4), torch.randn(5, 4), torch.zeros(2, dtype=torch.long))
