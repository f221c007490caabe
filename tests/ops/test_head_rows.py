"""Log-probabilities, entropies and divergences in chunks equal torch's own on full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqbraid.ops.linear_cross_entropy import linear_cross_entropy
from seqbraid.ops.linear_kl import TeacherHead, linear_kl
from seqbraid.ops.linear_logprobs import linear_logprobs

NUM_TOKENS, VOCABULARY, HIDDEN = 50, 33, 12


def problem(
    with_bias: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Any, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if with_bias else None
    targets = torch.randint(0, VOCABULARY, (NUM_TOKENS,))
    targets[3:40:3] = -100
    return hidden, weight, bias, targets


def compare(got: list[Tensor], wanted: list[Tensor], inputs: list[Any]) -> None:
    """Values, and gradients of sums in which each token has a factor of its own."""
    inputs = [x for x in inputs if x is not None]
    factors = [torch.randn_like(x) for x in wanted]
    sums = [sum((x * f).sum() for x, f in zip(xs, factors, strict=True)) for xs in (got, wanted)]
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(*(torch.autograd.grad(total, inputs) for total in sums), strict=True):  # type: ignore[arg-type]
        assert y.norm() > 0 and (x - y).norm() <= 1e-13 * y.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("chunk_tokens", "with_bias"), [(1, False), (7, True), (None, True)])
def test_logprobs_and_entropy_equal_full_logits(
    temperature: float, entropy: bool, chunk_tokens: int | None, with_bias: bool
) -> None:
    hidden, weight, bias, targets = problem(with_bias)
    got = linear_logprobs(hidden, weight, targets, bias, temperature, entropy, chunk_tokens)
    every = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    is_label = targets != -100
    logprobs = every.gather(1, targets.clamp(min=0)[:, None])[:, 0] * is_label
    entropies = -(every.exp() * every).sum(-1) * is_label
    compare(list(got), [logprobs, entropies][: 1 + entropy], [hidden, weight, bias])


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_numbers_may_be_left_unused(used: int) -> None:
    hidden, weight, _, targets = problem()
    got = linear_logprobs(hidden, weight, targets, entropy=True, chunk_tokens=9)[used].sum()
    every = F.linear(hidden, weight).log_softmax(-1)[targets != -100]
    each = every.gather(1, targets[targets != -100][:, None]), -(every.exp() * every)
    for x, y in zip(
        torch.autograd.grad(got, [hidden, weight]),
        torch.autograd.grad(each[used].sum(), [hidden, weight]),
        strict=True,
    ):
        assert (x - y).norm() <= 1e-13 * y.norm()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("chunk_tokens", [1, 7, None])
def test_kl_from_hidden_states_equals_that_of_full_logits(
    temperature: float, chunk_tokens: int | None
) -> None:
    hidden, weight, bias, targets = problem(with_bias=True)
    teacher = TeacherHead(
        torch.randn(NUM_TOKENS, 5).double().requires_grad_(), torch.randn(VOCABULARY, 5).double()
    )
    rows = (targets != -100).nonzero()[:, 0]
    got = linear_kl(hidden, weight, rows, teacher, bias, temperature, chunk_tokens)
    p = (F.linear(teacher.hidden_TE.detach(), teacher.weight_VE) / temperature).log_softmax(-1)
    q = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    wanted = F.kl_div(q, p, log_target=True, reduction="none").sum(-1) * (targets != -100)
    compare([got], [wanted], [hidden, weight, bias])


def test_a_rank_without_labels_has_zeros_and_a_gradient_of_zeros() -> None:
    hidden, weight, _, targets = problem()
    none = torch.full_like(targets, -100)
    for found in linear_logprobs(hidden, weight, none, entropy=True):
        assert not found.any()
        for gradient in torch.autograd.grad(found.sum(), [hidden, weight], retain_graph=True):
            assert not gradient.any()


def test_weights_multiply_each_tokens_loss() -> None:
    hidden, weight, bias, targets = problem(with_bias=True)
    weights = torch.rand(NUM_TOKENS, dtype=torch.float64)
    got = linear_cross_entropy(hidden, weight, targets, bias, 7, weights_T=weights).loss
    wanted = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="none") @ weights
    compare([got], [wanted], [hidden, weight, bias])


def test_bfloat16_is_summed_in_float32() -> None:
    hidden, weight, _, targets = (
        x.bfloat16().detach().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in problem(dtype=torch.float32)
    )
    (found,) = linear_logprobs(hidden, weight, targets, chunk_tokens=16)
    assert found.dtype == torch.float32
    logits = (hidden @ weight.T).float()  # rounded once, as a stock head's are
    wanted = -F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(found, wanted)
    for x, y in zip(
        torch.autograd.grad(found.sum(), [hidden, weight]),
        torch.autograd.grad(wanted.sum(), [hidden, weight]),
        strict=True,
    ):
        assert x.dtype == torch.bfloat16 and (x - y).float().norm() < 1e-2 * y.float().norm()


def test_no_tensor_of_tokens_times_vocabulary_is_made() -> None:
    hidden, weight, _, targets = problem()
    seen: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.extend(x.shape[0] for x in [out] if isinstance(x, Tensor) and x.shape[1:] == (VOCABULARY,))
            return out

    with Watch():
        sum(
            x.sum() for x in linear_logprobs(hidden, weight, targets, entropy=True, chunk_tokens=9)
        ).backward()  # type: ignore[union-attr]
        teacher = TeacherHead(hidden.detach(), weight.detach())
        linear_kl(hidden, weight, torch.arange(NUM_TOKENS), teacher, chunk_tokens=9).sum().backward()
    assert max({*seen} - {HIDDEN}) == 9  # the weight's own transpose aside
