"""Padding is routed to no expert: a layer's experts see the slots that hold a token, and no others.

Letters: T slots of this rank, R of them with a token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..sequence_parallel.context import StepContext

_STEP: ContextVar[StepContext | None] = ContextVar("the step of the layer that is running", default=None)
"""Stock layers hand no keyword down to their experts, so it is bound around a layer's call and no longer;
a checkpointed layer that is computed again is called again.
"""


def layers_with_experts(layers: nn.ModuleList) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Decoder layers that route tokens, each with its experts."""
    found = ((layer, [m for m in layer.modules() if _are_experts(m)]) for layer in layers)
    return [(layer, experts) for layer, experts in found if experts]


def _are_experts(module: nn.Module) -> bool:
    """The experts of a layer as one module, called with hidden states and, per token, whom it goes to."""
    return type(module).__name__.endswith("Experts") and any(
        parameter.ndim == 3 for parameter in module.parameters(recurse=False)
    )


def braid_experts(layers: nn.ModuleList) -> None:
    """Let calls that carry a step context leave padding out; calls without one go to the stock forward."""
    for layer, experts in layers_with_experts(layers):
        layer.forward = partial(_layer_forward, layer.forward)
        for module in experts:
            module.forward = partial(_experts_forward, module.forward)


def unbraid_experts(layers: nn.ModuleList) -> None:
    """Undo `braid_experts`."""
    for layer, experts in layers_with_experts(layers):
        for module in (layer, *experts):
            del module.forward


def _layer_forward(
    stock: Callable[..., Any], *args: Any, braid: StepContext | None = None, **kwargs: Any
) -> Any:
    if braid is None:
        return stock(*args, **kwargs)
    before = _STEP.set(braid)
    try:
        return stock(*args, braid=braid, **kwargs)
    finally:
        _STEP.reset(before)


def _experts_forward(
    stock: Callable[..., Tensor], hidden_TD: Tensor, *routing: Tensor, **routing_by_name: Tensor
) -> Tensor:
    step = _STEP.get()
    rows_R = None if step is None else step.real_rows(hidden_TD.device)
    per_token = (hidden_TD, *routing, *routing_by_name.values())
    if rows_R is None or any(x.ndim != 2 or len(x) != len(hidden_TD) for x in per_token):
        return stock(hidden_TD, *routing, **routing_by_name)
    if not len(rows_R):  # a rank of padding alone: one slot, so that every parameter takes part
        rows_R = rows_R.new_zeros(1)
    out_RD = stock(
        hidden_TD[rows_R],
        *(x[rows_R] for x in routing),
        **{name: x[rows_R] for name, x in routing_by_name.items()},
    )
    return out_RD.new_zeros(len(hidden_TD), out_RD.shape[1]).index_copy(0, rows_R, out_RD)
