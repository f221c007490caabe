"""The layout's promises, over whatever rows hypothesis comes up with."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.layout import PADDING, SequenceLayout

MANY = settings(max_examples=200, deadline=None)

lengths = st.lists(st.one_of(st.integers(1, 4), st.integers(1, 300)), min_size=1, max_size=24)
layouts = st.builds(
    SequenceLayout,
    lengths,
    ring=st.sampled_from([1, 2, 3, 4, 8]),
    ulysses=st.sampled_from([1, 2, 3, 4]),
    policy=st.sampled_from(["contiguous", "zigzag", "balanced"]),
    multiple_of=st.sampled_from([1, 2, 16]),
)


@MANY
@given(layouts)
def test_every_token_lives_in_exactly_one_slot(layout: SequenceLayout) -> None:
    slots = torch.cat([layout.index(rank) for rank in range(layout.num_ranks)])
    tokens = slots[slots != PADDING]
    assert tokens.sort().values.tolist() == list(range(sum(layout.lengths)))


@MANY
@given(layouts, st.data())
def test_unshard_undoes_shard_for_any_dim_and_fill(layout: SequenceLayout, data: st.DataObject) -> None:
    dim = data.draw(st.integers(-3, 2))
    shape = [2, 3, 2]
    shape[dim] = layout.num_tokens
    x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    fill = data.draw(st.integers(-100, 100))
    parts = [layout.shard(x, rank, dim, fill) for rank in range(layout.num_ranks)]
    assert torch.equal(layout.unshard(parts, dim), x)
    for rank, part in enumerate(parts):
        padding = part.movedim(dim, 0)[layout.index(rank) == PADDING]
        assert (padding == fill).all()


def zigzag_oracle(lengths: list[int], ring: int, ring_rank: int) -> list[int]:
    """The chunk rule, token by token: what a ring rank holds, in order, −1 for padding."""
    held: list[int] = []
    begin = 0
    for length in lengths:
        slots = [begin + t for t in range(length)]
        while len(slots) % (2 * ring):
            slots.append(PADDING)
        size = len(slots) // (2 * ring)
        chunks = [slots[c * size : (c + 1) * size] for c in range(2 * ring)]
        held += chunks[ring_rank] + chunks[-1 - ring_rank]
        begin += length
    return held


@MANY
@given(lengths, st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 2, 4]))
def test_zigzag_equals_the_chunk_rule(lengths: list[int], ring: int, ulysses: int) -> None:
    layout = SequenceLayout(lengths, ring, ulysses, "zigzag")
    for ring_rank in range(ring):
        held = torch.cat([layout.index(ring_rank * ulysses + u) for u in range(ulysses)]).tolist()
        expected = zigzag_oracle(lengths, ring, ring_rank)
        assert held[: len(expected)] == expected
        assert set(held[len(expected) :]) <= {PADDING}


@MANY
@given(layouts, st.sampled_from([1, 2, 16]))
def test_ranks_hold_equally_many_slots(layout: SequenceLayout, multiple_of: int) -> None:
    again = SequenceLayout(layout.lengths, layout.ring, layout.ulysses, layout.policy, multiple_of)
    assert {len(again.index(rank)) for rank in range(again.num_ranks)} == {again.num_local_tokens}
    assert again.num_local_tokens % multiple_of == 0
    if layout.policy == "zigzag":  # Ulysses over a wholly shared list needs equal slices of it
        assert len({again.num_shared_tokens(rank) for rank in range(again.num_ranks)}) == 1


@MANY
@given(layouts)
def test_boundaries_and_segments_agree(layout: SequenceLayout) -> None:
    assert layout.cu_seqlens == tuple(sum(layout.lengths[:i]) for i in range(len(layout.lengths) + 1))
    assert layout.cu_seqlens_padded == tuple(
        sum(layout.padded_lengths[:i]) for i in range(len(layout.lengths) + 1)
    )
    assert all(p >= n for p, n in zip(layout.padded_lengths, layout.lengths, strict=True))
    assert layout.max_seqlen == max(layout.lengths)
    runs: dict[int, list[tuple[int, int]]] = {}
    for rank in range(layout.num_ranks):
        index = torch.full((layout.num_local_tokens,), PADDING)
        end = 0
        for segment in layout.segments(rank):
            assert segment.rank == rank and segment.offset >= end and segment.start < segment.stop
            end = segment.offset + segment.num_tokens
            begin = layout.cu_seqlens[segment.sequence] + segment.start
            index[segment.offset : end] = torch.arange(begin, begin + segment.num_tokens)
            runs.setdefault(segment.sequence, []).append((segment.start, segment.stop))
        assert torch.equal(index, layout.index(rank))
    for sequence, found in runs.items():
        covered = sorted(found)
        assert covered[0][0] == 0 and covered[-1][1] == layout.lengths[sequence]
        assert all(a[1] == b[0] for a, b in pairwise(covered))


@MANY
@given(lengths, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_attention_cost_is_the_number_of_pairs(lengths: list[int], ring: int, ulysses: int) -> None:
    for policy in ("contiguous", "zigzag", "balanced"):
        layout = SequenceLayout(lengths, ring, ulysses, policy)
        total = sum(layout.attention_cost(rank) for rank in range(layout.num_ranks))
        assert total == pytest.approx(sum(n * (n + 1) / 2 for n in lengths))


@MANY
@given(lengths, st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]))
def test_balanced_pads_no_more_than_rounding_or_one_percent(
    lengths: list[int], ring: int, ulysses: int
) -> None:
    layout = SequenceLayout(lengths, ring, ulysses)
    mean = sum(lengths) / layout.num_ranks
    assert layout.num_local_tokens <= max(mean + 1, 1.01 * mean)
    assert layout.padded_lengths == layout.lengths


def test_one_rank_holds_the_row() -> None:
    for policy in ("contiguous", "zigzag", "balanced"):
        layout = SequenceLayout([3, 1, 5], policy=policy)
        rows = [[4, 5, 6, 7, 8], [0, 1, 2], [3]] if policy == "balanced" else [list(range(9))]
        assert layout.index(0).tolist() == [
            token for row in rows for token in row
        ]  # balanced: long ones first
        assert not any(layout.is_split(i) for i in range(3))


def test_many_short_sequences_are_never_cut() -> None:
    layout = SequenceLayout([64] * 160, ring=8)
    assert layout.num_split_tokens == 0
    assert layout.num_local_tokens == 160 * 64 // 8


def test_fp8_rounds_only_when_asked() -> None:
    assert SequenceLayout([5]).num_local_tokens == 5
    assert SequenceLayout([5], fp8=True).num_local_tokens == 16
    assert SequenceLayout([5], fp8=True, multiple_of=24).num_local_tokens == 48


def test_pad_to_fixes_the_row() -> None:
    layout = SequenceLayout([5, 6], ring=2, pad_to=32)
    assert layout.num_local_tokens == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "at least one sequence"),
        ({"lengths": [3, 0]}, r"lengths\[1\]=0"),
        ({"lengths": [-4]}, r"lengths\[0\]=-4"),
        ({"lengths": [2.5]}, "whole number"),
        (
            {"lengths": [3], "policy": "spiral"},
            "'spiral' is unknown; use one of balanced, contiguous, zigzag",
        ),
        ({"lengths": [3], "ring": 0}, "ring=0"),
        ({"lengths": [3], "multiple_of": 0}, "multiple_of=0"),
        ({"lengths": [9, 9], "ring": 2, "pad_to": 16}, "pad_to=16 is too small: the row needs 18"),
        ({"lengths": [9, 9], "ring": 2, "pad_to": 21}, "use 22 or 20"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLayout(**arguments)  # type: ignore[arg-type]


def test_a_shard_cannot_be_sharded_again() -> None:
    layout = SequenceLayout([8, 8], ring=2)
    part = layout.shard(torch.arange(16), 0)
    with pytest.raises(ValueError, match="is it sharded already"):
        layout.shard(part, 0)
    with pytest.raises(ValueError, match="one part per rank"):
        layout.unshard([part])
    with pytest.raises(ValueError, match="valid ranks are 0 to 1"):
        layout.index(2)
