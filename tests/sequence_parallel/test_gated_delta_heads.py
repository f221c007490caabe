"""The head all-to-all of gated-delta layers equals each sequence alone, in float64, for every
mesh and policy.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqbraid import Mesh, SequenceLayout
from seqbraid.comm import Group
from seqbraid.ops.conv import causal_conv
from seqbraid.ops.gated_delta import gated_delta_rule
from seqbraid.sequence_parallel.gated_delta_bytes import HeadSizes, heads_bytes
from seqbraid.sequence_parallel.gated_delta_heads import GatedDeltaHeads, HeadExchangePlan, mixing_by_heads
from seqbraid.sequence_parallel.gated_delta_layer import GatedDeltaLayer
from tests.helpers import ranks

FEW, MANY = HeadSizes(4, 8, 6, 5), HeadSizes(8, 8, 4, 6)
RAGGED = (1, 2, 63, 64, 65, 130, 257, 1)
POLICIES = ("zigzag", "balanced", "contiguous")
EXCHANGE = "gated delta heads"


class Case(NamedTuple):
    """One row on one mesh."""

    lengths: tuple[int, ...]
    policy: str
    sizes: HeadSizes
    bias: bool = True
    multiple_of: int = 1
    dtype: torch.dtype = torch.float64

    def layout(self, ring: int, ulysses: int) -> SequenceLayout:
        return SequenceLayout(self.lengths, ring, ulysses, self.policy, self.multiple_of)


class Inputs(NamedTuple):
    """Row-long inputs, parameters, and the weights of the outputs in the loss."""

    mixed: Tensor
    b: Tensor
    a: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    weight: Tensor

    @staticmethod
    def of(case: Case) -> Inputs:
        keys, values = case.sizes.num_key_heads, case.sizes.num_value_heads
        tokens = sum(case.lengths)
        channels = 2 * keys * case.sizes.key_dim + values * case.sizes.value_dim
        generator = torch.Generator().manual_seed(tokens)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(case.dtype)

        inputs = Inputs(
            random(tokens, channels),
            random(tokens, values),
            random(tokens, values),
            random(channels, 4),
            random(channels),
            random(values) - 2,
            random(values),
            random(tokens, values, case.sizes.value_dim),
        )
        return inputs if case.bias else inputs._replace(conv_bias=None)


def gradients(out: Tensor, weight: Tensor, wanted: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Those and the outputs, as arrays: tensors would travel between processes by shared memory."""
    found = (out, *torch.autograd.grad((out * weight).sum(), list(wanted.values())))
    names = ("out", *wanted)
    return {name: x.detach().to(torch.float64).numpy() for name, x in zip(names, found, strict=True)}


@cache
def alone(case: Case) -> dict[str, np.ndarray]:
    """The outputs and every gradient, each sequence run by itself in this process."""
    x = Inputs.of(case)
    wanted = {n: t.requires_grad_() for n, t in x._asdict().items() if n != "weight" and t is not None}
    keys, values, key_dim, _ = case.sizes
    outs = []
    for mixed, b, a in zip(*(t.split(case.lengths) for t in (x.mixed, x.b, x.a)), strict=True):
        cu = (0, len(mixed))
        convolved = causal_conv(mixed, x.conv_weight, x.conv_bias, cu, activation="silu")
        q, k, v = convolved.tensor_split([keys * key_dim, 2 * keys * key_dim], dim=1)
        q, k, v = q.unflatten(1, (keys, -1)), k.unflatten(1, (keys, -1)), v.unflatten(1, (values, -1))
        g = -x.A_log.exp() * F.softplus(a + x.dt_bias)
        outs.append(gated_delta_rule(q, k, v, g, b.sigmoid(), cu)[0])
    return gradients(torch.cat(outs), x.weight, wanted)


