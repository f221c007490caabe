"""The same model and step in float64, with what stock code asks to be computed in float32.

Stock norms, routers and the stock gated delta rule cast to float32 whatever type the model has. In a float64
model they would still round, each at a place of its own; and a stock rule that is replaced by ours would
prove nothing. So the stock code runs as it is, and is given float64 where it asks for float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model in float64; its experts take the loop, as grouped products know no float64."""
    wide = copy.deepcopy(model).double()
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")
    return wide


@contextmanager
def float32_is_float64(model: PreTrainedModel) -> Iterator[None]:
    """Give float64 to whoever asks for float32; positions stay what they are, as we have the same ones."""
    owners: list[Any] = [module for module in model.modules() if hasattr(module, "get_rope_index")]
    for owner in owners:
        owner.get_rope_index = _as_it_is(owner.get_rope_index)
    try:
        with _Wide():
            yield
    finally:
        for owner in owners:
            del owner.get_rope_index


class _Wide(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.view:  # the bits of a tensor, read as another type
            return func(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_widened, args), **{name: _widened(x) for name, x in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    def narrow(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return narrow
