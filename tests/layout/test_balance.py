"""`balanced`: level ranks, few cuts, round ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance import cost_ratio, packed_rows
from benchmarks.ring_blocks import packed_lengths
from seqbraid.layout import SequenceLayout
from seqbraid.layout.balance import SLACK, TOLERANCE, _place, balance
from seqbraid.layout.placement import CUT_TOKEN, KEY, ROUND, Balance, Placement, _level, is_round, mirrored
from seqbraid.layout.trade import _stretches, trade


def test_heavy_tailed_rows_are_level_and_mostly_whole(capsys) -> None:  # type: ignore[no-untyped-def]
    rows = packed_rows(64, 65536, seed=1)
    balanced = [SequenceLayout(row, ring=8) for row in rows]
    ratios = [cost_ratio(layout) for layout in balanced]
    assert np.mean(ratios) <= 1.05
    assert max(ratios) <= 1.15
    tokens = sum(map(sum, rows))
    shares = {
        policy: sum(SequenceLayout(row, ring=8, policy=policy).num_split_tokens for row in rows) / tokens
        for policy in ("balanced", "zigzag")
    }
    with capsys.disabled():
        print(f"\ntokens in split sequences: {shares}")
    assert shares["balanced"] < 0.6 < shares["zigzag"]


@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (8, 1), (4, 2), (1, 4)])
def test_a_long_packed_row_is_cut_in_few_and_round_places(ring: int, ulysses: int) -> None:
    lengths = packed_lengths(131072)
    layout = SequenceLayout(lengths, ring, ulysses)
    assert cost_ratio(layout) < 1.15
    assert layout.num_local_tokens <= (1 + SLACK) * 131072 / layout.num_ranks + 1
    long_cuts = [
        piece
        for ring_rank in range(ring)
        for piece in layout.shared_pieces(ring_rank)
        if lengths[piece.sequence] > 8 * ROUND * ring and piece.stop - piece.start < lengths[piece.sequence]
    ]
    for sequence, start, stop in long_cuts:
        assert start % ROUND == 0
        assert stop % ROUND == 0 or stop == lengths[sequence]
    if ring > 1:
        assert any(len(layout.shared_pieces(r)) for r in range(ring))
        # Most ranks draw on one or two sequences, not on all that are cut.
        assert sum(len({p.sequence for p in layout.shared_pieces(r)}) for r in range(ring)) <= 2 * ring


lengths_strategy = st.lists(st.integers(1, 400), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(lengths_strategy, st.integers(1, 8), st.integers(1, 4))
def test_every_token_has_one_place(lengths: list[int], ring: int, ulysses: int) -> None:
    found = balance(lengths, ring, ulysses)
    whole = [i for items in found.whole for i in items]
    assert sorted([*whole, *found.shares]) == list(range(len(lengths)))
    for sequence, widths in found.shares.items():
        assert sum(widths.values()) == lengths[sequence] and min(widths.values()) > 0
        pieces = sorted(piece for part in mirrored(lengths[sequence], widths).values() for piece in part)
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
        assert pieces[-1][1] == lengths[sequence]
    if ring * ulysses > 1:
        shared = np.zeros(ring, dtype=int)
        for widths in found.shares.values():
            for ring_rank, width in widths.items():
                shared[ring_rank] += width
        assert np.array(found.slices).reshape(ring, ulysses).sum(1).tolist() == shared.tolist()
        tokens = [
            n + sum(lengths[i] for i in items) for n, items in zip(found.slices, found.whole, strict=True)
        ]
        assert max(tokens) <= max(TOLERANCE * sum(lengths) / len(tokens), -(-sum(lengths) // len(tokens)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 100))
def test_slices_level_a_group(tokens: list[int], shared: int) -> None:
    slices = _level(np.array(tokens), shared)
    assert slices.sum() == shared and slices.min() >= 0
    top = max(t + n for t, n in zip(tokens, slices, strict=True))
    assert top <= max(max(tokens), -(-(sum(tokens) + shared) // len(tokens))) or shared
    # Nobody with a slice stands higher than anybody else by more than one token.
    levels = np.array(tokens) + slices
    assert all(level <= levels.min() + 1 for level, n in zip(levels, slices, strict=True) if n)


def test_the_first_rank_has_the_outermost_pieces() -> None:
    assert mirrored(10240, {2: 4096, 0: 4096, 1: 2048}) == {
        2: [(0, 2048), (8192, 10240)],
        0: [(2048, 4096), (6144, 8192)],
        1: [(4096, 5120), (5120, 6144)],
    }
    assert mirrored(7, {1: 4, 0: 3}) == {1: [(0, 2), (5, 7)], 0: [(2, 3), (3, 5)]}


def test_no_crumb_is_left_and_nobody_is_left_alone() -> None:
    placement = Placement([5000], ring=3, ulysses=1, capacity=5000)
    placement.share(0, {0: 3276, 1: 1724})  # 3,072 of the one and 1,536 of the other would leave crumbs
    assert _offered(placement) == {
        (0, 1): [512, 1024, 1536, 2048],
        (0, 2): [512, 1024, 1536, 2048],
        (1, 0): [512, 1024],
        (1, 2): [512, 1024],
    }
    placement.share(0, placement.shares[0], times=-1)
    placement.share(0, {0: 4488, 1: 512})
    assert _offered(placement)[1, 2] == [512] and (1, 0) not in _offered(placement)


def _offered(placement: Placement) -> dict[tuple[int, int], list[int]]:
    pairs = ((source, target) for source in range(3) for target in range(3))
    offers = {pair: [stretch.tokens for stretch in _stretches(placement, *pair)] for pair in pairs}
    return {pair: tokens for pair, tokens in offers.items() if tokens}


def test_trading_gives_the_best_that_came_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [51, 512, 512, 535, 4340, 19427]
    placement = _place(lengths, [5, 4, 3, 2, 1, 0], 8, 1, share=0.95)
    seen = [placement]
    real_copy = Placement.copy

    def noted(self: Placement) -> Placement:
        seen.append(real_copy(self))
        return seen[-1]

    monkeypatch.setattr(Placement, "copy", noted)
    best = trade(placement)
    assert len({dearest(each) for each in seen}) > 2
    assert dearest(best) == min(map(dearest, seen))


@pytest.mark.parametrize("seed", [12, 14, 29])
def test_rows_are_level_by_estimate_and_cut_at_multiples(seed: int) -> None:
    lengths = packed_lengths(131072, seed)
    found = balance(lengths, 8, 1)
    load = taken_up(found, lengths, 8, 1).load_RU.ravel()
    assert load.max() < 1.03 * load.mean()
    long_cuts = [(lengths[i], widths) for i, widths in found.shares.items() if lengths[i] > 131072 // 8]
    assert all(is_round(*cut) for cut in long_cuts) and (long_cuts or seed == 12)


@pytest.mark.parametrize(
    "widths", [{0: 3584, 1: 3584, 2: 3072}, {2: 4096, 0: 3072, 1: 3072}, {1: 10000, 0: 240}]
)
def test_the_cost_of_a_share_is_that_of_its_pieces_and_keys(widths: dict[int, int]) -> None:
    placement = Placement([10240, 3000], ring=3, ulysses=1, capacity=10240)
    placement.share(0, widths)
    for ring_rank, pieces in mirrored(10240, widths).items():
        own = {position for start, stop in pieces for position in range(start, stop)}
        keys = sum(position not in own for position in range(pieces[-1][0]))
        expected = sum(position + 1 for position in own) + KEY * keys + CUT_TOKEN * len(own)
        assert placement.load_R[ring_rank] == expected + placement.piece_cost
        assert placement.room_R[ring_rank] == 10240 - len(own) == 10240 - widths[ring_rank]
    placement.share(0, widths, times=-1)
    assert not placement.shares and not placement.load_R.any() and not placement.shared_R.any()


def taken_up(balance: Balance, lengths: list[int], ring: int, ulysses: int) -> Placement:
    """A finished placement, made again from nothing."""
    placement = Placement(lengths, ring, ulysses, sum(lengths))
    for rank, items in enumerate(balance.whole):
        for sequence in items:
            placement.keep(sequence, rank)
    for sequence, widths in balance.shares.items():
        placement.share(sequence, widths)
    return placement


def dearest(placement: Placement) -> float:
    return float(placement.load_RU.max())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30_000), min_size=4, max_size=40),
    st.sampled_from([(2, 1), (3, 1), (8, 1), (2, 2), (3, 2)]),
)
def test_trades_lose_nothing_and_make_the_dearest_rank_cheaper(
    lengths: list[int], ranks: tuple[int, int]
) -> None:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    placement = _place(lengths, order, *ranks, share=0.95)
    before, were_round = dearest(placement), round_cuts(placement)
    placement = trade(placement)
    assert dearest(placement) <= before * (1 + 1e-12)
    assert (placement.room_R >= 0).all() and (placement.tokens_RU <= placement.capacity).all()
    again = taken_up(placement.finished(), lengths, *ranks)
    assert np.allclose(again.load_RU, placement.load_RU) and (again.shared_R == placement.shared_R).all()
    held = [i for items in placement.whole for i in items]
    assert sorted([*held, *placement.shares]) == list(range(len(lengths)))
    for sequence, widths in placement.shares.items():
        assert sum(widths.values()) == lengths[sequence] and min(widths.values()) > 0
        assert len(widths) > 1 or ranks[1] > 1
    assert round_cuts(placement) == were_round


def round_cuts(placement: Placement) -> set[int]:
    return {i for i, widths in placement.shares.items() if is_round(placement.lengths[i], widths)}


def test_ranks_that_are_full_of_short_sequences_take_a_stretch_of_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No rank of whole sequences alone can have as many pairs as those that share the long one.
    lengths = [20480, *[6000] * 8, *[800 + 37 * i for i in range(12)] * 4]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    with_stretches, without = (_place(lengths, order, 8, 1, share=0.95) for _ in range(2))
    holders = len(with_stretches.shares[0])
    with_stretches = trade(with_stretches)
    monkeypatch.setattr("seqbraid.layout.trade.STRETCHES", ())
    without = trade(without)
    assert len(without.shares[0]) == holders < len(with_stretches.shares[0])
    assert dearest(with_stretches) < 0.97 * dearest(without)
    assert is_round(20480, with_stretches.shares[0])
