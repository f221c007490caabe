"""Every media token gets its own feature row, on the rank that owns it, and gives it its gradient back."""

from __future__ import annotations

from itertools import pairwise, product
from time import monotonic, sleep
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqbraid import Mesh, SequenceLayout
from seqbraid.comm import Group
from seqbraid.sequence_parallel.media import (
    MediaItem,
    MediaPlan,
    assign_items,
    encoder_cost,
    spread_features,
)
from tests.helpers import ranks

POLICIES = ("contiguous", "zigzag", "balanced")
MESHES = {2: [(2, 1), (1, 2)], 4: [(4, 1), (2, 2), (1, 4)]}
D = 3


def item(sample: int, *tokens: tuple[int, int], cost: float = 1.0, kind: str = "image") -> MediaItem:
    return MediaItem(kind, sample, 0, tokens, cost)


class Row(NamedTuple):
    lengths: tuple[int, ...]
    items: tuple[MediaItem, ...]

    @property
    def num_features(self) -> int:
        return sum(it.num_features for it in self.items)

    def feature_of_token(self) -> list[int]:
        """For each token of the row its feature, counted over all items as they are listed, or −1."""
        found, feature = [-1] * sum(self.lengths), 0
        for it in self.items:
            for start, stop in it.tokens:
                for token in range(start, stop):
                    found[token] = feature
                    feature += 1
        return found

    def features_of(self, own: tuple[MediaItem, ...]) -> list[int]:
        """The same numbers, of the items that a rank encodes, in its order."""
        first, numbers = 0, {}
        for it in self.items:
            numbers[it] = range(first, first + it.num_features)
            first += it.num_features
        return [feature for it in own for feature in numbers[it]]


ROWS = {
    # The image covers three and more ranks; the others hold text alone or are whole.
    "one long image": Row((40, 5), (item(0, (2, 39)),)),
    "no media": Row((9, 30, 4), ()),
    # Listed by kind, not by place; a video in three runs, the last of one token; first and last tokens.
    "mixed": Row(
        (21, 3, 34, 12),
        (
            item(0, (0, 5), cost=2.0),
            item(2, (52, 58), cost=7.0),
            item(3, (60, 70), cost=1.0),
            item(2, (24, 33), (35, 44), (46, 47), cost=30.0, kind="video"),
            item(0, (6, 10), cost=3.0, kind="audio"),
        ),
    ),
    "media in the first sample only": Row((8, 8, 8, 8), (item(0, (1, 3), cost=2.0), item(0, (3, 7)))),
    "two tokens": Row((2,), (item(0, (1, 2)),)),
}


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Samples cut into text and runs of media; items of one to three runs; in any order."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    items, first = [], 0
    for sample, length in enumerate(lengths):
        cuts = sorted(draw(st.sets(st.integers(first, first + length), max_size=8)))
        runs = [run for run in pairwise(cuts) if draw(st.booleans())]
        runs = draw(st.permutations(runs))
        while runs:
            count = draw(st.integers(1, 3))
            cost = draw(st.sampled_from([0.0, 1.0, 4.0]) | st.floats(0, 100))
            items.append(MediaItem("video", sample, len(items), tuple(runs[:count]), cost))
            runs = runs[count:]
        first += length
    return Row(tuple(lengths), tuple(draw(st.permutations(items))))


@settings(max_examples=500, deadline=None)
@given(rows(), st.integers(1, 5), st.integers(1, 3), st.sampled_from(POLICIES))
def test_every_media_token_gets_its_feature(row: Row, ring: int, ulysses: int, policy: str) -> None:
    """All ranks in one process: what each sends is cut by `send`, what each gets is put in rank order."""
    layout = SequenceLayout(row.lengths, ring, ulysses, policy)
    plans = [MediaPlan.of(layout, row.items, rank) for rank in range(layout.num_ranks)]
    stacks = [torch.tensor(row.features_of(plan.own), dtype=torch.long) for plan in plans]
    parts = [stack[plan.rows.rows].split(plan.rows.send) for stack, plan in zip(stacks, plans, strict=True)]
    feature_of_token = torch.tensor(row.feature_of_token())
    encoders = assign_items([it.cost for it in row.items], layout.num_ranks)
    stays = True
    for rank, plan in enumerate(plans):
        mine = tuple(it for it, encoder in zip(row.items, encoders, strict=True) if encoder == rank)
        assert plan.own == mine
        assert plan.rows.receive == [other.rows.send[rank] for other in plans]
        arrived = torch.cat([part[rank] for part in parts])
        expected = layout.shard(feature_of_token, rank, fill=-1)
        assert torch.equal(torch.full_like(expected, -1).index_copy(0, plan.places, arrived), expected)
        assert torch.equal(plan.local_rows, (expected >= 0).nonzero().flatten())
        assert torch.equal(plan.places[plan.order], plan.local_rows)
        assert torch.equal(arrived[plan.order], expected[expected >= 0])
        stays &= set(arrived.tolist()) <= set(stacks[rank].tolist())
    assert [plan.rows.is_local for plan in plans] == [stays] * len(plans)


