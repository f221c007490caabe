"""Parity: errors of loss, logits and every parameter gradient against stock, beside the noise floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..data.pack import pack
from ..mesh import Mesh
from ..parallelize.api import parallelize
from .reference import Measurement, fresh_gradients, stock_step

ALLOWANCE = 10.0
"""A case holds when every error is within this many times its floor."""

SMALLEST_FLOOR = 5e-7
"""No floor is taken to be lower than a few roundings of float32, even where two orders agree to the bit."""

LARGEST_FLOOR = 1e-2
"""A floor above this would let anything pass: the orders compared were not equally valid."""

NEGLIGIBLE = 1e-5
"""A gradient that is zero in exact arithmetic is all noise: it is measured against this share of the whole.
"""


@dataclass(frozen=True)
class Line:
    """One quantity: its error, its floor, and whether it holds."""

    name: str
    error: float
    floor: float

    @property
    def ratio(self) -> float:
        """Error in floors."""
        return self.error / self.floor

    @property
    def holds(self) -> bool:
        """Whether the error is within the allowance of a credible floor; not a number never is."""
        return self.floor <= LARGEST_FLOOR and self.ratio <= ALLOWANCE


@dataclass(frozen=True)
class Parity:
    """The verdict on one case."""

    case: str
    lines: tuple[Line, ...]

    @property
    def holds(self) -> bool:
        """Whether every quantity holds."""
        return all(line.holds for line in self.lines)

    @property
    def worst(self) -> Line:
        """The quantity furthest from its floor."""
        return max(self.lines, key=lambda line: (line.ratio != line.ratio, line.ratio))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        lines = [asdict(line) | {"ratio": line.ratio, "holds": line.holds} for line in self.lines]
        return {"case": self.case, "holds": self.holds, "allowance": ALLOWANCE, "lines": lines}


def check_parity(
    model: PreTrainedModel,
    samples: Sequence[dict[str, Any]],
    mesh: Mesh | None = None,
    case: str = "",
    policy: str = "balanced",
    **layout: Any,
) -> Parity:
    """Compare a packed step with the stock model on each sample alone; the model comes back as it was."""
    reference = stock_step(model, samples)
    others = [
        stock_step(model, samples, left_padding=3, backwards=True),
        stock_step(model, samples, left_padding=37),
    ]
    return compare(case, packed_step(model, samples, mesh, policy=policy, **layout), reference, others)


def packed_step(
    model: PreTrainedModel, samples: Sequence[dict[str, Any]], mesh: Mesh | None = None, **layout: Any
) -> Measurement:
    """The same step through the public surface."""
    with fresh_gradients(model):
        braided = parallelize(model, mesh)
        try:
            batch = pack(samples, model.config, mesh, **layout)
            logits = braided.logits(batch)
            output = braided(batch)
            output.loss.backward()
            gradients = {
                name: p.new_zeros(p.shape) if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        finally:
            braided.release()
    return Measurement(output.loss.detach(), logits, gradients)


def compare(case: str, got: Measurement, reference: Measurement, others: Sequence[Measurement]) -> Parity:
    """Errors against the reference; the floor is how far its other, equally valid orders are from it."""
    errors = _errors(got, reference)
    floors = [_errors(other, reference) for other in others]
    return Parity(
        case,
        tuple(
            Line(name, error, max(SMALLEST_FLOOR, *(floor[name] for floor in floors)))
            for name, error in errors.items()
        ),
    )


def _errors(got: Measurement, reference: Measurement) -> dict[str, float]:
    whole = sum(float(g.double().norm()) ** 2 for g in reference.gradients.values()) ** 0.5
    errors = {"loss": _relative(got.loss, reference.loss)}
    errors["logits"] = max(_relative(a, b) for a, b in zip(got.logits, reference.logits, strict=True))
    for name, gradient in reference.gradients.items():
        errors[name] = _relative(got.gradients[name], gradient, at_least=NEGLIGIBLE * whole)
    return errors


def _relative(a: Tensor, b: Tensor, at_least: float = 0.0) -> float:
    if a.shape != b.shape:
        return float("nan")
    difference = float((a.double() - b.double()).norm())
    size = max(float(b.double().norm()), at_least)
    return difference / size if size else difference
