"""KL divergence of each token's whole distribution from a teacher's, of which only hidden states are given.

Letters as in `head_rows`; E is the teacher's hidden size. With z and y the logits of both over the
temperature: KL = Σ softmax(y) · (y − z) − lse(y) + lse(z), whose gradient by z is softmax(z) − softmax(y).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cross_entropy import VocabularyShard
from .head_rows import head_rows
from .linear_cross_entropy import default_chunk


class TeacherHead(NamedTuple):
    """What makes the teacher's logits, of the part of the vocabulary that is here."""

    hidden_TE: Tensor
    weight_VE: Tensor
    bias_V: Tensor | None = None


def linear_kl(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    rows_L: Tensor,
    teacher: TeacherHead,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """`[T]`: KL(teacher ‖ student) of the tokens `rows_L`, 0 for all others; the teacher gets no gradient."""
    if chunk_tokens is None:  # logits of both are there at once
        size_V = len(weight_VD) if shard is None else shard.widest
        chunk_tokens = max(1, default_chunk(size_V, weight_VD.shape[1]) // 2)
    rows = _KLRows(teacher, rows_L, temperature, shard)
    return head_rows(hidden_TD, weight_VD, bias_V, rows_L, rows, chunk_tokens)[0]


class _KLRows:
    """See `HeadRows`."""

    num_values = 1

    def __init__(
        self, teacher: TeacherHead, rows_L: Tensor, temperature: float, shard: VocabularyShard | None
    ) -> None:
        self.teacher = TeacherHead(*(None if x is None else x.detach() for x in teacher))  # type: ignore[arg-type]
        self.rows_L, self.temperature, self.shard = rows_L, temperature, shard
        self.lse_2C: dict[int, Tensor] = {}
        """Of student and teacher, by where a part begins."""

    def forward(self, logits_CV: Tensor, part: slice) -> tuple[Tensor, ...]:
        z_CV, y_CV = self._scaled(logits_CV), self._scaled(self._teacher_logits(part))
        top_2C = torch.stack([z_CV.amax(1), y_CV.amax(1)])
        if self.shard is not None:
            top_2C = self.shard.maximum(top_2C)
        z_CV -= top_2C[0, :, None]
        y_CV -= top_2C[1, :, None]
        p_CV = y_CV.exp()
        y_CV -= z_CV
        sums_3C = torch.stack([p_CV.sum(1), torch.einsum("cv,cv->c", p_CV, y_CV), z_CV.exp_().sum(1)])
        if self.shard is not None:
            sums_3C = self.shard.total(sums_3C)
        lse_y_C, lse_z_C = sums_3C[0].log(), sums_3C[2].log()
        self.lse_2C[part.start] = torch.stack([lse_z_C, lse_y_C]) + top_2C
        return (sums_3C[1] / sums_3C[0] - lse_y_C + lse_z_C,)

    def backward(self, logits_CV: Tensor, part: slice, *gradients_C: Tensor | None) -> Tensor:
        (dkl_C,) = gradients_C
        assert dkl_C is not None  # it is all that there is
        lse_2C, dtype = self.lse_2C[part.start], logits_CV.dtype
        p_CV = self._scaled(logits_CV).sub_(lse_2C[0, :, None]).exp_()
        p_CV -= self._scaled(self._teacher_logits(part)).sub_(lse_2C[1, :, None]).exp_()
        return p_CV.mul_(dkl_C[:, None] / self.temperature).to(dtype)

    def _teacher_logits(self, part: slice) -> Tensor:
        hidden_TE, weight_VE, bias_V = self.teacher
        return F.linear(hidden_TE[self.rows_L[part]], weight_VE, bias_V)

    def _scaled(self, logits_CV: Tensor) -> Tensor:
        z_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        return z_CV if self.temperature == 1.0 else z_CV.div_(self.temperature)