@pytest.mark.parametrize("mesh", MESHES[4])
def test_the_rows_are_what_they_are_called(mesh: tuple[int, int]) -> None:
    """Over 4 ranks: media split across three, ranks without media tokens, ranks without items."""
    plans = {}
    for (name, row), policy in product(ROWS.items(), POLICIES):
        layout = SequenceLayout(row.lengths, *mesh, policy)
        plans[name, policy] = [MediaPlan.of(layout, row.items, rank) for rank in range(4)]
    for policy in POLICIES:
        assert all(not plan.own and plan.rows.is_local for plan in plans["no media", policy])
        assert all(not plan.rows.is_local for plan in plans["mixed", policy])
        assert sum(not plan.own for plan in plans["one long image", policy]) == 3
        assert any(not len(plan.places) for plan in plans["two tokens", policy])
    assert sum(len(plan.places) > 0 for plan in plans["one long image", "contiguous"]) >= 3
    whole = plans["media in the first sample only", "balanced"]
    assert [len(plan.places) for plan in whole].count(0) == 3


def leaves(row: Row) -> dict[str, Tensor]:
    """Features of all items, embeddings of the tokens, weights of the loss, and an encoder's parameter."""
    rng = torch.Generator().manual_seed(0)
    shapes = {
        "features": (row.num_features, D),
        "embeddings": (sum(row.lengths), D),
        "weights": (sum(row.lengths), D),
        "scale": (D,),
    }
    return {name: torch.randn(s, generator=rng, dtype=torch.float64) for name, s in shapes.items()}


def gathered(row: Row) -> tuple[Tensor, dict[str, Tensor]]:
    """In one process, token by token: the embeddings with the features in, and the gradients."""
    x = {name: t.requires_grad_() for name, t in leaves(row).items()}
    features = x["features"] * x["scale"]
    tokens = enumerate(row.feature_of_token())
    out = torch.stack([features[f] if f >= 0 else x["embeddings"][token] for token, f in tokens])
    (x["weights"] * out * out).sum().backward()
    return out.detach(), {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in x.items()}


def spread_on_ranks(ring: int, ulysses: int) -> list[tuple[str, str, dict[str, float], dict[str, int]]]:
    """On one rank: the largest difference from one process of each quantity of each case, and the bytes."""
    mesh = Mesh(ring=ring, ulysses=ulysses)
    rank = mesh.sequence_rank
    found = []
    for (name, row), policy in product(ROWS.items(), POLICIES):
        layout = SequenceLayout(row.lengths, ring, ulysses, policy)
        group = Group.of(mesh.process_group("sequence"))
        plan = MediaPlan.of(layout, row.items, rank)
        own = row.features_of(plan.own)
        x = leaves(row)
        features, embeddings = x["features"][own].requires_grad_(), layout.shard(x["embeddings"], rank)
        scale = x["scale"].requires_grad_()
        media = spread_features(features * scale, plan, group)
        out = embeddings.requires_grad_().index_copy(0, plan.local_rows, media)
        (layout.shard(x["weights"], rank) * out * out).sum().backward()
        assert features.grad is not None and embeddings.grad is not None and scale.grad is not None

        reference, grads = gathered(row)
        pairs = {
            "out": (out, layout.shard(reference, rank)),
            "dfeatures": (features.grad, grads["features"][own]),
            "dembeddings": (embeddings.grad, layout.shard(grads["embeddings"], rank)),
            "dscale": (group.all_reduce(scale.grad), grads["scale"]),
        }
        errors = {key: (got - wanted).abs().amax().item() if got.numel() else 0.0
                  for key, (got, wanted) in pairs.items()}  # fmt: skip
        found.append((name, policy, errors, dict(group.sent)))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [*MESHES[2], *MESHES[4]])
