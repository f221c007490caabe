"""Tensors arrive as they were sent, whatever their strides."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch import Tensor

from seqbraid.data.stream.parcel import Parcel, receive

WHOLE = torch.arange(24).view(4, 6)


@pytest.mark.parametrize(
    "x",
    [WHOLE, WHOLE[:, ::2], WHOLE.T, WHOLE[1:2, ::6], WHOLE[2, 3], WHOLE[:0], torch.tensor([1 + 2j]).conj()],
    ids=["whole", "strided", "transposed", "one number", "no dimension", "empty", "conjugate"],
)
@pytest.mark.parametrize("copies", [1, 20_000], ids=["through the pipe", "mapped"])
def test_tensors_arrive_as_they_were(x: Tensor, copies: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    filling = torch.zeros(copies)
    Parcel({"x": x, "filling": filling}).send(ours)
    arrived = receive(theirs)
    assert torch.equal(arrived["x"], x) and arrived["x"].dtype == x.dtype
    arrived["x"].zero_()
    assert torch.equal(arrived["filling"], filling)
