"""Inputs of the gated delta rule and its outputs and gradients, to be compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from seqbraid.ops import gated_delta_chunks
from seqbraid.ops.gated_delta import GatedDeltaCall, gated_delta_rule
from seqbraid.ops.gated_delta_call import RuleOptions
from seqbraid.ops.reference import gated_delta_recurrent

Rule = Callable[..., tuple[Tensor, Tensor]]


def smallest_tiles() -> AbstractContextManager[object]:
    """Tiles of as few chunks as there can be, so that short chains too are cut into several."""
    return mock.patch.dict(gated_delta_chunks.TILE_ELEMENTS, cpu=1)


def make_inputs(
    num_rows: int,
    num_segments: int,
    *,
    key_heads: int = 2,
    group: int = 2,
    key_dim: int = 6,
    value_dim: int = 4,
    decay: str = "usual",
    initial: bool = True,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Inputs by name; keys are short, so that the rule is stable without l2norm too."""
    rng = torch.Generator().manual_seed(seed)
    heads = key_heads * group

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    g = {
        "none": torch.zeros(num_rows, heads, dtype=torch.float64),
        "usual": -uniform(num_rows, heads),
        "strong": torch.full((num_rows, heads), -20.0, dtype=torch.float64),
        "mixed": torch.where(uniform(num_rows, heads) < 0.1, -20.0, -0.02 * uniform(num_rows, heads)),
    }[decay]
    inputs = {
        "q": normal(num_rows, key_heads, key_dim),
        "k": normal(num_rows, key_heads, key_dim) * 0.5 * key_dim**-0.5,
        "v": normal(num_rows, heads, value_dim),
        "g": g,
        "beta": uniform(num_rows, heads),
    }
    if initial:
        inputs["initial"] = normal(num_segments, heads, key_dim, value_dim)
    return inputs


def with_options(*tensors: Any, initial_state_NHKV: Tensor | None = None, **options: Any) -> Any:
    """`gated_delta_rule`, its options by name as the recurrence has them."""
    return gated_delta_rule(*tensors, initial_state_NHKV=initial_state_NHKV, options=RuleOptions(**options))


def segment_summary(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: list[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """M [N, H, K, K] and S0 [N, H, K, V] with `final = M @ initial + S0` for every segment."""
    call = GatedDeltaCall(k, k, v, g, beta, cu, RuleOptions(**options))
    M, S0 = call.summaries(range(len(call.segments)), with_transition=True)
    assert M is not None
    return M, S0


def run(
    rule: Rule, inputs: dict[str, Tensor], cu: list[int], dtype: torch.dtype | None = None, **options: object
) -> dict[str, Tensor]:
    """Outputs and gradients by name; the incoming gradients are the same for every rule and dtype."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    q, k, v, g, beta = (leaves[name] for name in ("q", "k", "v", "g", "beta"))
    out, final = rule(q, k, v, g, beta, cu, initial_state_NHKV=leaves.get("initial"), **options)
    rng = torch.Generator().manual_seed(1)
    dout, dfinal = (
        torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.dtype) for x in (out, final)
    )
    grads = torch.autograd.grad((out, final), leaves.values(), (dout, dfinal))
    return {"out": out.detach(), "final": final.detach()} | {
        f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Relative to the norm of what is expected: what should be 0 must be 0, and nothing may be missing."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert actual[name].shape == wanted.shape, name
        error, size = (actual[name].double() - wanted.double()).norm(), wanted.double().norm()
        assert error <= tolerance * size, f"{name}: error {error:.2e}, size {size:.2e}"


def check(lengths: list[int], padding: tuple[int, int], l2norm: bool, chunk_size: int, **shape: Any) -> None:
    cu = list(accumulate(lengths, initial=padding[0]))
    inputs = make_inputs(cu[-1] + padding[1], len(lengths), **shape)
    expected = run(gated_delta_recurrent, inputs, cu, qk_l2norm=l2norm)
    assert_close(run(with_options, inputs, cu, qk_l2norm=l2norm, chunk_size=chunk_size), expected)
    with smallest_tiles():
        assert_close(run(with_options, inputs, cu, qk_l2norm=l2norm, chunk_size=chunk_size), expected)
