"""Gated-delta layers by state passing equal each sequence alone, token by token, in float64, on every mesh
and policy; and they send what the formula says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqbraid import Mesh, SequenceLayout
from seqbraid.comm import Group
from seqbraid.ops.reference import gated_delta_recurrent
from seqbraid.sequence_parallel.chain import ChainPlan
from seqbraid.sequence_parallel.context import StepContext
from seqbraid.sequence_parallel.gated_delta import gated_delta_mixing, rule_with_states
from seqbraid.sequence_parallel.gated_delta_bytes import HeadSizes, states_bytes
from seqbraid.sequence_parallel.gated_delta_layer import GatedDeltaLayer
from seqbraid.sequence_parallel.plans import RowPlans
from tests.helpers import ranks

POLICIES = ("contiguous", "zigzag", "balanced")
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (8, 1)]
KEY_HEADS, HEADS, K, V, W = 2, 4, 3, 5, 4
CHANNELS = 2 * KEY_HEADS * K + HEADS * V

ROWS: dict[str, tuple[int, ...]] = {
    # No edge is a multiple of 64; the long ones cross two ranks, several, or all.
    "ragged": (1, 2, 63, 65, 130, 1, 3, 290),
    # Pieces of one and two tokens: a halo of three reaches over several ranks.
    "short": (3, 1, 2, 5, 4, 9, 1),
    "a token a rank": (8,),
    # On four ranks the parts of the second, from outside in, are not in the order of the ranks.
    "out of rank order": (113, 103),
    "ranks without tokens": (5,),
}
DECAYS = ("none", "strong", "mixed")
TOKENS, PARAMETERS = ("mixed", "b", "a"), ("weight", "bias", "A_log", "dt_bias")
RULE = ("q", "k", "v", "g", "beta")


def layer_of(x: dict[str, Tensor]) -> GatedDeltaLayer:
    return GatedDeltaLayer(
        x["weight"], x["bias"], "silu", x["A_log"], x["dt_bias"], KEY_HEADS, HEADS, K, V
    )  # fmt: skip


def layer_inputs(num_tokens: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = {
        "mixed": (num_tokens, CHANNELS),
        "b": (num_tokens, HEADS),
        "a": (num_tokens, HEADS),
        "weight": (CHANNELS, W),
        "bias": (CHANNELS,),
        "A_log": (HEADS,),
        "dt_bias": (HEADS,),
        "dout": (num_tokens, HEADS, V),
    }
    x = {name: torch.randn(s, generator=rng, dtype=torch.float64) for name, s in shapes.items()}
    # Slow decay: a state that is forgotten within a few tokens would not show where it came from.
    return x | {"A_log": x["A_log"] - 3}


def rule_inputs(num_tokens: int, decay: str) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = {"q": (KEY_HEADS, K), "k": (KEY_HEADS, K), "v": (HEADS, V), "dout": (HEADS, V)}
    x = {n: torch.randn(num_tokens, *s, generator=rng, dtype=torch.float64) for n, s in shapes.items()}
    chance, beta = torch.rand(2, num_tokens, HEADS, generator=rng, dtype=torch.float64)
    g = {
        "none": torch.zeros_like(chance),
        "strong": torch.full_like(chance, -20.0),
        "mixed": torch.where(chance < 0.05, -20.0, -0.02 * chance),
    }[decay]
    return x | {"g": g, "beta": beta}


def plain_layer(x: dict[str, Tensor], lengths: Sequence[int]) -> Tensor:
    """The layer as it is defined, one sequence at a time."""
    outs = []
    for mixed, b, a in zip(*(x[name].split(list(lengths)) for name in TOKENS), strict=True):
        padded = F.pad(mixed.T[None], (W - 1, 0))
        convolved = F.silu(F.conv1d(padded, x["weight"][:, None], x["bias"], groups=CHANNELS))[0].T
        q, k, v = convolved.split([KEY_HEADS * K, KEY_HEADS * K, HEADS * V], dim=1)
        g = -x["A_log"].exp() * F.softplus(a + x["dt_bias"])
        out, _ = gated_delta_recurrent(
            q.view(-1, KEY_HEADS, K),
            k.view(-1, KEY_HEADS, K),
            v.view(-1, HEADS, V),
            g,
            b.sigmoid(),
            [0, len(q)],
            qk_l2norm=True,
        )
        outs.append(out)
    return torch.cat(outs)


def plain_rule(x: dict[str, Tensor], lengths: Sequence[int]) -> Tensor:
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return gated_delta_recurrent(*(x[name] for name in RULE), cu, qk_l2norm=True)[0]


def with_gradients(function: Any, x: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The outputs, and the gradient of every named input."""
    leaves = {name: x[name].detach().clone().requires_grad_() for name in names}
    out = function(x | leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), x["dout"])
    return {"out": out.detach()} | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The plain results of every row, made once by the test process and read by all ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[tuple[str, str], Any] = {}
    for row, lengths in ROWS.items():
        x = layer_inputs(sum(lengths))
        found[row, "layer"] = (
            x,
            with_gradients(lambda x, n=lengths: plain_layer(x, n), x, TOKENS + PARAMETERS),
        )
    for decay in DECAYS:
        lengths = ROWS["ragged"]
        x = rule_inputs(sum(lengths), decay)
        found["ragged", decay] = (x, with_gradients(lambda x, n=lengths: plain_rule(x, n), x, RULE))
    torch.set_num_threads(threads)
    path: Path = tmp_path_factory.mktemp("references") / "gated_delta.pt"
    torch.save(found, path)
    return str(path)


