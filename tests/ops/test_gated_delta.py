"""The chunked rule equals the token-by-token one: outputs, final states and every gradient."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqbraid.ops.chunk_plan import ChunkPlan
from seqbraid.ops.gated_delta import gated_delta_rule
from seqbraid.ops.reference import gated_delta_recurrent
from tests.helpers.gated_delta import (
    Rule,
    assert_close,
    check,
    make_inputs,
    run,
    smallest_tiles,
    with_options,
)

LENGTHS = (1, 2, 63, 64, 65, 130, 0, 257)
DECAYS = ("none", "usual", "strong", "mixed")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    ("chunk_size", "l2norm", "initial", "group", "lengths"),
    [
        (64, True, True, 1, LENGTHS),
        (64, False, False, 2, LENGTHS[::-1]),
        (16, True, False, 4, (64, 0, 257, 1, 130, 2)),
        (16, False, True, 2, (257, 65, 63)),
    ],
)
def test_equals_the_recurrence(
    decay: str, chunk_size: int, l2norm: bool, initial: bool, group: int, lengths: tuple[int, ...]
) -> None:
    check(list(lengths), (3, 2), l2norm, chunk_size, decay=decay, initial=initial, group=group)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    l2norm=st.booleans(),
    chunk_size=st.sampled_from([1, 3, 16]),
    decay=st.sampled_from(DECAYS),
    initial=st.booleans(),
    key_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 4]),
    value_dim=st.integers(1, 9),
)
def test_random_segments_equal_the_recurrence(
    lengths: list[int], padding: tuple[int, int], l2norm: bool, chunk_size: int, **shape: Any
) -> None:
    check(lengths, padding, l2norm, chunk_size, **shape)


@given(
    lengths=st.lists(st.integers(0, 50), max_size=12),
    start=st.integers(0, 5),
    chunk_size=st.integers(1, 20),
    tile_chunks=st.integers(8, 20),
    every=st.sampled_from([1, 2, -1]),
)
def test_plan_has_every_token_once_and_no_large_tile(
    lengths: list[int], start: int, chunk_size: int, tile_chunks: int, every: int
) -> None:
    cu = tuple(accumulate(lengths, initial=start))
    segments = tuple(pairwise(cu))[::every]
    rows = [row for begin, end in segments for row in range(begin, end)]
    plan = ChunkPlan.of(segments, chunk_size, tile_chunks, torch.device("cpu"))
    assert sorted(row for tile in plan.tiles for row in tile.rows.tolist()) == sorted(rows)
    assert all(tile.steps[-1].stop <= tile_chunks for tile in plan.tiles)
    assert plan is ChunkPlan.of(segments, chunk_size, tile_chunks, torch.device("cpu"))


@pytest.mark.parametrize("scale", [None, 0.7])
def test_reference_is_the_stock_rule(scale: float | None) -> None:
    """Ties the reference to the model; the stock rule has no boundaries, no scale and computes in float32."""
    stock = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    inputs = make_inputs(50, 1)
    q, k, v, g, beta = (inputs[name].float() for name in ("q", "k", "v", "g", "beta"))
    out, final = stock.torch_recurrent_gated_delta_rule(
        *(
            x.repeat_interleave(2, dim=1)[None] * (1.0 if scale is None or x is k else 0.7 * 6**0.5)
            for x in (q, k)
        ),
        *(x[None] for x in (v, g, beta)),
        initial_state=inputs["initial"].float(),
        output_final_state=True,
    )
    expected = {"out": out[0], "final": final}
    out, final = gated_delta_recurrent(q, k, v, g, beta, [0, 50], inputs["initial"].float(), scale)
    assert_close({"out": out, "final": final}, expected, 1e-5)
    normed = stock.torch_recurrent_gated_delta_rule(
        *(x.repeat_interleave(2, dim=1)[None] for x in (q, k)),
        *(x[None] for x in (v, g, beta)),
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )[0][0]
    out, _ = gated_delta_recurrent(q, k, v, g, beta, [0, 50], qk_l2norm=True)
    assert_close({"out": out}, {"out": normed}, 1e-5)


def test_scale_is_applied() -> None:
    inputs, cu = make_inputs(40, 2), [0, 23, 40]
    assert_close(
        run(with_options, inputs, cu, scale=0.7, qk_l2norm=False),
        run(gated_delta_recurrent, inputs, cu, scale=0.7),
    )


@pytest.mark.parametrize("decay", DECAYS)
def test_float32_is_near_float64(decay: str) -> None:
    cu = list(accumulate(LENGTHS, initial=0))
    inputs = make_inputs(cu[-1], len(LENGTHS), decay=decay, key_dim=16, value_dim=16)
    inputs = {name: x.float().double() for name, x in inputs.items()}
    expected = run(gated_delta_rule, inputs, cu)
    actual = run(gated_delta_rule, inputs, cu, torch.float32)
    assert all(x.dtype == torch.float32 for x in actual.values())
    # A few roundings; decays from differences of float32 sums would be off by several times this when mixed.
    assert_close(actual, expected, 1e-6)


def test_bfloat16_is_computed_in_float32() -> None:
    inputs, cu = make_inputs(90, 2), [0, 23, 90]
    inputs = {name: x.bfloat16() for name, x in inputs.items()}
    actual = run(gated_delta_rule, inputs, cu)
    assert actual.pop("final").dtype == torch.float32
    assert all(x.dtype == torch.bfloat16 for x in actual.values())
    expected = run(gated_delta_rule, inputs, cu, torch.float32)
    del expected["final"]
    # One rounds the incoming gradient and the results to bfloat16, 2⁻⁹ each time; the other does not.
    assert_close(actual, expected, 2**-7)


def test_one_sequence_does_not_touch_another() -> None:
    """Bit for bit, forward and backward, whatever stands in the other sequence."""
    cu = list(accumulate((70, 130, 3, 64), initial=0))
    inputs = make_inputs(cu[-1], 4)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name, x in changed.items():
        x[1 if name == "initial" else slice(70, 200)] = float("nan")
    before, after = (run(gated_delta_rule, x, cu, torch.float32) for x in (inputs, changed))
    rows, segments = [*range(70), *range(200, cu[-1])], [0, 2, 3]
    for name in before:
        others = segments if name in ("final", "dinitial") else rows
        assert torch.equal(before[name][others], after[name][others]), name
        assert not after[name][1 if name in ("final", "dinitial") else 80].isfinite().all(), name


def test_padding_rows_are_nobody() -> None:
    """Whatever stands there: nothing comes out, no gradient goes back, and the others do not see it."""
    cu, inner = [3, 73, 80], slice(3, 80)
    inputs = make_inputs(85, 2)
    for name, x in inputs.items():
        if name != "initial":
            x[:3] = x[80:] = float("nan")
    result = run(gated_delta_rule, inputs, cu)
    alone = {name: x if name == "initial" else x[inner] for name, x in inputs.items()}
    out, final = gated_delta_rule(*list(alone.values())[:5], [0, 70, 77], initial_state_NHKV=alone["initial"])
    assert torch.equal(result["out"][inner], out) and torch.equal(result["final"], final)
    for name, x in result.items():
        if name in ("final", "dinitial"):
            assert x.isfinite().all()
        else:
            assert torch.equal(x[:3], torch.zeros_like(x[:3])) and torch.equal(
                x[80:], torch.zeros_like(x[80:])
            ), name
            assert x[inner].isfinite().all() and x[inner].norm() > 0, name


@pytest.mark.parametrize("used", ["out", "final"])
def test_either_output_may_be_unused(used: str) -> None:
    inputs, cu = make_inputs(90, 2), [0, 23, 90]

    def only(rule: Rule) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs.values()]
        out, final = rule(*leaves[:5], cu, initial_state_NHKV=leaves[5], qk_l2norm=True)
        loss = (out if used == "out" else final).square().sum()
        return [
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True)
        ]

    actual, expected = only(with_options), only(gated_delta_recurrent)
    assert_close(dict(zip(inputs, actual, strict=True)), dict(zip(inputs, expected, strict=True)))


@pytest.mark.parametrize("needed", ["q", "k", "v", "g", "beta", "initial"])
def test_one_input_alone_may_require_grad(needed: str) -> None:
    inputs, cu = make_inputs(40, 2), [0, 23, 40]
    expected = run(gated_delta_rule, inputs, cu)[f"d{needed}"]
    leaves = {name: x.detach().requires_grad_(name == needed) for name, x in inputs.items()}
    out, final = gated_delta_rule(*list(leaves.values())[:5], cu, initial_state_NHKV=leaves["initial"])
    rng = torch.Generator().manual_seed(1)
    torch.autograd.backward(
        (out, final), [torch.randn(x.shape, generator=rng, dtype=x.dtype) for x in (out, final)]
    )
    for name, x in leaves.items():
        assert (x.grad is None) == (name != needed)
    assert torch.equal(leaves[needed].grad, expected)


def test_gradients_under_checkpoint_are_the_same() -> None:
    inputs, cu = make_inputs(90, 2), [0, 23, 90]

    def checkpointed(*args: Tensor, initial_state_NHKV: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(
            with_options, *args, initial_state_NHKV=initial_state_NHKV, chunk_size=8, use_reentrant=False
        )

    with smallest_tiles():
        actual, expected = run(checkpointed, inputs, cu), run(with_options, inputs, cu, chunk_size=8)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_backward_can_be_run_again() -> None:
    leaves = [x.requires_grad_() for x in make_inputs(90, 1).values()]
    with smallest_tiles():
        out, _ = with_options(*leaves[:5], [0, 90], initial_state_NHKV=leaves[5], chunk_size=8)
        first, second = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_keeps_the_inputs_and_few_states_for_backward() -> None:
    inputs = make_inputs(512, 1, key_dim=16, value_dim=16)
    state_bytes, inputs = inputs["initial"].nbytes, {name: x.requires_grad_() for name, x in inputs.items()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with smallest_tiles(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with_options(
            *list(inputs.values())[:5], [0, 512], initial_state_NHKV=inputs["initial"], chunk_size=16
        )
    # 32 chunks in tiles of 8: the states that enter the second, third and fourth tile.
    assert sum(saved.values()) == sum(x.nbytes for x in inputs.values()) + 3 * state_bytes


def test_autocast_does_not_lower_the_precision() -> None:
    inputs, cu = {name: x.float() for name, x in make_inputs(90, 2).items()}, [0, 23, 90]
    expected = run(gated_delta_rule, inputs, cu)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(gated_delta_rule, inputs, cu)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_without_tokens_the_states_pass_through(lengths: list[int]) -> None:
    cu = list(accumulate(lengths, initial=2))
    inputs = make_inputs(4, len(lengths))
    leaves = [x.requires_grad_() for x in inputs.values()]
    out, final = gated_delta_rule(*leaves[:5], cu, initial_state_NHKV=leaves[5])
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(final, leaves[5])
    *grads, dinitial = torch.autograd.grad((out.sum(), final.sum()), leaves)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)
    assert torch.equal(dinitial, torch.ones_like(dinitial))


def test_input_that_does_not_fit_is_refused() -> None:
    q, k, v, g, beta, initial = make_inputs(10, 1).values()
    with pytest.raises(ValueError, match=r"q .* do not fit"):
        gated_delta_rule(q[:, :1], k, v, g, beta, [0, 10])
    with pytest.raises(ValueError, match="multiple of k's heads"):
        gated_delta_rule(q, k, v[:, :3], g[:, :3], beta[:, :3], [0, 10])
    with pytest.raises(ValueError, match="as many rows"):
        gated_delta_rule(q, k, v[:9], g[:9], beta[:9], [0, 9])
    with pytest.raises(ValueError, match=r"g .* must be"):
        gated_delta_rule(q, k, v, g[:, :2], beta, [0, 10])
    with pytest.raises(ValueError, match=r"beta .* must be"):
        gated_delta_rule(q, k, v, g, beta[:9], [0, 10])
    with pytest.raises(ValueError, match=r"initial state .* must be"):
        gated_delta_rule(q, k, v, g, beta, [0, 5, 10], initial_state_NHKV=initial)
    with pytest.raises(ValueError, match="chunk_size 0"):
        with_options(q, k, v, g, beta, [0, 10], chunk_size=0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        gated_delta_rule(q, k, v, g, beta, [0, 11])
