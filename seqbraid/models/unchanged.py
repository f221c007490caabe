"""What a user may do to a model after `parallelize` that a step would not see: found before the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class Unchanged:
    """The modules and parameters of a model as they were braided; comparing takes a walk over the modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = list(model.modules())  # kept, so that none of a later module's has the same address
        self.names = [name for name, _ in model.named_modules()]
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def difference(self, model: PreTrainedModel, wrapper: nn.Module, last_layer: nn.Module) -> str | None:
        """What is not as it was, in words; to be asked before sharded parameters are gathered, which puts
        them back into the modules they came from.
        """
        found = list(model.modules())
        for before, now, name in zip(self.modules, found, self.names, strict=False):
            if before is not now:
                return f"{name!r} is another module ({type(now).__name__}) than when parallelize was called"
        if len(found) != len(self.modules):
            added = set(dict(model.named_modules())) ^ set(self.names)
            return f"modules were added or removed since parallelize was called: {_few(added)}"
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        for name in {**self.shapes, **shapes}:
            before_shape, shape = self.shapes.get(name), shapes.get(name)
            if before_shape != shape:
                was = "absent" if before_shape is None else f"of shape {list(before_shape)}"
                now_is = "absent" if shape is None else f"of shape {list(shape)}"
                return f"the parameter {name!r} was {was} when parallelize was called and is {now_is} now"
        for name in _unsharded(wrapper, last_layer):
            return f"the parameter {name!r} was replaced since it was sharded"
        return None


@contextmanager
def resizing_refused(model: PreTrainedModel) -> Iterator[None]:
    """While ranks share a model's parameters, its `resize_token_embeddings` says so: it would fail."""
    vars(model)["resize_token_embeddings"] = partial(_refuse_resizing, type(model).__name__)
    try:
        yield
    finally:
        del vars(model)["resize_token_embeddings"]


def _refuse_resizing(name: str, new_num_tokens: int | None = None, *_: Any, **__: Any) -> None:
    raise ValueError(
        f"resize_token_embeddings({new_num_tokens}) was called on a {name} that is parallelized: its "
        "embedding and head lie in parts on the ranks and cannot be resized; call it before parallelize"
    )


def _unsharded(wrapper: nn.Module, last_layer: nn.Module) -> Iterator[str]:
    """Parameters that are plain where FSDP2 would have them sharded."""
    if not isinstance(wrapper, FSDPModule):
        return
    # What is in no unit of its own, and the last layer, stay gathered from a forward to its backward, and
    # together; others are sharded between calls.
    stay: list[tuple[str, bool]] = []
    units: list[list[tuple[str, bool]]] = []

    def walk(module: nn.Module, prefix: str, unit: list[tuple[str, bool]]) -> None:
        if module is last_layer:
            unit = stay
        elif isinstance(module, FSDPModule) and module is not wrapper:
            unit = []
            units.append(unit)
        for name, parameter in module.named_parameters(prefix.rstrip("."), recurse=False):
            unit.append((name, isinstance(parameter, DTensor)))
        for name, child in module.named_children():
            walk(child, f"{prefix}{name}.", unit)

    walk(wrapper, "", stay)
    if any(sharded for _, sharded in stay):
        units.append(stay)
    for unit in units:
        yield from (name for name, sharded in unit if not sharded)


def _few(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (", …" if len(names) > 3 else "")
