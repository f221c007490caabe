"""Media of a row over the ranks that share it: who encodes which item, and how features reach their tokens.

An item (an image, a video, a clip) is encoded whole, by one rank; its tokens may live on several others. All
is pure arithmetic from the layout and the items, the same knowledge on every rank. Letters: R feature rows
that a rank encodes, M media tokens that it owns, D channels; N runs of placeholder tokens, S segments of all
ranks, J pieces: the tokens of one run on one segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..comm.group import Group
from ..comm.rows import RowPlan, exchange_rows
from ..layout import SequenceLayout

Ints = NDArray[np.int64]


class MediaItem(NamedTuple):
    """An image, a video or a clip of a row, and the tokens that its features replace."""

    kind: str
    """`image`, `video` or `audio`."""
    sample: int
    """Its sequence of the row."""
    index: int  # type: ignore[assignment]  # hides the tuple's search, which nobody needs here
    """Its place among the items of its kind in its sample."""
    tokens: tuple[tuple[int, int], ...]
    """Runs `[start, stop)` of its placeholder tokens in the row, in the order of its features; several for a
    video whose frames are parted by timestamps.
    """
    cost: float
    """What encoding it costs, in any unit that all items of the row share."""
    rank: int | None = None
    """Who encodes it, where that is known already, of all items of the row or of none."""

    @property
    def num_features(self) -> int:
        """Feature rows of the item, one per placeholder token."""
        return sum(stop - start for start, stop in self.tokens)


def encoder_cost(patches_per_window: Sequence[int], width: int, intermediate: int | None = None) -> float:
    """Multiply-adds of one encoder layer on one item; `intermediate` is the width of its MLP, 4 · width.

    A patch sees the patches of its own attention window: an image is one window, and so is every frame of a
    video. With n patches in all, the four projections of attention cost 4 · width² · n and the two of the MLP
    2 · width · intermediate · n, together 12 · width² · n; scores and their product with the values cost
    width · w² each in a window of w patches, 2 · width · Σ w² in all.

    >>> encoder_cost([16, 16], width=8) == 12 * 8**2 * 32 + 2 * 8 * (16**2 + 16**2)
    True
    """
    mlp = 4 * width if intermediate is None else intermediate
    per_patch = 4 * width**2 + 2 * width * mlp
    return float(per_patch * sum(patches_per_window) + 2 * width * sum(n * n for n in patches_per_window))


def assign_items(costs: Sequence[float], num_ranks: int) -> list[int]:
    """The rank that encodes each item: the most expensive item first, to the rank with the least work so far.

    Among equal items the first goes first, among equal ranks the lowest takes it, so that every rank finds
    the same. The most expensive rank costs at most 4/3 of that of the best assignment.

    >>> assign_items([3.0, 9.0, 5.0, 2.0], num_ranks=2)
    [1, 0, 1, 1]
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be at least 1")
    for item, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"item {item} has cost {cost}; costs are finite and not negative")
    loads = [(0.0, rank) for rank in range(num_ranks)]
    heapify(loads)
    ranks = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, ranks[item] = loads[0]
        heapreplace(loads, (load + costs[item], ranks[item]))
    return ranks


