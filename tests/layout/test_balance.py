"""`balanced`: level ranks, few cuts, round ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance import cost_ratio, packed_rows
from benchmarks.ring_blocks import packed_lengths
from seqbraid.layout import SequenceLayout
from seqbraid.layout.balance import SLACK, TOLERANCE, balance
from seqbraid.layout.placement import ROUND, Placement, _level, causal_cost, mirrored


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


def test_the_cost_of_a_share_is_that_of_its_pieces() -> None:
    lengths = [10240, 3000]
    placement = Placement(lengths, ring=3, ulysses=1, capacity=8192)
    placement.share(0, {0: 3584, 1: 3584, 2: 3072})
    extra = placement.load_R - [
        sum(causal_cost(stop) - causal_cost(start) for start, stop in pieces)
        for pieces in mirrored(10240, {0: 3584, 1: 3584, 2: 3072}).values()
    ]
    assert (extra > 0).all() and np.allclose(np.diff(extra / [3584, 3584, 3072]), 0, atol=100)
    assert placement.room_R.tolist() == [8192 - 3584, 8192 - 3584, 8192 - 3072]
