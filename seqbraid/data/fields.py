"""Fields of samples: what a loss wants of each token or sample beside ids and labels.

Entry t of a token's field belongs to label t, as labels do: unshifted, and shifted with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models.batch import WEIGHTS


class Fields:
    """The fields of a row's samples, added one by one."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._has_weights = any(WEIGHTS in _fields_of(sample) for sample in samples)
        self._names: list[str] | None = None
        self._tokens: dict[str, list[Tensor]] = {}
        self._scalars: dict[str, list[Tensor]] = {}

    def add(self, sample: Mapping[str, Any], length: int) -> None:
        """Check a sample's fields, and shift those of tokens."""
        fields = dict(_fields_of(sample))
        if self._has_weights:  # beside samples whose labels count once
            fields.setdefault(WEIGHTS, torch.ones(length))
        names = sorted(fields)
        if self._names is None:
            self._names = names
        elif names != self._names:
            raise ValueError(
                f"it has the fields {', '.join(names) or 'none'}, the first sample of the row has "
                f"{', '.join(self._names) or 'none'}; give all samples of a step the same fields"
            )
        for name, value in fields.items():
            values = _checked(name, value, length)
            where = self._tokens if values.ndim else self._scalars
            where.setdefault(name, []).append(shifted_values(values) if values.ndim else values)
        if both := self._tokens.keys() & self._scalars.keys():
            raise ValueError(
                f"its field {min(both)!r} is one number in some samples of the row and one for each token in "
                "others; give it in one form"
            )

    def joined(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Those of tokens `[T, …]` and of samples `[N]`, of the whole row."""
        try:
            tokens = {name: torch.cat(parts) for name, parts in self._tokens.items()}
        except RuntimeError as error:
            shapes = {name: sorted({tuple(x.shape[1:]) for x in xs}) for name, xs in self._tokens.items()}
            raise ValueError(f"samples of a row have fields of other shapes: {shapes} ({error})") from None
        return tokens, {name: torch.stack(parts) for name, parts in self._scalars.items()}


def shifted_values(values: Tensor) -> Tensor:
    """What belongs to a label, at the token that is to predict it; 0 at the last, which predicts nothing.

    >>> shifted_values(torch.tensor([5.0, 6.0, 7.0])).tolist()
    [6.0, 7.0, 0.0]
    """
    found = values.roll(-1, 0)
    found[-1] = 0
    return found


def _fields_of(sample: Any) -> Mapping[str, Any]:
    fields = sample.get("fields") if isinstance(sample, Mapping) else None
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"fields is a {type(fields).__name__}; it is a dict of tensors [T, …] or numbers, by name"
        )
    return fields


def _checked(name: str, value: Any, length: int) -> Tensor:
    try:
        values = torch.as_tensor(np.asarray(value) if isinstance(value, list | tuple) else value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"field {name!r} cannot be made a tensor of ({error}); give numbers") from None
    if values.dtype == torch.float64 and not isinstance(value, Tensor):  # what Python's numbers become
        values = values.float()
    if name == WEIGHTS:
        if values.ndim != 1 or not values.is_floating_point():
            values = values.float()
        if values.ndim != 1 or not (values.isfinite().all() and (values >= 0).all()):
            raise ValueError(
                f"field {WEIGHTS!r} must be [T] numbers of 0 and above, one for each label; it has shape "
                f"{tuple(values.shape)}" + ("" if values.ndim != 1 else f" and holds {float(values.min())}")
            )
    if values.ndim and len(values) != length:
        raise ValueError(
            f"field {name!r} has {len(values)} entries for {length} input_ids; give one for each token, that "
            "of entry t belonging to label t, or one number for the sample"
        )
    return values.cpu()
