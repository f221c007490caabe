"""Softmax attention over ranks equals each sequence alone, in float64, for every mesh and policy."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from seqbraid import Mesh, SequenceLayout
from seqbraid.comm import Group
from seqbraid.layout.balance import balance
from seqbraid.sequence_parallel import ring
from seqbraid.sequence_parallel.context import StepContext
from seqbraid.sequence_parallel.plans import RowPlans
from seqbraid.sequence_parallel.ring_plan import RingPlan
from seqbraid.sequence_parallel.softmax import softmax_attention
from tests.helpers import ranks
from tests.helpers.plain import SCALE, plain_attention, relative

LENGTHS = (1, 2, 63, 64, 65, 130, 257, 1000)
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2), (2, 4)]
Prepare = Callable[..., str]


class Attention(NamedTuple):
    """Inputs of attention over a row, and what each sequence alone makes of them."""

    lengths: tuple[int, ...]
    window: int | None
    inputs: dict[str, Tensor]
    """q, k, v, and the sink if there is one."""
    weight: Tensor
    out: Tensor
    gradients: dict[str, Tensor]


def plain(lengths: tuple[int, ...], heads: tuple[int, int], window: int | None, with_sink: bool) -> Attention:
    generator = torch.Generator().manual_seed(0)
    queries, keys = ((sum(lengths), count, 8) for count in heads)
    shapes = {"q": queries, "k": keys, "v": keys, "weight": queries, "sink": heads[:1]}
    made = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()
    }
    weight = made.pop("weight")
    if not with_sink:
        del made["sink"]
    leaves = {name: x.clone().requires_grad_() for name, x in made.items()}
    out = plain_attention(
        leaves["q"], leaves["k"], leaves["v"], lengths, window=window, sink=leaves.get("sink")
    )
    gradients = torch.autograd.grad((out * weight).sum(), list(leaves.values()))
    return Attention(lengths, window, made, weight, out.detach(), dict(zip(leaves, gradients, strict=True)))


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Attention by its definition, computed once by the test process and read by all ranks."""
    folder = tmp_path_factory.mktemp("references")

    def path_of(
        lengths: tuple[int, ...] = LENGTHS,
        heads: tuple[int, int] = (8, 2),
        window: int | None = None,
        with_sink: bool = False,
    ) -> str:
        case = (lengths, heads, window, with_sink)
        path = folder / f"{zlib.crc32(repr(case).encode())}.pt"
        if not path.exists():
            torch.save(tuple(plain(*case)), path)
        return str(path)

    return path_of


def worst_errors(path: str, ring: int, ulysses: int, policy: str) -> tuple[dict[str, float], dict[str, int]]:
    """On one rank: relative errors of its part of out, dq, dk, dv, and the bytes it sent."""
    expected = Attention(*torch.load(path))
    mesh = Mesh(ring=ring, ulysses=ulysses)
    layout = SequenceLayout(expected.lengths, ring, ulysses, policy)
    rank = mesh.sequence_rank
    groups = {axis: Group.of(mesh.process_group(axis)) for axis in ("ring", "ulysses", "sequence")}
    context = StepContext(RowPlans(layout, rank), groups["ring"], groups["ulysses"])
    local = {
        name: (x if name == "sink" else layout.shard(x, rank)).clone().requires_grad_()
        for name, x in expected.inputs.items()
    }
    q, k, v, sink = (local.get(name) for name in ("q", "k", "v", "sink"))
    out = softmax_attention(q, k, v, context, SCALE, expected.window, sink)
    got = torch.autograd.grad((out * layout.shard(expected.weight, rank)).sum(), list(local.values()))

    errors = {"out": relative(out, layout.shard(expected.out, rank))}
    padding = layout.index(rank) < 0
    assert (out[padding] == 0).all()
    for (name, whole), gradient in zip(expected.gradients.items(), got, strict=True):
        if name == "sink":
            errors["dsink"] = relative(groups["sequence"].all_reduce(gradient), whole)
        else:
            errors[f"d{name}"] = relative(gradient, layout.shard(whole, rank))
            assert (gradient[padding] == 0).all()
    return errors, dict(groups["ring"].sent + groups["ulysses"].sent)


@pytest.mark.parametrize("policy", ["zigzag", "balanced", "contiguous"])
@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_equals_each_sequence_alone(prepare: Prepare, ring: int, ulysses: int, policy: str) -> None:
    for errors, _ in ranks.run(worst_errors, ring * ulysses, prepare(), ring, ulysses, policy):
        assert max(errors.values()) < 1e-12, errors


def test_parts_need_not_be_in_the_order_of_ranks(prepare: Prepare) -> None:
    lengths = (113, 103)
    assert list(balance(lengths, 4, 1).shares[1]) == [3, 0, 1, 2]
    for errors, _ in ranks.run(worst_errors, 4, prepare(lengths), 4, 1, "balanced"):
        assert max(errors.values()) < 1e-12, errors