def on_rank(ring: int, ulysses: int, cases: list[Case]) -> list[tuple[dict[str, np.ndarray], dict[str, int]]]:
    """On one rank: outputs and gradients of its slots, of all parameters, and the bytes it sent."""
    mesh = Mesh(ring=ring, ulysses=ulysses)
    rank, handle = mesh.sequence_rank, mesh.process_group("sequence")
    results = []
    for case in cases:
        layout, group, x = case.layout(ring, ulysses), Group.of(handle), Inputs.of(case)
        x = x._replace(**{n: layout.shard(getattr(x, n), rank) for n in ("mixed", "b", "a", "weight")})
        wanted = {n: t.requires_grad_() for n, t in x._asdict().items() if n != "weight" and t is not None}
        layer = GatedDeltaLayer(x.conv_weight, x.conv_bias, "silu", x.A_log, x.dt_bias, *case.sizes)
        out = mixing_by_heads(x.mixed, x.b, x.a, layer, HeadExchangePlan.of(layout, rank), group)
        results.append((gradients(out, x.weight, wanted), dict(group.sent)))
    return results


def check(ring: int, ulysses: int, cases: list[Case]) -> list[list[dict[str, int]]]:
    """Hold the ranks against each sequence alone; per case what each rank sent."""
    by_rank = ranks.run(on_rank, ring * ulysses, ring, ulysses, cases)
    for case, *found in zip(cases, *by_rank, strict=True):
        layout, expected = case.layout(ring, ulysses), alone(case)
        for name, wanted in expected.items():
            parts = [torch.from_numpy(arrays[name]) for arrays, _ in found]
            if name in ("out", "mixed", "b", "a"):
                for rank, part in enumerate(parts):
                    assert (part[layout.index(rank) < 0] == 0).all(), f"{case}: {name} of padding"
                got = layout.unshard(parts).numpy()
            else:
                got = torch.stack(parts).sum(0).numpy()
            error, size = np.linalg.norm(got - wanted), np.linalg.norm(wanted)
            assert error <= 1e-9 * size, f"{case}: {name} is off by {error:.1e} of {size:.1e}"
    return [[sent for _, sent in found] for _, *found in zip(cases, *by_rank, strict=True)]


@pytest.mark.parametrize(
    ("ring", "ulysses"), [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (8, 1), (2, 4)]
)
def test_equals_each_sequence_alone(ring: int, ulysses: int) -> None:
    sizes = MANY if ring * ulysses == 8 else FEW
    cases = [Case(RAGGED, policy, sizes, multiple_of=16) for policy in POLICIES]
    # Fewer tokens than ranks: some ranks send nothing, and some hold nothing but padding.
    cases += [Case((3, 1), "contiguous", sizes, bias=False), Case((1,), "zigzag", sizes, bias=False)]
    check(ring, ulysses, cases)


def test_one_process_takes_the_same_path() -> None:
    assert check(1, 1, [Case(RAGGED, policy, FEW, multiple_of=16) for policy in POLICIES]) == [[{}]] * 3


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (2, 2)])
def test_sends_what_the_formula_says(ring: int, ulysses: int) -> None:
    size = ring * ulysses
    cases = [Case(RAGGED, policy, FEW) for policy in POLICIES]
    for case, sent in zip(cases, check(ring, ulysses, cases), strict=True):
        layout = case.layout(ring, ulysses)
        homes: list[set[int]] = [set() for _ in case.lengths]
        sequences = np.repeat(np.arange(len(case.lengths)), case.lengths)
        held = [sequences[index[index >= 0]] for index in map(layout.index, range(size))]
        for rank, found in enumerate(held):
            for sequence in found:
                homes[sequence].add(rank)
        own = [sum(len(homes[sequence]) > 1 for sequence in found) for found in held]
        # q and k of 4 heads of 6, v of 8 heads of 5, b and a; then the outputs.
        there, back = (2 * 4 * 6 + 8 * 5 + 2 * 8) // size * 8, 8 * 5 // size * 8
        for rank, n in enumerate(own):
            others = sum(own) - n
            forward = n * (size - 1) * there + others * back
            assert heads_bytes(layout, case.sizes, 8)[rank] == forward
            backward = n * (size - 1) * back + others * there
            assert sent[rank] == {EXCHANGE: forward, EXCHANGE + " gradient": backward}