def told_bytes(layout: SequenceLayout, rank: int, itemsize: int, reverse: bool = False) -> int:
    """`H·d_k·(d_k·[not first] + d_v)·itemsize` per open segment and rank that holds a later one."""
    total = 0
    for sequence in range(len(layout.lengths)):
        chain = [s for r in range(layout.num_ranks) for s in layout.segments(r) if s.sequence == sequence]
        chain.sort(key=lambda s: s.start, reverse=reverse)
        for place, segment in enumerate(chain):
            others = {s.rank for s in chain[place + 1 :]} - {rank}
            if segment.rank == rank:
                total += HEADS * K * (K * (place > 0) + V) * itemsize * len(others)
    return total


def sent_by(group: Group) -> tuple[int, int]:
    return group.sent["gated delta states"], group.sent["gated delta states gradient"]


def on_this_rank(
    mesh: Mesh, policy: str, lengths: Sequence[int], kind: str, x: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Group, SequenceLayout]:
    """This rank's part of outputs and gradients; what stands in padding slots is not a number."""
    layout = SequenceLayout(lengths, mesh.ring, mesh.ulysses, policy)
    rank = mesh.sequence_rank
    group = Group.of(mesh.process_group("sequence"))
    own = {n: t if n in PARAMETERS else layout.shard(t, rank, fill=float("nan")) for n, t in x.items()}

    def layer(x: dict[str, Tensor]) -> Tensor:
        context = StepContext(RowPlans(layout, rank), sequence=group, gated_delta="states")
        return gated_delta_mixing(x["mixed"], x["b"], x["a"], layer_of(x), context)

    def rule(x: dict[str, Tensor]) -> Tensor:
        plan = ChainPlan.of(layout, rank)
        return plan.spread(rule_with_states(*(plan.compact(x[name]) for name in RULE), plan, group))

    if kind == "layer":
        return with_gradients(layer, own, TOKENS + PARAMETERS), group, layout
    return with_gradients(rule, own, RULE), group, layout


