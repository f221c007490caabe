"""Attention by its definition, sequence by sequence: what every kernel and every split is held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqbraid.ops.reference import attention_reference

SCALE = 0.3


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence of a row, with a window and a learned sink if given."""
    outs = []
    for q_s, k_s, v_s in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        distance = torch.arange(len(q_s))[:, None] - torch.arange(len(q_s))
        seen = (distance >= 0) & (distance < (window or len(q_s)))
        out, lse_HT = attention_reference(q_s, k_s, v_s, seen, SCALE)
        if sink is not None:  # one more key, which holds nothing
            out = out * torch.sigmoid(lse_HT - sink[:, None]).T[..., None]
        outs.append(out)
    return torch.cat(outs)


def relative(a: Tensor, b: Tensor) -> float:
    """The size of the difference over the size of what is expected."""
    return float((a - b).detach().norm() / b.detach().norm())