@dataclass(frozen=True)
class MediaPlan:
    """This rank's part in encoding the media of a row, made once per step and shared by all exchanges."""

    own: tuple[MediaItem, ...]
    """The items that this rank encodes. It stacks their features in this order."""
    rows: RowPlan
    """Which of its own feature rows go to which rank: each to the one that owns its token."""
    places: Tensor
    """The local slots of the feature rows that arrive, in the order they arrive."""
    order: Tensor
    """The arriving rows in the order of their slots: what follows the mask of media tokens, as DeepStack
    does, takes them so.
    """
    local_rows: Tensor
    """The local slots that hold media tokens, ascending: `places[order]`."""

    @staticmethod
    def of(
        layout: SequenceLayout,
        items: Sequence[MediaItem],
        rank: int,
        device: torch.device | None = None,
        tp: int = 1,
    ) -> MediaPlan:
        """The plan of a rank, with its indices on a device; the items are those of the whole row. With `tp`
        ranks to each rank of the layout, neighbours in `rank` share its slots in equal pieces.

        >>> layout = SequenceLayout([6], ring=2, policy="contiguous")
        >>> plan = MediaPlan.of(layout, [MediaItem("image", 0, 0, ((1, 5),), cost=1.0)], rank=1)
        >>> plan.own, plan.rows.receive, plan.local_rows.tolist()
        ((), [2, 0], [0, 1])
        """
        num_ranks = layout.num_ranks * tp
        encoder_of_item = _encoders(items, num_ranks)
        pieces = _Pieces.of(layout, items, encoder_of_item, tp)
        # Both sides keep the pieces of a pair of ranks in the same order, so that what is sent is what is
        # expected.
        leaving = pieces.only(pieces.encoder_J == rank).sorted_by("owner_J")
        arriving = pieces.only(pieces.owner_J == rank).sorted_by("encoder_J")
        places = _ranges(arriving.slot_J, arriving.count_J)
        order = np.argsort(places, kind="stable")

        def index(x: Ints) -> Tensor:
            return torch.from_numpy(x).to(device)

        def counts(rank_J: Ints, count_J: Ints) -> list[int]:
            totals = np.zeros(num_ranks, np.int64)
            np.add.at(totals, rank_J, count_J)
            return [int(total) for total in totals]

        return MediaPlan(
            own=tuple(item for item, encoder in zip(items, encoder_of_item, strict=True) if encoder == rank),
            rows=RowPlan(
                rows=index(_ranges(leaving.feature_J, leaving.count_J)),
                send=counts(leaving.owner_J, leaving.count_J),
                receive=counts(arriving.encoder_J, arriving.count_J),
                is_local=bool((pieces.encoder_J == pieces.owner_J).all()),
            ),
            places=index(places),
            order=index(order),
            local_rows=index(places[order]),
        )

    def to(self, device: torch.device | str) -> MediaPlan:
        """The plan with its indices on another device."""
        return replace(
            self,
            rows=replace(self.rows, rows=self.rows.rows.to(device)),
            places=self.places.to(device),
            order=self.order.to(device),
            local_rows=self.local_rows.to(device),
        )


def _encoders(items: Sequence[MediaItem], num_ranks: int) -> list[int]:
    """The rank that encodes each item."""
    known = [item.rank for item in items if item.rank is not None]
    if not known:
        return assign_items([item.cost for item in items], num_ranks)
    if len(known) < len(items):
        item = next(item for item in items if item.rank is None)
        raise ValueError(f"{_named(item)} has no rank that encodes it, but other items of the row have")
    wrong = next((item for item in items if item.rank not in range(num_ranks)), None)
    if wrong is not None:
        raise ValueError(f"{_named(wrong)} is to be encoded by rank {wrong.rank}, but there are {num_ranks}")
    return known


def spread_features(
    features_RD: Tensor, plan: MediaPlan, group: Group, name: str = "media features"
) -> Tensor:
    """The features of this rank's media tokens `[M, D]`, in the order of their slots; differentiable.

    Every rank of the group takes part, forward and backward: one without items gives `[0, D]` features that
    need a gradient where those of the others do, and one without media tokens puts the `[0, D]` it gets into
    its embeddings all the same. Features that need no gradient, of a frozen encoder, have no way back. What
    belongs to the same tokens, such as DeepStack levels, rides along in D.
    """
    num_features = len(plan.rows.rows)
    assert len(features_RD) == num_features, f"{len(features_RD)} features for {num_features} own tokens"
    assert len(plan.rows.send) == group.size, f"a plan for {len(plan.rows.send)} ranks, {group.size} here"
    arrived_MD = exchange_rows(features_RD, plan.rows, group, name)
    return arrived_MD.index_select(0, plan.order.to(arrived_MD.device))


