"""The bytes of both methods, against cases counted by hand, and the choice between them."""

from __future__ import annotations

import pytest

from seqbraid import SequenceLayout
from seqbraid.sequence_parallel.gated_delta_bytes import HeadSizes, choose_method, heads_bytes, states_bytes

SIZES = HeadSizes(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5)
S0, M = 4 * 3 * 5 * 4, 4 * 3 * 3 * 4
"""Bytes of a segment's state and of its transition, in float32."""


def test_heads_sent_by_hand() -> None:
    # Tokens 0:4 and 4:8. To the other rank, of 4 tokens, a head of q and of k (2 · 3), 2 of v (2 · 5), 2 of
    # b, 2 of a; and of its 4 tokens the outputs of 2 heads.
    layout = SequenceLayout([8], ring=2, policy="contiguous")
    assert heads_bytes(layout, SIZES, 2) == [4 * 20 * 2 + 4 * 10 * 2] * 2
    # Tokens 0:5 here, 5:9 there and one slot of padding.
    layout = SequenceLayout([9], ulysses=2, policy="contiguous")
    assert heads_bytes(layout, SIZES, 4) == [(5 * 20 + 4 * 10) * 4, (4 * 20 + 5 * 10) * 4]
    # Four ranks, of which 0 and 1 share a sequence and 2 and 3 keep theirs: those two still compute their
    # heads.
    layout = SequenceLayout([6, 3, 3], ring=4, policy="contiguous")
    sizes = SIZES._replace(num_key_heads=4)
    assert heads_bytes(layout, sizes, 2) == [(3 * 3 * 13 + 3 * 5) * 2] * 2 + [6 * 5 * 2] * 2


def test_states_sent_by_hand() -> None:
    assert states_bytes(SequenceLayout([8], ring=2, policy="contiguous"), SIZES, 2) == [S0, 0]
    # Rank 0 holds 0:2 and 6:8, rank 1 what lies between: the last segment's state is nobody's.
    assert states_bytes(SequenceLayout([8], ring=2, policy="zigzag"), SIZES, 2) == [S0, S0 + M]
    # The chain runs 0, 1, 2, 3, 2, 1, 0; each segment goes once to every other rank that comes later.
    expected = [3 * S0, (3 + 1) * (S0 + M), (3 + 2) * (S0 + M), 3 * (S0 + M)]
    assert states_bytes(SequenceLayout([16], ring=4, policy="zigzag"), SIZES, 2) == expected
    # Two sequences over ranks 0, 1, 2 and 2, 3.
    layout = SequenceLayout([10, 6], ring=4, policy="contiguous")
    assert states_bytes(layout, SIZES, 2) == [2 * S0, S0 + M, S0, 0]


@pytest.mark.parametrize("policy", ["contiguous", "zigzag"])
def test_states_do_not_grow_with_the_length(policy: str) -> None:
    short, long = (SequenceLayout([n], ring=2, ulysses=2, policy=policy) for n in (64, 128))
    assert states_bytes(short, SIZES, 2) == states_bytes(long, SIZES, 2)
    sizes = SIZES._replace(num_key_heads=4)
    assert heads_bytes(long, sizes, 2) == [2 * n for n in heads_bytes(short, sizes, 2)]


def test_states_are_at_least_float32() -> None:
    layout = SequenceLayout([8], ring=2, policy="contiguous")
    assert [states_bytes(layout, SIZES, itemsize)[0] for itemsize in (2, 4, 8)] == [S0, S0, 2 * S0]


def test_whole_sequences_send_nothing() -> None:
    layout = SequenceLayout([8] * 4, ring=2, policy="balanced")
    assert heads_bytes(layout, SIZES, 2) == states_bytes(layout, SIZES, 2) == [0, 0]
    assert choose_method(layout, SIZES, 2) == "states"


def test_the_busiest_rank_decides() -> None:
    def taken(length: int, policy: str = "contiguous", itemsize: int = 2) -> str:
        return choose_method(SequenceLayout([length], ring=2, policy=policy), SIZES, itemsize)

    assert S0 == 8 // 2 * 30 * 2  # as many bytes by heads as by states
    assert [taken(length) for length in (6, 8, 10)] == ["heads", "states", "states"]
    assert [taken(8, itemsize=itemsize) for itemsize in (4, 8)] == ["states", "states"]
    # Zigzag sends M too: the heads stay cheaper for longer, though rank 0 alone sends no more than before.
    assert [taken(length, "zigzag") for length in (8, 12, 16)] == ["heads", "heads", "states"]


def test_heads_that_do_not_divide_leave_state_passing() -> None:
    layout = SequenceLayout([4], ring=2, policy="contiguous")
    odd = HeadSizes(num_key_heads=3, num_value_heads=6, key_dim=64, value_dim=64)
    assert choose_method(layout, odd, 2) == "states"
    assert choose_method(layout, odd._replace(num_key_heads=6), 2) == "heads"
    with pytest.raises(ValueError, match=r"= 2 does not divide 3 key heads .* state passing"):
        heads_bytes(layout, odd, 2)
