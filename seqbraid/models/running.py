"""The step that a decoder layer is run for, for parts of it that no keyword reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..sequence_parallel.context import StepContext

_STEP: ContextVar[StepContext | None] = ContextVar("the step that is running", default=None)


def running_step() -> StepContext | None:
    """The step of the call that this one is part of; None outside of a braided step."""
    return _STEP.get()


@contextmanager
def running(step: StepContext) -> Iterator[None]:
    """Bind a step to the calls within, and to nothing after them."""
    before = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(before)


@contextmanager
def running_rows(step: StepContext | None, start: int, stop: int) -> Iterator[None]:
    """Bind a step to calls that see some of its rows alone."""
    if step is None:
        yield
        return
    keys = step.token_keys
    with running(step if keys is None else replace(step, token_keys=keys[start:stop])):
        yield


def bind_layer(layer: nn.Module) -> None:
    """Bind the step around a layer's calls: one that is computed again in the backward is called again, with
    the step's context among its arguments. `unbind` undoes it.
    """
    layer.forward = partial(_layer_forward, layer.forward)


def unbind(module: nn.Module) -> None:
    """Give a module the forward of its class back."""
    del module.forward


def _layer_forward(
    stock: Callable[..., Any], *args: Any, braid: StepContext | None = None, **kwargs: Any
) -> Any:
    if braid is None:
        return stock(*args, **kwargs)
    with running(braid):
        return stock(*args, braid=braid, **kwargs)