def compare(path: str, ring: int, ulysses: int) -> list[tuple[str, str, str, dict[str, float]]]:
    """On one rank: the error of each quantity of each case, relative to its size in the whole row."""
    mesh = Mesh(ring=ring, ulysses=ulysses)
    found = []
    for (row, kind), (x, expected) in torch.load(path).items():
        for policy in POLICIES:
            got, group, layout = on_this_rank(mesh, policy, ROWS[row], kind, x)
            padding = layout.index(mesh.sequence_rank) < 0
            errors = {}
            for name, wanted in expected.items():
                size = wanted.norm().item()
                if name[1:] in PARAMETERS:
                    got[name] = group.all_reduce(got[name])
                else:
                    assert (got[name][padding] == 0).all(), (row, kind, policy, name)
                    wanted = layout.shard(wanted, mesh.sequence_rank)
                errors[name] = (got[name] - wanted).norm().item() / size
            found.append((row, kind, policy, errors))
            told = [told_bytes(layout, mesh.sequence_rank, 8, reverse) for reverse in (False, True)]
            assert list(sent_by(group)) == told, (row, kind, policy)
            sizes = HeadSizes(KEY_HEADS, HEADS, K, V)
            assert states_bytes(layout, sizes, 8)[mesh.sequence_rank] == told[0]
    return found


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_equals_each_sequence_alone(references: str, ring: int, ulysses: int) -> None:
    results = ranks.run(compare, ring * ulysses, references, ring, ulysses)
    assert all(len(found) == len(POLICIES) * (len(ROWS) + len(DECAYS)) for found in results)
    for found in results:
        for row, kind, policy, errors in found:
            assert max(errors.values()) < 1e-9, (row, kind, policy, errors)


def sent(mesh: dict[str, int], policy: str, lengths: Sequence[int], dtype: torch.dtype) -> tuple[Any, bool]:
    """On one rank: the bytes of each exchange, and whether all outputs and gradients are finite."""
    x = {name: t.to(dtype) for name, t in layer_inputs(sum(lengths)).items()}
    got, group, _ = on_this_rank(Mesh(**mesh), policy, lengths, "layer", x)
    return dict(group.sent), all(bool(t.isfinite().all()) for t in got.values())


@pytest.mark.parametrize("length", [160, 320])
def test_contiguous_bytes_do_not_grow_with_the_length(length: int) -> None:
    """Rank r holds the r-th of P segments: it tells the ranks behind it, and hears their gradients."""
    for rank, (found, finite) in enumerate(
        ranks.run(sent, 4, {"ulysses": 4}, "contiguous", (length,), torch.float64)
    ):
        row = CHANNELS * 8 * (W - 1)
        expected = {
            "gated delta states": (3 - rank) * HEADS * K * (V + K * (rank > 0)) * 8,
            "gated delta states gradient": rank * HEADS * K * (V + K * (rank < 3)) * 8,
            "gated delta halo": row * (rank < 3),
            "gated delta halo gradient": row * (rank > 0),
        }
        assert found == expected and finite


@pytest.mark.parametrize("length", [160, 320])
def test_zigzag_bytes_do_not_grow_with_the_length(length: int) -> None:
    """Everybody needs rank r's early chunk, and the ranks before it its late one; rank P−1 has one in all."""
    for rank, (found, _) in enumerate(ranks.run(sent, 4, {"ring": 4}, "zigzag", (length,), torch.float64)):
        early, late = 3 * (V + K * (rank > 0)), rank * (V + K) * (rank < 3)
        assert found["gated delta states"] == HEADS * K * (early + late) * 8
        early, late = rank * (V + K) * (rank < 3), 3 * (V + K * (rank > 0))
        assert found["gated delta states gradient"] == HEADS * K * (early + late) * 8


def test_states_of_16_bit_activations_travel_in_float32() -> None:
    layout = SequenceLayout((160, 7), 1, 2, "contiguous")
    for rank, (found, finite) in enumerate(
        ranks.run(sent, 2, {"ulysses": 2}, "contiguous", (160, 7), torch.bfloat16)
    ):
        assert finite
        assert found["gated delta states"] == told_bytes(layout, rank, 4)
        assert found["gated delta states gradient"] == told_bytes(layout, rank, 4, reverse=True)


def test_nothing_is_sent_for_whole_sequences() -> None:
    for found, finite in ranks.run(sent, 4, {"ring": 2, "ulysses": 2}, "balanced", (32,) * 12, torch.float64):
        assert found == {} and finite
