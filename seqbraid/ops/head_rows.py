"""Numbers per token from the head's logits, over chunks of tokens: no tokens × vocabulary tensor ever exists.

Letters: T tokens, L labelled tokens, C tokens of a chunk, D hidden size, V vocabulary.

The forward keeps a few numbers per token, as the log-sum-exp; the backward makes the logits of a chunk again,
since what each token's gradient is multiplied by is not known before.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear_cross_entropy import add_product, sum_dtype


class HeadRows(Protocol):
    """What is computed of rows of logits; it keeps what its backward needs beside them."""

    num_values: int
    """How many numbers of a token the forward gives."""

    def forward(self, logits_CV: Tensor, part: slice) -> tuple[Tensor, ...]:
        """`[C]` each, of the labelled tokens of a part; the logits may be overwritten."""
        ...

    def backward(self, logits_CV: Tensor, part: slice, *gradients_C: Tensor | None) -> Tensor:
        """The logits' gradient, in their type, given those of what the forward gave; None where nothing was
        made of it.
        """
        ...


def head_rows(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    rows_L: Tensor,
    rows: HeadRows,
    chunk_tokens: int,
) -> tuple[Tensor, ...]:
    """What `rows` makes of the logits of the tokens `rows_L`: `[T]` each, 0 for all other tokens.

    In float32 (float64 for float64 inputs). With a part of the vocabulary, the gradient of the hidden states
    is this part's, to be summed over the ranks.
    """
    found: tuple[Tensor, ...] = _HeadRows.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD, bias_V, rows_L, rows, chunk_tokens
    )
    return found


class _HeadRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        rows_L: Tensor,
        rows: HeadRows,
        chunk_tokens: int,
    ) -> tuple[Tensor, ...]:
        values = hidden_TD.new_zeros(rows.num_values, len(hidden_TD), dtype=sum_dtype(hidden_TD))
        for begin in range(0, len(rows_L), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            logits_CV = F.linear(hidden_TD[rows_L[part]], weight_VD, bias_V)
            values[:, rows_L[part]] = torch.stack(rows.forward(logits_CV, part))
            del logits_CV
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, rows_L)
        ctx.rows, ctx.chunk_tokens = rows, chunk_tokens
        ctx.set_materialize_grads(False)
        return tuple(of_tokens.clone() for of_tokens in values)

    @staticmethod
    def backward(ctx: Any, *gradients_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, rows_L = ctx.saved_tensors
        acc = sum_dtype(hidden_TD)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dhidden_TD = torch.zeros_like(hidden_TD) if needs_hidden else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=acc) if needs_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=acc) if needs_bias and bias_V is not None else None
        for begin in range(0, len(rows_L), ctx.chunk_tokens):
            part = slice(begin, begin + ctx.chunk_tokens)
            rows_C = rows_L[part]
            hidden_CD = hidden_TD[rows_C]
            logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
            given = (None if g is None else g[rows_C] for g in gradients_T)
            dlogits_CV = ctx.rows.backward(logits_CV, part, *given)
            del logits_CV
            if dbias_V is not None:
                dbias_V += dlogits_CV.sum(0, dtype=acc)
            if dhidden_TD is not None:
                dhidden_TD[rows_C] = dlogits_CV @ weight_VD
            if dweight_VD is not None:
                add_product(dweight_VD, dlogits_CV.T, hidden_CD)
        if dweight_VD is not None:
            dweight_VD = dweight_VD.to(weight_VD.dtype)
        if dbias_V is not None:
            dbias_V = dbias_V.to(bias_V.dtype)
        return dhidden_TD, dweight_VD, dbias_V, None, None, None