def wide_places(rows: Tensor, plan: RingPlan, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """All sums in a wide copy, from the first to the last."""
    wide = rows.to(dtype)
    for _ in plan.rounds:
        yield wide, wide
    rows.copy_(wide)


def bits(path: str, ring_size: int, wide: bool) -> list[Tensor]:
    """On one rank, in bfloat16: out and gradients, with sums over rounds kept in float32 if asked for."""
    expected = Attention(*torch.load(path))
    mesh = Mesh(ring=ring_size)
    layout = SequenceLayout(expected.lengths, ring_size, policy="zigzag")
    context = StepContext(RowPlans(layout, mesh.sequence_rank), Group.of(mesh.process_group("ring")))
    local = [
        layout.shard(expected.inputs[name], mesh.sequence_rank).bfloat16().requires_grad_() for name in "qkv"
    ]
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr(ring, "_places", wide_places)
        out = softmax_attention(*local, context, SCALE)
        weight = layout.shard(expected.weight, mesh.sequence_rank).bfloat16()
        gradients = torch.autograd.grad((out * weight).sum(), local)
    assert len(context.row.ring(None, shared=True, whole=True).rounds) == ring_size - 1
    return [out.detach(), *gradients]


@pytest.mark.parametrize("ring_size", [2, 4])
def test_sums_over_rounds_are_rounded_once(prepare: Prepare, ring_size: int) -> None:
    """Two ranks have one round and need no wider copy for that; four have three, if keys have as many heads
    as queries.
    """
    path = prepare(heads=(8, 8))
    found = [ranks.run(bits, ring_size, path, ring_size, wide) for wide in (False, True)]
    for narrow, wide in zip(*found, strict=True):
        for a, b in zip(narrow, wide, strict=True):
            assert a.abs().max() > 0.1
            assert torch.equal(a, b)


@pytest.mark.parametrize("heads", [(12, 3), (12, 12), (4, 1), (8, 4)])
def test_kv_heads_go_where_their_query_heads_are(prepare: Prepare, heads: tuple[int, int]) -> None:
    for errors, _ in ranks.run(worst_errors, 4, prepare(LENGTHS[:-1], heads), 1, 4, "balanced"):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(("ring", "ulysses", "window"), [(1, 4, 16), (1, 2, 100), (2, 2, 1000)])
def test_windows_and_sinks(prepare: Prepare, ring: int, ulysses: int, window: int) -> None:
    path = prepare(window=window, with_sink=True)
    for errors, _ in ranks.run(worst_errors, ring * ulysses, path, ring, ulysses, "zigzag"):
        assert "dsink" in errors and max(errors.values()) < 1e-12, errors


def test_a_narrow_window_is_refused_under_ring(prepare: Prepare) -> None:
    for error in ranks.errors(worst_errors, 2, prepare((64,), window=16), 2, 1, "zigzag"):
        assert "sliding window of 16; use ulysses instead of ring" in error.message


def test_heads_that_do_not_divide_are_refused(prepare: Prepare) -> None:
    for error in ranks.errors(worst_errors, 4, prepare((64,), (6, 2)), 1, 4, "zigzag"):
        assert "ulysses=4 does not divide 6 query heads; use 1, 2, 3 or 6" in error.message


@pytest.mark.parametrize(("heads", "size"), [((8, 2), 2), ((8, 8), 4), ((8, 2), 4), ((8, 4), 8)])
def test_ulysses_sends_what_the_formula_says(prepare: Prepare, heads: tuple[int, int], size: int) -> None:
    """`2·n·d·b·(H_q + max(H_kv, P))·(P−1)/P` per rank and layer forward."""
    length = 512
    for _, sent in ranks.run(worst_errors, size, prepare((length,), heads), 1, size, "zigzag"):
        formula = 2 * (length // size) * 8 * 8 * (heads[0] + max(heads[1], size)) * (size - 1) // size
        assert sent == {"ulysses": formula, "ulysses gradient": formula}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ring_sends_no_key_that_nobody_sees(prepare: Prepare, size: int) -> None:
    """At most `2·n·d·b·H_kv·(P−1)`; a later rank needs only the earlier one of our two chunks."""
    length = 512
    formula = 2 * (length // size) * 8 * 8 * 2
    results = ranks.run(worst_errors, size, prepare((length,)), size, 1, "zigzag")
    for rank, (_, sent) in enumerate(results):
        earlier, later = rank, size - 1 - rank
        assert sent["ring"] == formula * earlier + formula // 2 * later
        assert sent["ring"] <= formula * (size - 1)
    assert sum(s["ring gradient"] for _, s in results) == sum(s["ring"] for _, s in results)


@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (2, 2), (1, 4)])
def test_whole_sequences_are_never_sent(prepare: Prepare, ring: int, ulysses: int) -> None:
    for errors, sent in ranks.run(worst_errors, 4, prepare((64,) * 12), ring, ulysses, "balanced"):
        assert not sent
        assert max(errors.values()) < 1e-12, errors
