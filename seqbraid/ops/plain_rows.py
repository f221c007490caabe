"""What RMSNorm, a rotary embedding and a gate make of the rows of a tensor, by their definitions.

Letters: T tokens, H heads (1 where a row is a token), D width of a row, R columns that are turned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """What a row is normed by: x / sqrt(mean(x²) + eps) · (centre + weight)."""

    weight_D: Tensor
    eps: float
    centre: float
    """0, or 1 where weights are kept as what is added to 1."""


class Rotation(NamedTuple):
    """The rotation of the first R columns of each token's rows, half against half."""

    cos_TR: Tensor
    sin_TR: Tensor


def plain_rows(
    x_THD: Tensor, norm: Norm | None, turn: Rotation | None = None, gate_THD: Tensor | None = None
) -> Tensor:
    """Norm, turn, gate, each if given, by their definitions."""
    if norm is not None:
        mean_TH1 = x_THD.pow(2).mean(-1, keepdim=True)
        x_THD = x_THD * torch.rsqrt(mean_TH1 + norm.eps) * (norm.centre + norm.weight_D)
    if turn is not None:
        cos_T1R, sin_T1R = (x[:, None] for x in turn)
        x_THR, rest = x_THD.split([cos_T1R.shape[-1], x_THD.shape[-1] - cos_T1R.shape[-1]], dim=-1)
        first, second = x_THR.chunk(2, dim=-1)
        x_THD = torch.cat([x_THR * cos_T1R + torch.cat([-second, first], -1) * sin_T1R, rest], -1)
    return x_THD if gate_THD is None else x_THD * torch.nn.functional.silu(gate_THD)
