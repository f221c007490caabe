"""Block attention: equal to plain maths, mergeable through its LSE, and never across a boundary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqbraid.comm import Group
from seqbraid.ops import blocks
from seqbraid.ops.attention import (
    BlockBackward,
    BlockForward,
    block_attention,
    block_attention_backward,
    merge_block_attention,
)
from seqbraid.ops.attention_kernels import (
    DenseShape,
    dense_backward,
    dense_forward,
    math_backward,
    math_forward,
)
from seqbraid.ops.blocks import Block, BlockPlan, DenseGroup, rounded
from seqbraid.ops.flash_impl import TORCH
from seqbraid.ops.merge import add_rows, merge_rows
from seqbraid.sequence_parallel.ring import ring_attention
from seqbraid.sequence_parallel.ring_plan import RingPlan
from tests.helpers.plain import plain_attention, relative

LENGTHS = [1, 2, 63, 64, 65, 130, 7, 7, 7]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, sink: Tensor | None = None
) -> Tensor:
    """The differentiable op on one rank: a ring without steps."""
    return ring_attention(q, k, v, RingPlan(plan), Group(), scale, sink)


def row(num_tokens: int, heads: int, kv_heads: int, size: int, value_size: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size or size)]
    return [
        torch.randn(num_tokens, *s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


@pytest.mark.parametrize("window", [None, 2, 3, 16, 64, 1000])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("value_size", [8, 4, 11])
def test_packed_attention_equals_each_sequence_alone(
    window: int | None, with_sink: bool, value_size: int
) -> None:
    inputs = row(sum(LENGTHS), 4, 2, 8, value_size)
    sink = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64).requires_grad_() if with_sink else None
    wanted = [*inputs, *([sink] if sink is not None else [])]
    segments = [(sum(LENGTHS[:i]), n) for i, n in enumerate(LENGTHS)]
    out = packed_attention(*inputs, BlockPlan.causal(segments, window), 0.3, sink)
    reference = plain_attention(*inputs, LENGTHS, window, sink)
    weight = torch.randn(reference.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert relative(out, reference) < 1e-13
    for got, expected in zip(
        torch.autograd.grad((out * weight).sum(), wanted),
        torch.autograd.grad((reference * weight).sum(), wanted),
        strict=True,
    ):
        assert expected.norm() > 0.1
        assert relative(got, expected) < 1e-12


def test_blocks_merge_through_lse_and_backward_takes_the_global_ones() -> None:
    """Two halves of the keys, merged by hand, and a backward fed the merged out and LSE."""
    q, k, v = row(96, 4, 2, 8)
    full = BlockPlan((Block(64, 96, 0, 96, True, shift=64),))
    first, second = BlockPlan((Block(64, 96, 0, 64, False),)), BlockPlan((Block(64, 96, 64, 96, True),))
    with torch.no_grad():
        whole, whole_lse = block_attention(q, k, v, full, 0.3)
        out, lse = block_attention(q, k, v, second, 0.3)
        merge_block_attention(out, lse, q, k, v, first, 0.3)
        assert relative(out[64:], whole[64:]) < 1e-13
        assert relative(lse[:, 64:], whole_lse[:, 64:]) < 1e-13
        dout = torch.randn_like(out)
        expected = block_attention_backward(dout, q, k, v, whole, whole_lse, full, 0.3)
        parts = [block_attention_backward(dout, q, k, v, out, lse, plan, 0.3) for plan in (first, second)]
        got = [a + b for a, b in zip(*parts, strict=True)]
        for name, total, wanted in zip("qkv", got, expected, strict=True):
            assert wanted.norm() > 1 and relative(total, wanted) < 1e-12, name


ROWS = {"side by side": slice(2, 7), "anywhere": torch.tensor([6, 3, 9])}
DTYPES = {
    "in place": (torch.bfloat16, torch.bfloat16),
    "first": (torch.bfloat16, torch.float32),
    "between": (torch.float32, torch.float32),
    "last": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("where", DTYPES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_sums_are_rounded_to_where_they_are_written(rows: slice | Tensor, where: str) -> None:
    """And so only once, however narrow what is added."""
    generator = torch.Generator().manual_seed(0)
    out, lse = torch.randn(10, 2, 8, generator=generator), torch.randn(2, 10, generator=generator)
    before, after = DTYPES[where]
    out = out.to(before)
    n = len(out[rows])
    part = torch.randn(n, 2, 8, generator=generator).bfloat16()
    part_lse = torch.randn(2, n, generator=generator)
    weights = torch.stack([lse[:, rows], part_lse]).softmax(0).mT[..., None]
    exact = weights[0] * out[rows].float() + weights[1] * part.float()
    lse_before = lse[:, rows].clone()

    into = out if where == "in place" else torch.full_like(out, 7.0, dtype=after)
    added = into.clone()
    add_rows(out, rows, part, added)
    sums = (out[rows].float() + part.float()).to(after)
    merge_rows(out, lse, rows, part, part_lse, into)
    assert (exact - part.float()).abs().max() > 0.1
    torch.testing.assert_close(
        into[rows], exact.to(after), rtol=0, atol=0.01 if after == torch.bfloat16 else 1e-6
    )
    torch.testing.assert_close(lse[:, rows], torch.logaddexp(lse_before, part_lse))
    assert torch.equal(added[rows], sums)
    others = torch.ones(10, dtype=torch.bool)
    others[rows] = False
    if where != "in place":
        assert (into[others] == 7.0).all() and (added[others] == 7.0).all()


def test_rows_of_no_block_keep_what_they_had() -> None:
    """Also where sums are written elsewhere."""
    q, k, v, out, dout = (x.detach() for x in [*row(20, 2, 1, 4), *row(20, 2, 2, 4)[:2]])
    plan = BlockPlan((Block(3, 8, 0, 9, False), Block(12, 16, 9, 20, False)))
    lse = torch.zeros(2, 20, dtype=torch.float64)
    elsewhere, in_place, lse_in_place = torch.full_like(out, torch.nan), out.clone(), lse.clone()
    BlockForward(q, k, v, plan, 0.3, adds=True).start().merge(out, lse, elsewhere)
    merge_block_attention(in_place, lse_in_place, q, k, v, plan, 0.3)
    assert torch.equal(elsewhere, in_place) and torch.equal(lse, lse_in_place)
    nobody = [*range(3), *range(8, 12), *range(16, 20)]
    assert torch.equal(elsewhere[nobody], out[nobody]) and not torch.equal(elsewhere, out)

    gradient = torch.full_like(q, torch.nan)
    arguments = (dout, q, k, v, in_place, lse, plan, 0.3)
    first, seen, rest = arguments[:4], arguments[4:6], arguments[6:]
    dk, dv = BlockBackward(*first, seen, *rest, adds=True).start().add(out, gradient)
    for got, wanted in zip((gradient - out, dk, dv), block_attention_backward(*arguments), strict=True):
        assert wanted.norm() > 0.1 and relative(got, wanted) < 1e-13
    assert torch.equal(gradient[nobody], out[nobody])


def test_rows_of_no_block_are_nobody() -> None:
    q, k, v = row(20, 2, 1, 4)
    plan = BlockPlan.causal([(3, 5), (10, 6)])
    out, lse = block_attention(q, k, v, plan, 1.0)
    padding = [0, 1, 2, 8, 9, 16, 17, 18, 19]
    assert (out[padding] == 0).all() and lse[:, padding].isneginf().all()
    for gradient in torch.autograd.grad(packed_attention(q, k, v, plan, 1.0).sum(), (q, k, v)):
        assert (gradient[padding] == 0).all() and gradient.norm() > 0


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    q, k, v = (x.detach() for x in row(sum(LENGTHS), 4, 2, 8))
    segments = [(sum(LENGTHS[:i]), n) for i, n in enumerate(LENGTHS)]
    before = packed_attention(q, k, v, BlockPlan.causal(segments), 0.3)
    for x in (q, k, v):
        x[3:66] += 1.0  # the sequence of 63
    after = packed_attention(q, k, v, BlockPlan.causal(segments), 0.3)
    assert torch.equal(before[:3], after[:3]) and torch.equal(before[66:], after[66:])
    assert not torch.equal(before[3:66], after[3:66])


@pytest.mark.parametrize("causal", [False, True])
def test_plain_maths_is_the_kernel(causal: bool) -> None:
    """Where no kernel takes the tensors, plain maths does the same, its global out and LSE included."""
    q, k, v, dout = (torch.randn(2, h, 9, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    shape = DenseShape(causal, None)
    forward, plain_forward = dense_forward(q, k, v, shape, 0.3), math_forward(q, k, v, shape, 0.3)
    assert max(relative(a, b) for a, b in zip(plain_forward, forward, strict=True)) < 1e-13
    out, lse = forward[0] * 0.7, forward[1] + 0.2  # as if other keys had been seen as well
    backward = dense_backward(dout, q, k, v, out, lse, shape, 0.3)
    plain_backward = math_backward(dout, q, k, v, out, lse, shape, 0.3)
    assert max(relative(a, b) for a, b in zip(plain_backward, backward, strict=True)) < 1e-12


@pytest.mark.parametrize("rows", [70, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_made_round_is_the_block(rows: int, causal: bool) -> None:
    """What lies behind a block and makes its shape round, other rows or none, changes nothing."""
    q, k, v = (x.detach() for x in row(rows, 4, 2, 8))
    dout = torch.randn_like(q)
    keys = (3, 66) if causal else (0, 128)
    if not causal:
        k, v = (torch.randn(200, 2, 8, dtype=q.dtype) for _ in range(2))
    block, cpu = Block(3, 66, *keys, causal=causal), torch.device("cpu")
    plain_group, filled = DenseGroup.of([block], cpu), DenseGroup.of([block], cpu, is_round=True)
    forward, filled_forward = plain_group.forward(q, k, v, 0.3), filled.forward(q, k, v, 0.3)
    assert max(relative(a, b) for a, b in zip(filled_forward, forward, strict=True)) < 1e-13
    out, lse = block_attention(q, k, v, BlockPlan((block,)), 0.3)
    backward = plain_group.backward(dout, q, k, v, out, lse, 0.3)
    filled_backward = filled.backward(dout, q, k, v, out, lse, 0.3)
    assert max(relative(a, b) for a, b in zip(filled_backward, backward, strict=True)) < 1e-13


@pytest.mark.parametrize("causal", [False, True])
def test_equal_blocks_side_by_side_are_one_dense_call(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order they are given; not where something lies between them."""
    monkeypatch.setattr(blocks, "ANY_PAIRS", 5 * 9 * 9)
    q, k, v = (x.detach() for x in row(60, 4, 2, 8))
    dout, cpu = torch.randn_like(q), torch.device("cpu")
    given = [Block(i, i + 9, i, i + 9, causal) for i in (21, 3, 39, 12, 30)]
    (group,) = BlockPlan(tuple(given))._grouped(cpu, TORCH)
    assert isinstance(group, DenseGroup) and group.q_rows == group.k_rows == slice(3, 48)
    apart = [*given[:-1], Block(49, 58, 49, 58, causal)]
    assert not any(isinstance(part, DenseGroup) for part in BlockPlan(tuple(apart))._grouped(cpu, TORCH))
    out, lse = block_attention(q, k, v, BlockPlan(tuple(given)), 0.3)
    found = group.forward(q, k, v, 0.3)
    assert max(relative(a, b) for a, b in zip(found, (out[3:48], lse[:, 3:48]), strict=True)) < 1e-13
    wanted = block_attention_backward(dout, q, k, v, out, lse, BlockPlan(tuple(given)), 0.3)
    gradients = group.backward(dout, q, k, v, out, lse, 0.3)
    assert max(relative(a, b[3:48]) for a, b in zip(gradients, wanted, strict=True)) < 1e-13


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 2048, 2049, 4097, 10653, 16385, 131072])
def test_round_shapes_are_few_and_near(rows: int) -> None:
    assert rows <= rounded(rows) < rows + max(128, rows / 16)
    assert rounded(rounded(rows)) == rounded(rows)
    assert len({rounded(n) for n in range(rows, 2 * rows)}) <= 33 + rows // 512
