"""`balanced` on heavy-tailed rows, ring 8."""

from __future__ import annotations

import numpy as np

from benchmarks.balance import cost_ratio, packed_rows
from seqbraid.layout import SequenceLayout


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
