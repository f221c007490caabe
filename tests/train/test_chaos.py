"""Killed runs: whatever the moment, they end as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

from .chaos.trial import Chaos


def test_a_run_killed_in_a_save_and_in_a_prefetch_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    outcome = Chaos(tmp_path, limit_s=400.0).trial("run", ("save", "prefetch"), random.Random(0))
    assert not outcome.problems
    assert len(outcome.kills) == 2
