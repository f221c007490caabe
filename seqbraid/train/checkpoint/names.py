"""The names, and the pieces, under which a stock class saves its weights.

Releases of transformers rename weights as they load and save them, and fuse or split experts. Which of that a
checkpoint went through can be told from its names, so that what we write is laid out as what we read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from ...models.mtp import mtp_of
from ...models.mtp_module import has_mtp
from ...models.mtp_weights import PREFIX, to_checkpoint
from ..lora import is_adapter, stock_name

Shapes = Mapping[str, tuple[int, ...]]
"""The tensors of a checkpoint."""


def to_saved(
    model: PreTrainedModel, state: Mapping[str, Tensor], checkpoint: Shapes | None = None
) -> dict[str, Tensor]:
    """A model's weights as its stock class saves them; with a checkpoint, laid out as that one is.

    Of weights that are one and the same tensor only the one that the stock class keeps is left. Those of
    multi-token prediction, which the stock class does not know, are laid out by their own rules.
    """
    aliases = _aliases(model)
    kept = {name: x for name, x in state.items() if name not in aliases and not _is_mtp(model, name)}
    with _conversions(model, None if checkpoint is None else _fitting(model, checkpoint)):
        saved: dict[str, Tensor] = revert_weight_conversion(model, kept)
    if has_mtp(model):
        own = {name: x for name, x in state.items() if _is_mtp(model, name)}
        saved |= to_checkpoint(own, mtp_of(model).packed)
    return saved


def extra_tensors(model: PreTrainedModel, checkpoint: Shapes) -> tuple[str, ...]:
    """The names of a checkpoint under which no weight of the model is saved, sorted."""
    with _conversions(model, _fitting(model, checkpoint)):
        extra = set(checkpoint) - set(_saved_shapes(model, _structure(model)))
    return tuple(sorted(name for name in extra if not _is_mtp(model, name)))


def shared_names(model: torch.nn.Module) -> list[set[str]]:
    """Names of parameters that are one and the same, as tied embeddings and heads are."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(stock_name(name))
    return [names for names in groups.values() if len(names) > 1]


def _aliases(model: PreTrainedModel) -> set[str]:
    """Of every shared weight all names but the one that stock code saves it under."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name for names in shared_names(model) for name in sorted(names, key=lambda n: (n in tied, n))[1:]}


def _is_mtp(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor is of the module of multi-token prediction that was attached to a model."""
    return has_mtp(model) and name.startswith(PREFIX)


def _structure(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights without their numbers; adapters are no part of it."""
    return {
        stock_name(name): torch.empty(x.shape, dtype=x.dtype, device="meta")
        for name, x in model.state_dict().items()
        if not is_adapter(name) and not _is_mtp(model, name)
    }


def _saved_shapes(model: PreTrainedModel, structure: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in revert_weight_conversion(model, structure).items()}


def _fitting(model: PreTrainedModel, checkpoint: Shapes) -> list[Any]:
    """Those of the stock class's conversions that lead to the names and shapes of a checkpoint."""
    structure = _structure(model)
    shared = {name for names in shared_names(model) for name in names}
    required = {name: x for name, x in structure.items() if name not in shared}
    fewest: set[str] | None = None
    for candidate in _candidates(model):
        with _conversions(model, candidate):
            shapes = _saved_shapes(model, required)
        missing = {name for name, shape in shapes.items() if checkpoint.get(name) != shape}
        if not missing:
            return list(candidate)
        fewest = missing if fewest is None or len(missing) < len(fewest) else fewest
    assert fewest is not None
    raise ValueError(
        f"the checkpoint is missing {len(fewest)} of the {len(required)} weights of "
        f"{type(model).__name__} ({', '.join(sorted(fewest)[:3])}, …), so its other weights cannot be "
        "identified; give the folder that the model was loaded from"
    )


def _candidates(model: PreTrainedModel) -> Iterator[list[Any]]:
    """Ways to save the model, those of stock code first."""
    loaded = getattr(model, "_weight_conversions", None)
    if loaded is not None:
        yield list(loaded)
    every = get_model_conversion_mapping(model, add_legacy=False)
    if not hasattr(model, model.base_model_prefix):  # older releases say it so: the thinker is a part itself
        every = [PrefixChange(prefix_to_remove=model.base_model_prefix), *every]
    prefixes = [x for x in every if isinstance(x, PrefixChange)]
    for converters in (True, False):  # experts one by one, or fused as the model has them
        # A prefix is cut off where a checkpoint has it: the thinker's within the whole Omni.
        for prefix in (None, *prefixes):
            yield [
                x
                for x in every
                if (x is prefix or not isinstance(x, PrefixChange))
                and (converters or not isinstance(x, WeightConverter))
            ]
    yield []


@contextmanager
def _conversions(model: PreTrainedModel, conversions: list[Any] | None) -> Iterator[None]:
    """Let stock code save with these conversions; None leaves the choice to it."""
    if conversions is None:
        yield
        return
    before = getattr(model, "_weight_conversions", None)
    model._weight_conversions = conversions
    try:
        yield
    finally:
        if before is None:
            del model._weight_conversions
        else:
            model._weight_conversions = before
