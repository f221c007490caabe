"""The verdict: every error beside its noise floor, what holds, and the reason in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .reference import Measurement

ALLOWANCE = 10.0
"""A case holds when every error is within this many times its floor."""

ROUNDINGS = 4.2
"""No floor is taken to be lower than these many roundings (5e-7 in float32), even where orders agree
to the bit.
"""

LARGEST_FLOOR = 1e-3
"""Above this a floor would let a defect pass: the number format cannot decide the case."""

NEGLIGIBLE = 1e-5
"""A gradient that is zero in exact arithmetic is all noise: it is measured against this share of the whole.
"""


def smallest_floor(dtype: torch.dtype) -> float:
    """What no floor is lower than."""
    return ROUNDINGS * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Quantity:
    """One quantity: its error, its floor, and whether it holds."""

    name: str
    error: float
    floor: float

    @property
    def ratio(self) -> float:
        """Error in floors."""
        return self.error / self.floor

    @property
    def is_decided(self) -> bool:
        """Whether the floor is low enough for the error to mean something; not a number never is."""
        return self.floor <= LARGEST_FLOOR

    @property
    def holds(self) -> bool:
        """Whether the error is within the allowance of a credible floor; not a number never is."""
        return self.is_decided and self.ratio <= ALLOWANCE

    @property
    def severity(self) -> tuple[bool, bool, float]:
        """What the worst line has most of: no decision, not a number, floors."""
        return not self.is_decided, self.ratio != self.ratio, self.ratio

    @property
    def reason(self) -> str:
        """Which rule the line breaks, with its figures."""
        if self.floor != self.floor:
            return f"{self.name} of the stock model is not a number"
        if not self.is_decided:
            return f"the floor of {self.name} is {self.floor:.1e}, above {LARGEST_FLOOR:g}"
        if self.error != self.error:
            return f"{self.name} is not a number, or not of the stock model's shape"
        return (
            f"{self.name} is off by {self.error:.1e}, {self.ratio:.3g} × its floor of {self.floor:.1e} "
            f"(allowed {ALLOWANCE:g} ×)"
        )


@dataclass(frozen=True)
class Parity:
    """The verdict on one case."""

    case: str
    lines: tuple[Quantity, ...]
    dtype: str = "float32"
    """What the lines were measured in."""
    undecided: Quantity | None = None
    """The line that float32 could not decide, where the case was decided in float64."""

    @property
    def holds(self) -> bool:
        """Whether every quantity holds."""
        return all(line.holds for line in self.lines)

    @property
    def is_decided(self) -> bool:
        """Whether every floor is low enough."""
        return all(line.is_decided for line in self.lines)

    @property
    def worst(self) -> Quantity:
        """The quantity furthest from its floor."""
        return max(self.lines, key=lambda line: (line.ratio != line.ratio, line.ratio))

    @property
    def reason(self) -> str:
        """Why the case holds or does not, in words."""
        before = ""
        if self.undecided is not None:
            before = (
                f"float32 cannot decide ({self.undecided.reason}: the stock model's own result moves that "
                "far when its sums are reordered or its weights rounded once); in float64 "
            )
        if self.holds:
            worst = f"worst {self.worst.ratio:.2f} × at {self.worst.name}"
            return f"{before}every error is within {ALLOWANCE:g} × its floor, {worst}"
        line = max(self.lines, key=lambda line: line.severity)
        if line.is_decided:
            return before + line.reason
        return f"{before}{line.reason}{', too' if before else ''}: undecided, so the case does not pass"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        lines = [asdict(line) | {"ratio": line.ratio, "holds": line.holds} for line in self.lines]
        return {
            "case": self.case,
            "holds": self.holds,
            "reason": self.reason,
            "dtype": self.dtype,
            "undecided_in_float32": None if self.undecided is None else asdict(self.undecided),
            "allowance": ALLOWANCE,
            "largest_floor": LARGEST_FLOOR,
            "lines": lines,
        }


def compare(case: str, got: Measurement, reference: Measurement, others: Sequence[Measurement]) -> Parity:
    """Errors against the reference; the floor is how far others, as right as it is, are from it."""
    dtype = reference.loss.dtype
    errors = _errors(got, reference)
    floors = [_errors(other, reference) for other in others]
    smallest = smallest_floor(dtype)
    lines = (
        Quantity(name, error, _floor([floor[name] for floor in floors], smallest))
        for name, error in errors.items()
    )
    return Parity(case, tuple(lines), str(dtype).removeprefix("torch."))


def _floor(found: Sequence[float], smallest: float) -> float:
    """The largest of those that are numbers: some families have no gradient at the zeros of left padding.

    Where none is, the reference itself is not a number, and nothing can be measured against it.
    """
    numbers = [value for value in found if value == value]
    return max([smallest, *numbers]) if numbers else float("nan")


def _errors(got: Measurement, reference: Measurement) -> dict[str, float]:
    whole = sum(float(g.double().norm()) ** 2 for g in reference.gradients.values()) ** 0.5
    errors = {"loss": _relative(got.loss, reference.loss)}
    errors["logits"] = _largest(_relative(a, b) for a, b in zip(got.logits, reference.logits, strict=True))
    for name, gradient in reference.gradients.items():
        errors[name] = _relative(got.gradients[name], gradient, at_least=NEGLIGIBLE * whole)
    return errors


def _largest(values: Iterable[float]) -> float:
    """Not a number where one is, wherever it stands."""
    return max(values, key=lambda value: (value != value, value), default=0.0)


def _relative(a: Tensor, b: Tensor, at_least: float = 0.0) -> float:
    if a.shape != b.shape:
        return float("nan")
    difference = float((a.double() - b.double()).norm())
    size = max(float(b.double().norm()), at_least)
    return difference / size if size else difference
