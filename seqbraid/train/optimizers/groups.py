"""Which parameters have which learning rate and weight decay, by their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

KEYS = ("match", "lr", "weight_decay")


@dataclass(frozen=True)
class GroupSpec:
    """What parameters have whose names match."""

    match: str
    lr: float | None = None
    """Peak learning rate; the run's when left out."""
    weight_decay: float | None = None
    """Of matrices and vectors alike; as in the rest of the model when left out."""


@dataclass
class ParameterGroup:
    """Parameters that are stepped alike."""

    spec: int | None
    """The number of the entry of `train.groups` that it comes from."""
    match: str | None
    lr: float
    weight_decay: float
    is_muon: bool
    """Whether these are matrices of Muon's."""
    parameters: list[nn.Parameter]


def parse_groups(given: Sequence[Mapping[str, Any]]) -> list[GroupSpec]:
    """`train.groups` as specs; ValueError where an entry cannot be used.

    >>> parse_groups([{"match": "embed", "lr": 1e-6}])
    [GroupSpec(match='embed', lr=1e-06, weight_decay=None)]
    """
    found = []
    for number, entry in enumerate(given):
        where = f"train.groups[{number}]"
        if not isinstance(entry, Mapping) or "match" not in entry:
            raise ValueError(f"{where} is {entry!r}; give {{match: REGEX, lr: …, weight_decay: …}}")
        if unknown := sorted(entry.keys() - set(KEYS)):
            raise ValueError(f"{where} has the unknown key {unknown[0]!r}; use {', '.join(KEYS)}")
        try:
            re.compile(entry["match"])
        except (re.error, TypeError) as error:
            raise ValueError(f"{where}.match={entry['match']!r} is no regular expression: {error}") from None
        values: dict[str, float | None] = {}
        for key, most in (("lr", float("inf")), ("weight_decay", 1.0)):
            try:
                value = None if entry.get(key) is None else float(entry[key])
            except (TypeError, ValueError):
                raise ValueError(f"{where}.{key}={entry[key]!r} must be a number") from None
            if value is not None and not (0 <= value <= most and value < float("inf")):
                raise ValueError(f"{where}.{key}={value} must be at least 0 and {_below(most)}")
            values[key] = value
        if all(value is None for value in values.values()):
            raise ValueError(f"{where} matches {entry['match']!r} but sets neither lr nor weight_decay")
        found.append(GroupSpec(entry["match"], **values))
    return found


def grouped(
    named: Mapping[str, nn.Parameter],
    specs: Sequence[GroupSpec],
    lr: float,
    weight_decay: float,
    matrices: frozenset[int] = frozenset(),
    elsewhere: Collection[str] = (),
) -> list[ParameterGroup]:
    """What is trained, in groups; matrices decay, and norms, biases and other vectors do not.

    Args:
        named: what is trained, by name.
        specs: groups by name; each must match something.
        lr: peak learning rate of what no spec says otherwise of.
        weight_decay: of matrices, in the same way.
        matrices: ids of the parameters that Muon steps.
        elsewhere: names of what other pipeline stages train.
    """

    def first(name: str) -> int | None:
        return next((i for i, spec in enumerate(specs) if re.search(spec.match, name)), None)

    groups: dict[tuple[Any, ...], ParameterGroup] = {}
    used = {first(name) for name in elsewhere}
    for name, p in named.items():
        index = first(name)
        used.add(index)
        spec = GroupSpec("") if index is None else specs[index]
        decay = spec.weight_decay
        if decay is None:
            decay = weight_decay if p.ndim >= 2 else 0.0
        muon = id(p) in matrices
        key = (-1 if index is None else index, not muon, p.ndim < 2, decay)
        if key not in groups:
            peak = lr if spec.lr is None else spec.lr
            groups[key] = ParameterGroup(index, spec.match or None, peak, decay, muon, [])
        groups[key].parameters.append(p)
    for index, spec in enumerate(specs):
        if index not in used:
            some = ", ".join(list(named)[:3])
            raise ValueError(
                f"train.groups[{index}].match={spec.match!r} matches no parameter that is trained (or those "
                f"before it took all of them); there are {some}, …"
            )
    return [groups[key] for key in sorted(groups)]


def _below(most: float) -> str:
    return "finite" if most == float("inf") else f"at most {most:g}"