def test_equals_a_gather_in_one_process(ring: int, ulysses: int) -> None:
    """Rows are moved, never summed: only the sum over a parameter's uses is rounded."""
    results = ranks.run(spread_on_ranks, ring * ulysses, ring, ulysses)
    for found in results:
        assert len(found) == len(ROWS) * len(POLICIES)
        for name, policy, errors, _ in found:
            assert errors.pop("dscale") < 1e-12, (name, policy)
            assert set(errors.values()) == {0.0}, (name, policy, errors)
    for case, (name, policy) in enumerate(product(ROWS, POLICIES)):
        row = ROWS[name]
        layout = SequenceLayout(row.lengths, ring, ulysses, policy)
        plans = [MediaPlan.of(layout, row.items, rank) for rank in range(layout.num_ranks)]
        for rank, plan in enumerate(plans):
            sent = sum(plan.rows.send) - plan.rows.send[rank]
            heard = sum(plan.rows.receive) - plan.rows.receive[rank]
            # Where no feature changes ranks there is no collective at all, and no entry.
            moved = {"media features": sent * D * 8, "media features gradient": heard * D * 8}
            assert results[rank][case][3] == ({} if plan.rows.is_local else moved), (name, policy)


def spread_frozen() -> tuple[bool, dict[str, int]]:
    """On one rank: whether the features of a frozen encoder have a way back, and the bytes."""
    mesh = Mesh(ring=2)
    row, group = ROWS["mixed"], Group.of(mesh.process_group("sequence"))
    plan = MediaPlan.of(SequenceLayout(row.lengths, 2, 1, "zigzag"), row.items, mesh.sequence_rank)
    media = spread_features(torch.ones(len(row.features_of(plan.own)), D), plan, group, "frozen")
    return media.requires_grad, dict(group.sent)


def test_features_of_a_frozen_encoder_have_no_way_back() -> None:
    for needs_gradient, sent in ranks.run(spread_frozen, 2):
        assert not needs_gradient and set(sent) == {"frozen"}


