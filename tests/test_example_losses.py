"""The examples of losses give, on a mesh, what plain code gives in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest

import seqbraid as sb
from examples.losses.compare import ALGORITHMS, compare
from tests.helpers import ranks


def compared(axes: dict[str, int]) -> dict[str, tuple[float, float, float]]:
    return compare(sb.Mesh(**axes))


@pytest.mark.parametrize("axes", [{}, {"ring": 2, "ulysses": 2}, {"tp": 2, "dp_shard": 2}], ids=str)
def test_each_loss_equals_plain_code(axes: dict[str, Any]) -> None:
    for found in ranks.run(compared, math.prod(axes.values()), axes):
        assert found.keys() == ALGORITHMS.keys()
        for name, (loss, loss_off, gradient_off) in found.items():
            assert abs(loss) > 1e-3 and loss_off < 1e-5 and gradient_off < 1e-5, name
