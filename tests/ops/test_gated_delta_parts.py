"""A sequence in parts: states passed on, summaries of segments, gradients that enter from behind."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from seqbraid.ops.gated_delta import GatedDeltaCall
from seqbraid.ops.gated_delta_call import RuleOptions
from seqbraid.ops.reference import gated_delta_recurrent
from tests.helpers.gated_delta import (
    assert_close,
    make_inputs,
    run,
    segment_summary,
    smallest_tiles,
    with_options,
)

from .test_gated_delta import DECAYS


@pytest.mark.parametrize("split", [0, 1, 15, 16, 17, 64, 100, 120])
def test_two_parts_equal_the_whole(split: int) -> None:
    """[0, s) and then [s, T) from the state it left, with the gradient going back through that state."""

    def in_two_parts(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: list[int], initial_state_NHKV: Tensor
    ) -> tuple[Tensor, Tensor]:
        first, second = ([x[part] for x in (q, k, v, g, beta)] for part in (slice(split), slice(split, None)))
        out_first, state = with_options(
            *first, [0, split], initial_state_NHKV=initial_state_NHKV, chunk_size=16
        )
        out_second, final = with_options(*second, [0, 120 - split], initial_state_NHKV=state, chunk_size=16)
        return torch.cat([out_first, out_second]), final

    inputs = make_inputs(120, 1)
    assert_close(run(in_two_parts, inputs, [0, 120]), run(with_options, inputs, [0, 120], chunk_size=16))


@pytest.mark.parametrize("l2norm", [True, False])
def test_summary_is_the_affine_map_of_the_state(l2norm: bool) -> None:
    cu = list(accumulate((20, 0, 70, 1), initial=2))
    inputs = make_inputs(cu[-1] + 1, 4)
    q, k, v, g, beta, initial = inputs.values()
    M, S0 = segment_summary(k, v, g, beta, cu, qk_l2norm=l2norm, chunk_size=16)
    _, final = gated_delta_recurrent(q, k, v, g, beta, cu, initial, qk_l2norm=l2norm)
    assert_close({"final": M @ initial + S0}, {"final": final})


def make_call(inputs: dict[str, Tensor], cu: list[int], **options: Any) -> GatedDeltaCall:
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    return GatedDeltaCall(q, k, v, g, beta, cu, RuleOptions(**options))


@pytest.mark.parametrize("l2norm", [True, False])
def test_summaries_of_some_segments(l2norm: bool) -> None:
    """In the order asked for, whatever lies between them, with M only where it is wanted."""
    cu = list(accumulate((20, 3, 0, 70, 1, 40), initial=2))
    inputs = make_inputs(cu[-1] + 1, 6)
    q, k, v, g, beta, initial = inputs.values()
    _, final = gated_delta_recurrent(q, k, v, g, beta, cu, initial, qk_l2norm=l2norm)
    _, from_zero = gated_delta_recurrent(q, k, v, g, beta, cu, qk_l2norm=l2norm)
    call = make_call(inputs, cu, qk_l2norm=l2norm, chunk_size=16)
    for segments in ([3, 0], [5, 2, 1], [4], [], [0, 1, 2, 3, 4, 5]):
        M, S0 = call.summaries(segments, with_transition=True)
        assert M is not None
        assert_close({"final": M @ initial[segments] + S0}, {"final": final[segments]})
        none, S0 = call.summaries(segments, with_transition=False)
        assert none is None
        assert_close({"S0": S0}, {"S0": from_zero[segments]})


def test_summaries_read_no_other_row() -> None:
    inputs, cu = make_inputs(90, 3), [0, 20, 60, 90]
    M, S0 = make_call(inputs, cu).summaries([0, 2], with_transition=True)
    for x in inputs.values():
        x[20:60] = float("nan")
    M_again, S0_again = make_call(inputs, cu).summaries([0, 2], with_transition=True)
    assert M is not None and M_again is not None
    assert torch.equal(M, M_again) and torch.equal(S0, S0_again)


@pytest.mark.parametrize("decay", DECAYS)
def test_entering_gradients_are_those_without_a_gradient_from_behind(decay: str) -> None:
    """The gradient of the initial states when only the outputs have one; Mᵀ dS_out is what comes to it."""
    cu = list(accumulate((20, 3, 0, 70, 1, 40), initial=2))
    inputs = make_inputs(cu[-1] + 1, 6, decay=decay)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    *tensors, initial = leaves.values()
    rng = torch.Generator().manual_seed(1)
    out, final = gated_delta_recurrent(*tensors, cu, initial, qk_l2norm=True)
    dout = torch.randn(out.shape, generator=rng, dtype=torch.float64)
    dfinal = torch.randn(final.shape, generator=rng, dtype=torch.float64)
    (alone,) = torch.autograd.grad(out, initial, dout, retain_graph=True)
    (whole,) = torch.autograd.grad((out, final), initial, (dout, dfinal))
    call = make_call(inputs, cu, chunk_size=16)
    for segments in ([3, 0], [5, 2, 1], [], [0, 1, 2, 3, 4, 5]):
        found = call.entering_gradients(dout, segments)
        assert_close({"dS_in": found}, {"dS_in": alone[segments]})
        M, _ = call.summaries(segments, with_transition=True)
        assert M is not None
        assert_close({"dS_in": found + M.mT @ dfinal[segments]}, {"dS_in": whole[segments]})
    with smallest_tiles():
        found = make_call(inputs, cu, chunk_size=4).entering_gradients(dout, [3, 0])
    assert_close({"dS_in": found}, {"dS_in": alone[[3, 0]]})


def test_a_call_made_anew_goes_back() -> None:
    """Forward and backward apart, for callers with an autograd of their own; absent states are zero."""
    inputs, cu = make_inputs(512, 2), [0, 23, 512]
    rng = torch.Generator().manual_seed(1)
    dout = torch.randn(inputs["v"].shape, generator=rng, dtype=torch.float64)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    *tensors, initial = leaves.values()
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    for states in (initial, torch.zeros_like(initial).requires_grad_()):
        out, _ = gated_delta_recurrent(*tensors, cu, states, qk_l2norm=True)
        expected = torch.autograd.grad(out, [*tensors, states], dout)
        with smallest_tiles():
            first = GatedDeltaCall(q, k, v, g, beta, cu, RuleOptions(chunk_size=16))
            given = None if states is not initial else inputs["initial"]
            out_again, _ = first.forward(given)
            assert first.kept
            second = GatedDeltaCall(q, k, v, g, beta, cu, RuleOptions(chunk_size=16), kept=first.kept)
            grads = second.backward(dout, given, None)
        assert_close({"out": out_again}, {"out": out.detach()})
        assert_close(dict(zip(leaves, grads, strict=True)), dict(zip(leaves, expected, strict=True)))


def test_parts_of_16_bit_inputs_are_computed_in_float32() -> None:
    inputs, cu = {name: x.bfloat16() for name, x in make_inputs(90, 2).items()}, [0, 23, 90]
    wide = {name: x.float() for name, x in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [*make_call(inputs, cu).summaries([0, 1], with_transition=True)]
        found.append(make_call(inputs, cu).entering_gradients(inputs["v"], [0, 1]))
    expected = [*make_call(wide, cu).summaries([0, 1], with_transition=True)]
    expected.append(make_call(wide, cu).entering_gradients(wide["v"], [0, 1]))
    for x, y in zip(found, expected, strict=True):
        assert x is not None and y is not None and x.dtype == torch.float32 and torch.equal(x, y)
