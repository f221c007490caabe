"""The step that a decoder layer is run for, for parts of it that no keyword reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..sequence_parallel.context import StepContext

CHECKPOINT = "_gradient_checkpointing_func"
"""What stock layers call the function that checkpoints them, where it is switched on."""

_STEP: ContextVar[StepContext | None] = ContextVar("the step that is running", default=None)


def running_step() -> StepContext | None:
    """The step of the call that this one is part of; None outside of a braided step."""
    return _STEP.get()


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Make tensors as if the user had changed nothing for all of torch.

    `torch.inference_mode` becomes `torch.no_grad`, since plans that are made here and kept serve later steps
    too, and a backward refuses tensors of inference mode; `torch.set_default_device` does not reach indices.
    """
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


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
    """Bind the step around a layer's calls, and around what its own checkpointing computes again in the
    backward. `unbind` undoes it.
    """
    layer.forward = partial(_layer_forward, layer, vars(layer).get("forward"))


def unbind(module: nn.Module) -> None:
    """Give a module the forward of its class back."""
    del module.forward


def _layer_forward(
    layer: nn.Module,
    replaced: Callable[..., Any] | None,
    *args: Any,
    braid: StepContext | None = None,
    **kwargs: Any,
) -> Any:
    # The class is asked at every call: sharding gives a layer a class of its own, and transformers takes its
    # checkpoints in the forward of the last one.
    stock = replaced or partial(type(layer).forward, layer)
    if braid is None:
        return stock(*args, **kwargs)
    with running(braid), _computed_again_for(layer, braid):
        return stock(*args, braid=braid, **kwargs)


@contextmanager
def _computed_again_for(layer: Any, step: StepContext) -> Iterator[None]:
    """Where the stock layer's checkpoint is inside of its forward (transformers 5.23), nothing of ours is
    around it when it is computed again; older releases call the layer again.
    """
    checkpoint = vars(layer).get(CHECKPOINT)
    if checkpoint is None:
        yield
        return
    vars(layer)[CHECKPOINT] = lambda function, *args: checkpoint(partial(_run_for, step, function), *args)
    try:
        yield
    finally:
        vars(layer)[CHECKPOINT] = checkpoint


def _run_for(step: StepContext, function: Callable[..., Any], *args: Any) -> Any:
    with running(step):
        return function(*args)
