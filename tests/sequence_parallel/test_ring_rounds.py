"""The rounds of a ring: everything comes once, and not too much at a time."""

from __future__ import annotations

import pytest

from benchmarks.ring_blocks import packed_lengths
from seqbraid.layout import SequenceLayout
from seqbraid.sequence_parallel.ring_plan import RingPlan

ROWS = {"one": [16384], "packed": packed_lengths(32768), "two": [9000, 7000]}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("policy", ["zigzag", "balanced"])
@pytest.mark.parametrize("query_heads", [1, 1.5, 2, 4, 16])
def test_a_round_takes_little_memory(row: str, policy: str, query_heads: float) -> None:
    layout = SequenceLayout(ROWS[row], ring=8, policy=policy)
    plans = [RingPlan.of(layout, rank, query_heads) for rank in range(8)]
    alone = [RingPlan.of(layout, rank, 0) for rank in range(8)]
    num_rounds = {len(plan.rounds) for plan in plans if plan.rounds}
    assert len(num_rounds) <= 1
    for plan, one_by_one in zip(plans, alone, strict=True):
        sources = [message.rank for round_ in plan.rounds for message in round_.received]
        assert sources == [message.rank for round_ in one_by_one.rounds for message in round_.received]
        for round_ in plan.rounds:
            if len(round_.received) > 1:
                assert round_.num_received <= 3 * layout.num_local_tokens
                # Keys and values, in units of a query head.
                assert (
                    2 * round_.num_received / query_heads
                    <= max(1.5, 2 / query_heads) * layout.num_local_tokens
                )


def test_fewer_key_heads_make_fewer_rounds() -> None:
    layout = SequenceLayout([16384], ring=8)
    counts = [len(RingPlan.of(layout, 0, query_heads).rounds) for query_heads in (1, 2, 4, 8)]
    assert counts[0] == 7 and counts == sorted(counts, reverse=True) and counts[2] == counts[3] == 3