class _Pieces(NamedTuple):
    """The media tokens of the row, cut where a run or a segment ends; item after item, in feature order."""

    encoder_J: Ints
    """The rank that encodes them."""
    owner_J: Ints
    """The rank that holds them."""
    feature_J: Ints
    """The first one's row in the features of its encoder."""
    slot_J: Ints
    """The first one's slot on its owner."""
    count_J: Ints

    @staticmethod
    def of(
        layout: SequenceLayout, items: Sequence[MediaItem], encoder_of_item: Sequence[int], tp: int
    ) -> _Pieces:
        """Of all ranks; cost goes with runs and segments, not with tokens."""
        item_N, start_N, stop_N = _runs(layout, items)
        length_N = stop_N - start_N
        encoder_N = np.asarray(encoder_of_item, np.int64)[item_N]

        # A rank's features are stacked item after item, run after run.
        stacked = np.argsort(encoder_N, kind="stable")
        ahead = np.cumsum(length_N[stacked]) - length_N[stacked]
        first = np.searchsorted(encoder_N[stacked], encoder_N[stacked])
        feature_N = np.empty_like(length_N)
        feature_N[stacked] = ahead - ahead[first]

        owner_S, begin_S, end_S, slot_S = _segments(layout, tp)
        first_N = np.searchsorted(begin_S, start_N, side="right") - 1
        pieces_N = np.searchsorted(begin_S, stop_N) - first_N
        run_J = np.repeat(np.arange(len(item_N)), pieces_N)
        segment_J = _ranges(first_N, pieces_N)
        start_J = np.maximum(start_N[run_J], begin_S[segment_J])
        return _Pieces(
            encoder_J=encoder_N[run_J],
            owner_J=owner_S[segment_J],
            feature_J=feature_N[run_J] + start_J - start_N[run_J],
            slot_J=slot_S[segment_J] + start_J - begin_S[segment_J],
            count_J=np.minimum(stop_N[run_J], end_S[segment_J]) - start_J,
        )

    def only(self, chosen_J: NDArray[np.bool_]) -> _Pieces:
        """Some of the pieces, in the order they have."""
        return _Pieces(*(x_J[chosen_J] for x_J in self))

    def sorted_by(self, field: str) -> _Pieces:
        """The pieces rank after rank; those of one rank keep their order."""
        by_rank: Ints = np.argsort(getattr(self, field), kind="stable")
        return _Pieces(*(x_J[by_rank] for x_J in self))


def _segments(layout: SequenceLayout, tp: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Rank, first token of the row, token behind the last, and local slot of all segments, in row order; cut
    where the slots of one of the `tp` ranks end.
    """
    segments = np.concatenate(
        [np.array(layout.segments(rank), np.int64).reshape(-1, 5) for rank in range(layout.num_ranks)]
    )
    sequence, start, stop, rank, slot = segments.T
    size = layout.num_local_tokens // tp
    first_piece = slot // size
    pieces = (slot + stop - start - 1) // size - first_piece + 1
    of_segment = np.repeat(np.arange(len(slot)), pieces)
    piece = _ranges(first_piece, pieces)
    begin = np.maximum(slot[of_segment], piece * size)
    end = np.minimum((slot + stop - start)[of_segment], (piece + 1) * size)
    # From slots to tokens of the row.
    ahead = (np.array(layout.cu_seqlens, np.int64)[sequence] + start - slot)[of_segment]
    by_token = np.argsort(ahead + begin)
    columns = rank[of_segment] * tp + piece, ahead + begin, ahead + end, begin - piece * size
    owner, first, behind, own_slot = (column[by_token] for column in columns)
    return owner, first, behind, own_slot


def _runs(layout: SequenceLayout, items: Sequence[MediaItem]) -> tuple[Ints, Ints, Ints]:
    """Item, start and stop of all runs, which lie in their samples and do not overlap."""
    table = [(number, start, stop) for number, item in enumerate(items) for start, stop in item.tokens]
    item_N, start_N, stop_N = np.array(table, np.int64).reshape(-1, 3).T
    for item in items:
        if not 0 <= item.sample < len(layout.lengths):
            raise ValueError(
                f"{_named(item)} belongs to no sample of the row; its samples are 0 to "
                f"{len(layout.lengths) - 1}"
            )
    cu = np.array(layout.cu_seqlens, np.int64)
    sample_N = np.array([item.sample for item in items], np.int64)[item_N]
    wrong_N = (start_N >= stop_N) | (start_N < cu[sample_N]) | (stop_N > cu[sample_N + 1])
    if wrong_N.any():
        run = int(wrong_N.argmax())
        sample = int(sample_N[run])
        raise ValueError(
            f"{_named(items[item_N[run]])} has tokens [{start_N[run]}, {stop_N[run]}) of the row; its sample "
            f"is [{cu[sample]}, {cu[sample + 1]}), and a run has at least one token of it"
        )
    by_start = np.argsort(start_N)
    twice = np.flatnonzero(start_N[by_start][1:] < stop_N[by_start][:-1])
    if len(twice):
        before, after = by_start[twice[0] : twice[0] + 2]
        raise ValueError(
            f"token {start_N[after]} of the row is claimed by {_named(items[item_N[before]])} and by "
            f"{_named(items[item_N[after]])}; a token takes one feature"
        )
    return item_N, start_N, stop_N


def _named(item: MediaItem) -> str:
    return f"{item.kind} {item.index} of sample {item.sample}"


def _ranges(first: Ints, count: Ints) -> Ints:
    """`first[i], first[i] + 1, …`, `count[i]` of them, one range after the other."""
    behind = np.cumsum(count)
    return np.repeat(first - behind + count, count) + np.arange(behind[-1] if len(behind) else 0)
