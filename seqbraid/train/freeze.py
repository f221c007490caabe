"""Training a part of a model: the others are frozen by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..models.parts import ModelParts

PATTERN = "re:"


def freeze(model: PreTrainedModel, parts: Sequence[str]) -> dict[str, int]:
    """Freeze parts of a stock model; call it before `parallelize`.

    Args:
        model: the stock model; nothing of it is changed where a ValueError is raised.
        parts: of `vision` (the tower without its mergers), `merger` (what joins vision to the decoder,
            DeepStack's mergers included), `audio`, `language_model` (decoder layers and norms), `embeddings`,
            `head`, `mtp` (multi-token prediction); or `re:PATTERN`, searched for in the names of parameters.

    Gives the number of weights per part named, and then how many are `frozen` and `trainable` in all.
    """
    known = model_parts(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[str, set[str]] = {}
    for part in parts:
        if part.startswith(PATTERN):
            names[part] = _matching(part, parameters)
        elif part in known:
            names[part] = known[part]
        else:
            raise ValueError(
                f"freeze: {part!r} is not a part of {type(model).__name__}; it has {', '.join(known)}, "
                f"and {PATTERN}PATTERN selects parameters by name"
            )
    frozen = set().union(*names.values())
    _check_shared(parameters, frozen)
    left = [p for name, p in parameters.items() if name not in frozen and p.requires_grad]
    if not left:
        raise ValueError(
            f"freeze: {', '.join(parts)} leaves no parameter of {type(model).__name__} to be trained"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)
    counts = {part: _count(parameters[name] for name in found) for part, found in names.items()}
    counts["frozen"] = _count(p for p in parameters.values() if not p.requires_grad)
    counts["trainable"] = _count(left)
    return counts


def model_parts(model: PreTrainedModel) -> dict[str, set[str]]:
    """The parts that a model has, each with the names of its parameters; together they are all of it."""
    found = ModelParts.of(model)
    decoder = _names(model, [found.decoder])
    embeddings = _names(model, [found.embedding, *found.other_embeddings])
    parts: dict[str, set[str]] = {}
    for tower in found.towers:
        mergers = _names(model, tower.mergers)
        parts[tower.kind] = _names(model, [tower.module]) - mergers
        if mergers:
            parts["merger"] = mergers
    head = _names(model, [found.head])
    parts |= {"language_model": decoder - embeddings, "embeddings": embeddings, "head": head}
    if found.mtp is not None:
        parts["mtp"] = _names(model, [found.mtp.module])
    return {part: names for part, names in parts.items() if names}


def _names(model: nn.Module, modules: Sequence[nn.Module]) -> set[str]:
    """Names of all parameters of some modules, in those modules alone."""
    own = {id(part) for module in modules for part in module.modules()}
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if id(module) in own
        for name in module._parameters
        if module._parameters[name] is not None
    }


def _matching(part: str, parameters: dict[str, Any]) -> set[str]:
    try:
        pattern = re.compile(part.removeprefix(PATTERN))
    except re.error as error:
        raise ValueError(f"freeze: {part!r} is not a regular expression: {error}") from None
    found = {name for name in parameters if pattern.search(name)}
    if not found:
        some = ", ".join(list(parameters)[:3])
        raise ValueError(f"freeze: {part!r} matches no parameter; there are {some}, …")
    return found


def _check_shared(parameters: dict[str, Any], frozen: set[str]) -> None:
    """A weight with two names is frozen under both or none, and whoever freezes it has to say so."""
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    for names in groups.values():
        inside = [name for name in names if name in frozen]
        if inside and len(inside) < len(names):
            other = next(name for name in names if name not in frozen)
            raise ValueError(
                f"freeze: {inside[0]} and {other} are the same weight (tied embeddings and head); name "
                "both parts, or neither"
            )


def _count(parameters: Any) -> int:
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())