class Held(TorchDispatchMode):
    """The numbers held at once by the tensors that are made under it, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[ref[Tensor]] = []
        self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, list | tuple) else (out,)
        self.made += [ref(x) for x in found if isinstance(x, Tensor) and x.is_floating_point()]
        self.most = max(self.most, self.held())
        self.largest = max(self.largest, *self.sizes().values(), 0)
        return out

    def sizes(self) -> dict[int, int]:
        """Views share their storage: counted once, for as long as one of them lives."""
        living = [x for x in (made() for made in self.made) if x is not None]
        return {x.data_ptr(): x.untyped_storage().nbytes() // x.element_size() for x in living}

    def held(self) -> int:
        return sum(self.sizes().values())


WIDE = 64


def memory(row: Row, policy: str) -> dict[str, int]:
    """On one rank, in feature rows: what is given and wanted, and what is held by whom at most."""
    mesh = Mesh(ring=2, ulysses=2)
    plan = MediaPlan.of(SequenceLayout(row.lengths, 2, 2, policy), row.items, mesh.sequence_rank)
    features = torch.ones(len(row.features_of(plan.own)), WIDE, requires_grad=True)
    with Held() as forward:
        media = spread_features(features, plan, Group.of(mesh.process_group("sequence")))
    gradient, end = torch.ones_like(media), monotonic() + 5
    # The thread of a gloo collective lets go of its buffers a little later than the collective returns.
    while (kept := forward.held()) > media.numel() and monotonic() < end:
        sleep(0.001)
    with Held() as backward:
        media.backward(gradient)
    found = {
        "largest": max(forward.largest, backward.largest),
        "forward": forward.most,
        "kept": kept,
        "backward": backward.most,
    }
    return {name: n // WIDE for name, n in found.items()} | {"own": len(features), "local": len(media)}


@pytest.mark.parametrize("policy", POLICIES)
def test_no_rank_holds_more_than_its_items_and_its_tokens(policy: str) -> None:
    """Nine tokens of ten are media; what the exchange holds beside them is a copy in flight."""
    runs = [run for t in range(0, 1600, 200) for run in ((t + 5, t + 155), (t + 160, t + 190))]
    row = Row((400,) * 4, tuple(item(run[0] // 400, run, cost=1.0 + i * i % 7) for i, run in enumerate(runs)))
    assert row.num_features == 0.9 * sum(row.lengths)
    results = ranks.run(memory, 4, row, policy)
    assert any(found["own"] != found["local"] for found in results)
    for found in results:
        own, local = found["own"], found["local"]
        assert own + local < 0.75 * row.num_features, "holding all features would not show"
        assert found["largest"] <= max(own, local), "features that are neither ours nor our tokens'"
        assert found["kept"] == local, "the result is all that is left of the exchange"
        # Features as they leave, as they arrive, and in order.
        assert found["forward"] <= own + 2 * local < row.num_features
        # Gradients as they leave, as they arrive, and of the features.
        assert found["backward"] <= local + 2 * own


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 3))
def test_items_are_level(costs: list[int], num_ranks: int) -> None:
    """Within 4/3 − 1/(3P) of the best of all assignments, the bound of longest processing time first."""
    assigned = assign_items(costs, num_ranks)
    assert len(assigned) == len(costs) and set(assigned) <= set(range(num_ranks))
    assert assigned == assign_items(costs, num_ranks)

    def dearest(choice: Any) -> int:
        return max(
            sum(c for c, r in zip(costs, choice, strict=True) if r == rank) for rank in range(num_ranks)
        )

    best = min(dearest(choice) for choice in product(range(num_ranks), repeat=len(costs)))
    assert 3 * num_ranks * dearest(assigned) <= (4 * num_ranks - 1) * best


def test_ties_go_to_the_first_item_and_the_lowest_rank() -> None:
    assert assign_items([1.0] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]
    assert assign_items([2.0, 5.0, 2.0, 5.0], 3) == [2, 0, 2, 1]
    assert assign_items([], 2) == []


@pytest.mark.parametrize(
    ("costs", "num_ranks", "message"),
    [
        ([1.0, -2.0], 2, "item 1 has cost -2"),
        ([float("nan")], 2, "item 0 has cost nan"),
        ([1.0, float("inf")], 2, "item 1 has cost inf"),
        ([1.0], 0, "num_ranks=0"),
    ],
)
def test_assign_items_refuses(costs: list[float], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_items(costs, num_ranks)


def test_encoder_cost_counts_the_products_of_a_layer() -> None:
    """Two frames of four patches and one of three, each a window of its own."""
    width, mlp, windows = 5, 7, [4, 4, 3]
    patch = [torch.ones(n, width) for n in windows]
    products = [(x, torch.ones(width, width)) for x in patch for _ in ("q", "k", "v", "out")]
    products += [(x @ x.T, x) for x in patch] + [(x, x.T) for x in patch]
    products += [(x, torch.ones(width, mlp)) for x in patch] + [
        (torch.ones(len(x), mlp), torch.ones(mlp, width)) for x in patch
    ]
    assert encoder_cost(windows, width, mlp) == sum(a.numel() * b.shape[1] for a, b in products)
    assert encoder_cost(windows, width) == encoder_cost(windows, width, 4 * width)
    assert encoder_cost([12], width) > encoder_cost([4, 4, 4], width)
    assert encoder_cost([], width) == 0


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([item(2, (9, 10))], "image 0 of sample 2 belongs to no sample of the row; its samples are 0 to 1"),
        ([item(-1, (0, 2))], "image 0 of sample -1"),
        ([item(0, (3, 6))], r"image 0 of sample 0 has tokens \[3, 6\) of the row; its sample is \[0, 5\)"),
        ([item(1, (0, 2), kind="audio")], r"audio 0 of sample 1 has tokens \[0, 2\).*its sample is \[5, 9\)"),
        ([item(0, (0, 2), (2, 2))], r"tokens \[2, 2\) of the row.*at least one token"),
        ([item(0, (1, 4)), item(0, (3, 5), kind="video")], "token 3 .* by image 0 .* and by video 0"),
    ],
)  # fmt: skip
def test_plans_refuse_tokens_that_are_not_the_items_own(items: list[MediaItem], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MediaPlan.of(SequenceLayout([5, 4], 2), items, 0)


def test_a_plan_moves_with_all_its_indices() -> None:
    row = ROWS["mixed"]
    plan = MediaPlan.of(SequenceLayout(row.lengths, 2), row.items, 1)
    moved = plan.to("meta")
    for got, wanted in zip(
        *([p.rows.rows, p.places, p.order, p.local_rows] for p in (moved, plan)), strict=True
    ):
        assert got.is_meta and got.shape == wanted.shape and not wanted.is_meta
    assert moved.own == plan.own and moved.rows.send == plan.rows.send


def test_a_wrong_number_of_features_is_not_sent() -> None:
    plan = MediaPlan.of(SequenceLayout([5, 4]), [item(0, (1, 4))], 0)
    with pytest.raises(AssertionError, match="4 features for 3 own tokens"):
        spread_features(torch.zeros(4, D), plan, Group())