def test_sequences_at_home_are_never_sent() -> None:
    assert check(2, 2, [Case((32,) * 12, "balanced", FEW)]) == [[{}] * 4]
    # A long sequence is split, the short ones beside it stay.
    case = Case((256, *(32,) * 8), "balanced", FEW)
    assert case.layout(2, 1).num_split_tokens == 256
    (sent,) = check(2, 1, [case])
    assert sum(rank[EXCHANGE] for rank in sent) == 256 * (2 * 4 * 6 + 2 * 8 * 5 + 2 * 8) // 2 * 8


def test_16_bit_activations_travel_as_they_are() -> None:
    case = Case((40, 9), "zigzag", FEW, dtype=torch.bfloat16)
    for rank, found in enumerate(ranks.run(on_rank, 2, 2, 1, [case])):
        sent = found[0][1]
        assert sent[EXCHANGE] == heads_bytes(case.layout(2, 1), FEW, 2)[rank]


def test_heads_that_do_not_divide_are_refused() -> None:
    for error in ranks.errors(on_rank, 4, 2, 2, [Case(RAGGED, "balanced", HeadSizes(2, 4, 6, 5))]):
        assert error.kind == "ValueError"
        assert "ring × ulysses = 4 does not divide 2 key heads (with 4 value heads)" in error.message
        assert 'use 1 or 2 ranks, or state passing (gated_delta="states")' in error.message


def test_value_heads_follow_their_key_heads() -> None:
    channels = torch.arange(2 * 4 + 8 * 2.0)  # 4 key heads of 1, 8 value heads of 2
    layer = GatedDeltaLayer(channels[:, None], channels, None, torch.arange(8), -torch.arange(8), 4, 8, 1, 2)
    own = GatedDeltaHeads(4, 8, 2).layer_of(layer, 1)
    assert own.conv_bias_C is not None
    assert own.conv_bias_C.tolist() == [2, 3, 6, 7, *range(16, 24)] == own.conv_weight_CW[:, 0].tolist()
    assert own.A_log_H.tolist() == [4, 5, 6, 7] and own.dt_bias_H.tolist() == [-4, -5, -6, -7]
    assert (own.num_key_heads, own.num_value_heads, own.widths) == (2, 4, [2, 2, 8])
    with pytest.raises(ValueError, match="3 key heads do not divide 4 value heads"):
        GatedDeltaHeads(3, 4, 1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    ring=st.integers(1, 4),
    ulysses=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
)
def test_the_plan_puts_tokens_in_sequence_order(
    lengths: list[int], ring: int, ulysses: int, policy: str
) -> None:
    layout = SequenceLayout(lengths, ring, ulysses, policy)
    plans = [HeadExchangePlan.of(layout, rank) for rank in range(layout.num_ranks)]
    index = [layout.index(rank) for rank in range(layout.num_ranks)]
    arrived = torch.cat([index[rank][plan.open_rows_n] for rank, plan in enumerate(plans)])
    rows = list(pairwise(layout.cu_seqlens))
    is_open = [layout.is_split(i) for i in range(len(lengths))]
    ordered = [t for (start, stop), o in zip(rows, is_open, strict=True) if o for t in range(start, stop)]
    for rank, plan in enumerate(plans):
        assert plan.is_exchanging == any(is_open)
        assert plan.open_tokens == tuple(len(p.open_rows_n) for p in plans)
        assert arrived[plan.sequence_order_N].tolist() == ordered
        assert torch.tensor(ordered)[plan.arrival_order_N].tolist() == arrived.tolist()
        assert np.diff(plan.open_cu).tolist() == [n for n, o in zip(lengths, is_open, strict=True) if o]
        slots = torch.cat([plan.open_rows_n, plan.home_rows]).sort().values
        assert slots.tolist() == (index[rank] >= 0).nonzero().flatten().tolist()
        at_home = index[rank][plan.home_rows].tolist()
        for begin, end in pairwise(plan.home_cu):
            whole = at_home[begin:end]
            assert (whole[0], whole[-1] + 1) in rows
            assert whole == list(range(whole[0], whole[-1] + 1))
