"""Padding is routed to no expert: a layer's experts see the slots that hold a token, and no others.

Letters: T slots of this rank, R of them with a token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from .running import running_step


def are_experts(module: nn.Module) -> bool:
    """The experts of a layer as one module, called with hidden states and, per token, whom it goes to."""
    return type(module).__name__.endswith("Experts") and any(
        parameter.ndim == 3 for parameter in module.parameters(recurse=False)
    )


def braid_experts(module: nn.Module) -> None:
    """Let calls within a braided step leave padding out; others go to the stock forward."""
    module.forward = partial(_forward, module.forward)


def _forward(
    stock: Callable[..., Tensor], hidden_TD: Tensor, *routing: Any, **routing_by_name: Any
) -> Tensor:
    step = running_step()
    rows_R = None if step is None else step.real_rows(hidden_TD.device)
    per_token = (hidden_TD, *routing, *routing_by_name.values())
    # Experts that get tokens sorted by expert are called the stock way: there a slot is not a token.
    if rows_R is None or any(not _per_token(x, len(hidden_TD)) for x in per_token):
        return stock(hidden_TD, *routing, **routing_by_name)
    if not len(rows_R):  # a rank of padding alone: one slot, so that every parameter takes part
        rows_R = rows_R.new_zeros(1)
    out_RD = stock(
        hidden_TD[rows_R],
        *(x[rows_R] for x in routing),
        **{name: x[rows_R] for name, x in routing_by_name.items()},
    )
    return out_RD.new_zeros(len(hidden_TD), out_RD.shape[1]).index_copy(0, rows_R, out_RD)


def _per_token(x: Any, num_tokens: int) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and len(x) == num_tokens
