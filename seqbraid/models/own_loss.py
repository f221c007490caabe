"""A loss of the user's own in a step: what it returns is checked, and refused by all ranks or by none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.consensus import agree, gather_objects
from .local_tokens import LocalTokens, TokenLoss


class OwnLoss:
    """The loss of a step's micro-batches, called with one after the other."""

    def __init__(self, function: TokenLoss) -> None:
        self.function = function
        self.metrics: dict[str, Tensor] = {}
        """Sums over the micro-batches of this rank."""
        self._error: Exception | None = None

    @property
    def name(self) -> str:
        """What ranks that call other losses are told apart by."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def __call__(self, tokens: LocalTokens) -> Tensor:
        """The sum, or a zero where there is none: `settle` then raises the reason."""
        error = None
        try:
            loss, metrics = _checked(self.function(tokens), tokens)
        except Exception as problem:
            error = problem
        has_failed, error = tokens.end(error)
        self._error = self._error or error
        if has_failed:
            loss, metrics = tokens.hidden_TD.new_zeros((), dtype=torch.float32), {}
        for name, value in metrics.items():
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value
        # Whatever it depends on: a rank whose loss is a constant has the backward that the others wait for.
        found: Tensor = _Tied.apply(loss, *tokens.tied)  # type: ignore[no-untyped-call]
        return found

    def spread_metrics(self, group: dist.ProcessGroup | None, is_called: bool, device: torch.device) -> None:
        """Give ranks that call no loss, as other pipeline stages, the metrics of those that do, as zeros."""
        names = next(
            x for x in gather_objects(group, [*self.metrics] if is_called else None) if x is not None
        )
        if not is_called:
            zero = torch.zeros((), dtype=torch.float64, device=device)
            self.metrics = dict.fromkeys(names, zero)

    def settle(self, group: dist.ProcessGroup | None) -> None:
        """Raise on all ranks of a (CPU) group what one refuses: only running the loss shows it."""
        agree(group, self._error, alike={"the call": "loss", "the metrics of the loss": [*self.metrics]})


def _checked(found: Any, tokens: LocalTokens) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    what = "a loss returns the sum of this rank's losses, a tensor of one number"
    if not isinstance(loss, Tensor):
        raise ValueError(f"{what}, alone or with a dict of metrics; this one returned {_words(found)}")
    if loss.ndim or not loss.is_floating_point():
        raise ValueError(f"{what}; this one returned {_words(loss)}: call .sum() on it")
    if torch.is_grad_enabled() and not loss.requires_grad and bool(tokens.labelled.any()):
        raise ValueError(
            f"{what}, of which there is a gradient; this one has none: make it of tokens.logprobs() or "
            "another of the tokens' values, and do not detach it"
        )
    if not isinstance(metrics, Mapping):
        raise ValueError(f"the metrics of a loss are a dict of sums by name, not {_words(metrics)}")
    sums = {}
    for name, value in metrics.items():
        number = torch.as_tensor(value, device=loss.device)
        if number.ndim or not isinstance(name, str):
            raise ValueError(f"the metric {name!r} of the loss is {_words(value)}; give a sum, one number")
        sums[name] = number.detach().double()
    wide = torch.promote_types(loss.dtype, torch.float32)
    return loss.to(tokens.targets.device, wide), sums


def _words(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


class _Tied(torch.autograd.Function):
    """A loss, whose backward reaches some tensors, with zeros, even where it does not depend on them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(x.shape, x.dtype, x.device) for x in others]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros((), dtype=t, device=d).expand(shape) for shape, t, d in ctx.shapes]
        return dloss, *zeros
