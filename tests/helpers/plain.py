"""Attention by its definition, sequence by sequence: what every kernel and every split is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from seqbraid.ops.attention_kernels import DenseShape, VarlenShape, math_backward, math_forward
from seqbraid.ops.flash_impl import seen
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
        mask = (distance >= 0) & (distance < (window or len(q_s)))
        out, lse_HT = attention_reference(q_s, k_s, v_s, mask, SCALE)
        if sink is not None:  # one more key, which holds nothing
            out = out * torch.sigmoid(lse_HT - sink[:, None]).T[..., None]
        outs.append(out)
    return torch.cat(outs)


def relative(a: Tensor, b: Tensor) -> float:
    """The size of the difference over the size of what is expected."""
    return float((a - b).detach().norm() / b.detach().norm())


def _varlen_blocks(
    shape: VarlenShape, sees: Callable[[VarlenShape], DenseShape]
) -> Iterator[tuple[slice, slice, DenseShape]]:
    """The rows of every block, and what its queries see."""
    bounds = (pairwise(cu.tolist()) for cu in (shape.cu_q, shape.cu_k))
    for (q_start, q_stop), (k_start, k_stop) in zip(*bounds, strict=True):
        alone = shape._replace(max_q=q_stop - q_start, max_k=k_stop - k_start)
        yield slice(q_start, q_stop), slice(k_start, k_stop), sees(alone)


def _nowhere(x: Tensor) -> Tensor:
    """Memory that nobody has written to."""
    return torch.full_like(x, torch.nan)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: VarlenShape,
    scale: float,
    place: Tensor | None = None,
    sees: Callable[[VarlenShape], DenseShape] = seen,
) -> tuple[Tensor, Tensor]:
    """A varlen kernel in plain maths, which writes to the rows of blocks alone, and to a place if given."""
    out, lse = _nowhere(q) if place is None else place.fill_(torch.nan), _nowhere(q[..., 0].T)
    for rows, keys, mask in _varlen_blocks(shape, sees):
        tensors = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        found, found_lse = math_forward(*tensors, mask, scale)
        out[rows], lse[:, rows] = found[0].transpose(0, 1), found_lse[0]
    return out, lse


def varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: VarlenShape, scale: float,
    *places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its backward, likewise."""
    given = places or (None, None, None)
    dq, dk, dv = (
        _nowhere(x) if place is None else place.fill_(torch.nan)
        for x, place in zip((q, k, v), given, strict=True)
    )
    for rows, keys, mask in _varlen_blocks(shape, seen):
        tensors = (x.transpose(0, 1)[None] for x in (dout[rows], q[rows], k[keys], v[keys], out[rows]))
        found = math_backward(*tensors, lse[None, :, rows], mask, scale)
        for total, place, part in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
            total[place] = part[0].transpose(0, 1)
    return dq, dk, dv
