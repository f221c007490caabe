"""Softmax attention over ranks equals each sequence alone, in float64, for every mesh and policy."""

from __future__ import annotations

import pytest
import torch

from seqbraid import Mesh, SequenceLayout
from seqbraid.comm import Group
from seqbraid.sequence_parallel.context import StepContext
from seqbraid.sequence_parallel.softmax import softmax_attention
from tests import ranks
from tests.plain import SCALE, plain_attention, relative

LENGTHS = (1, 2, 63, 64, 65, 130, 257, 1000)
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2), (2, 4)]


def worst_errors(
    ring: int,
    ulysses: int,
    policy: str,
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    window: int | None,
    with_sink: bool,
) -> tuple[dict[str, float], dict[str, int]]:
    """On one rank: relative errors of its part of out, dq, dk, dv, and the bytes it sent."""
    mesh = Mesh(ring=ring, ulysses=ulysses)
    layout = SequenceLayout(lengths, ring, ulysses, policy)
    rank = mesh.sequence_rank
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads[0], 8), (heads[1], 8), (heads[1], 8), (heads[0], 8)]
    q, k, v, weight = (
        torch.randn(sum(lengths), *s, dtype=torch.float64, generator=generator).requires_grad_()
        for s in sizes
    )
    sink = (
        torch.randn(heads[0], dtype=torch.float64, generator=generator).requires_grad_()
        if with_sink
        else None
    )
    wanted = [x for x in (q, k, v, sink) if x is not None]
    reference = plain_attention(q, k, v, lengths, window, sink)
    expected = torch.autograd.grad((reference * weight.detach()).sum(), wanted)

    groups = {axis: Group.of(mesh.process_group(axis)) for axis in ("ring", "ulysses", "sequence")}
    context = StepContext(layout, rank, groups["ring"], groups["ulysses"])
    local = [layout.shard(x.detach(), rank).requires_grad_() for x in (q, k, v)]
    own_sink = None if sink is None else sink.detach().clone().requires_grad_()
    out = softmax_attention(*local, context, SCALE, window, own_sink)
    got = torch.autograd.grad(
        (out * layout.shard(weight.detach(), rank)).sum(),
        [*local, *([own_sink] if own_sink is not None else [])],
    )
    errors = {"out": relative(out, layout.shard(reference, rank))}
    for name, a, b in zip(("dq", "dk", "dv"), got, expected, strict=False):
        errors[name] = relative(a, layout.shard(b, rank))
    if sink is not None:
        errors["dsink"] = relative(groups["sequence"].all_reduce(got[3]), expected[3])
    padding = layout.index(rank) < 0
    assert (out[padding] == 0).all() and all((g[padding] == 0).all() for g in got[:3])
    return errors, dict(groups["ring"].sent + groups["ulysses"].sent)


@pytest.mark.parametrize("policy", ["zigzag", "balanced", "contiguous"])
@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_equals_each_sequence_alone(ring: int, ulysses: int, policy: str) -> None:
    for errors, _ in ranks.run(
        worst_errors, ring * ulysses, ring, ulysses, policy, LENGTHS, (8, 2), None, False
    ):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("heads", [(12, 3), (12, 12), (4, 1), (8, 4)])
def test_kv_heads_go_where_their_query_heads_are(heads: tuple[int, int]) -> None:
    for errors, _ in ranks.run(worst_errors, 4, 1, 4, "balanced", LENGTHS, heads, None, False):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(("ring", "ulysses", "window"), [(1, 4, 16), (1, 2, 100), (2, 2, 1000)])
def test_windows_and_sinks(ring: int, ulysses: int, window: int) -> None:
    for errors, _ in ranks.run(
        worst_errors, ring * ulysses, ring, ulysses, "zigzag", LENGTHS, (8, 2), window, True
    ):
        assert max(errors.values()) < 1e-12, errors


def test_a_narrow_window_is_refused_under_ring() -> None:
    for error in ranks.errors(worst_errors, 2, 2, 1, "zigzag", LENGTHS, (8, 2), 16, False):
        assert "sliding window of 16; use ulysses instead of ring" in error.message


def test_heads_that_do_not_divide_are_refused() -> None:
    for error in ranks.errors(worst_errors, 4, 1, 4, "zigzag", LENGTHS, (6, 2), None, False):
        assert "ulysses=4 does not divide 6 query heads; use 1, 2, 3 or 6" in error.message


@pytest.mark.parametrize(("heads", "size"), [((8, 2), 2), ((8, 8), 4), ((8, 2), 4), ((8, 4), 8)])
def test_ulysses_sends_what_the_formula_says(heads: tuple[int, int], size: int) -> None:
    """`2·n·d·b·(H_q + max(H_kv, P))·(P−1)/P` per rank and layer forward."""
    length = 512
    for _, sent in ranks.run(worst_errors, size, 1, size, "zigzag", (length,), heads, None, False):
        formula = 2 * (length // size) * 8 * 8 * (heads[0] + max(heads[1], size)) * (size - 1) // size
        assert sent == {"ulysses": formula, "ulysses gradient": formula}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ring_sends_no_key_that_nobody_sees(size: int) -> None:
    """At most `2·n·d·b·H_kv·(P−1)`; a later rank needs only the earlier one of our two chunks."""
    length = 512
    formula = 2 * (length // size) * 8 * 8 * 2
    results = ranks.run(worst_errors, size, size, 1, "zigzag", (length,), (8, 2), None, False)
    for rank, (_, sent) in enumerate(results):
        earlier, later = rank, size - 1 - rank
        assert sent["ring"] == formula * earlier + formula // 2 * later
        assert sent["ring"] <= formula * (size - 1)
    assert sum(s["ring gradient"] for _, s in results) == sum(s["ring"] for _, s in results)


@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (2, 2), (1, 4)])
def test_whole_sequences_are_never_sent(ring: int, ulysses: int) -> None:
    for errors, sent in ranks.run(
        worst_errors, 4, ring, ulysses, "balanced", (64,) * 12, (8, 2), None, False
    ):
        assert not sent
        assert max(errors.values()) < 1e-12, errors
