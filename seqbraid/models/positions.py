"""Rotary positions of one sample, computed for the sample alone."""

from __future__ import annotations

import torch
from torch import Tensor


def text_positions(length: int) -> Tensor:
    """`[4, T]`: text, time, height and width agree where there is no media."""
    return torch.arange(length).expand(4, -1)
