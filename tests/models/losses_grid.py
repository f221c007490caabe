"""The meshes and families that `test_losses_ranks.py` leaves out: `make losses`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.models.test_losses_ranks import CASES, MEDIA, MESHES, PLAIN, WINDOWS, prepared, verdict

OTHERS = [(family, mesh) for family in (*PLAIN, *MEDIA) for mesh in MESHES]
OTHERS += [(family, mesh) for family in WINDOWS for mesh in ("ulysses", "tp", "data")]


@pytest.mark.parametrize("case", [case for case in OTHERS if case not in CASES], ids=str)
def test_a_loss_of_tokens_and_samples_equals_plain_code(tmp_path: Path, case: tuple[str, str]) -> None:
    family, axes = case[0], MESHES[case[1]]
    path = prepared(tmp_path, family, axes.get("dp_shard", 1))
    for holds, worst in ranks.run(verdict, math.prod(axes.values()), path, family, axes):
        assert holds, worst
