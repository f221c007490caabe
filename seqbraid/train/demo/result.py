"""What the demo found: how far its loss curves part, and what the model can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .digits import Digits
from .training import Outcome, Settings

ALLOWANCE = 10.0
"""How many times further than rounding the split training may part from one process."""
ROUNDING = 1e-6
"""A relative difference of losses in float32 that needs no explanation, ten times its unit or so."""
LEAST_ACCURACY = 0.9


@dataclass(frozen=True)
class DemoResult:
    """The trainings of one demo, side by side."""

    settings: Settings
    split: Outcome
    alone: Outcome
    backwards: Outcome
    """As `alone`, the samples of each row in reverse."""
    held_out: Digits
    stock_predictions: list[int]
    """What stock transformers reads with the checkpoint of the split training, each sample alone."""
    num_parameters: int
    seconds: float

    @property
    def differences(self) -> list[float]:
        """Step by step, of the split training's loss from one process's."""
        return relative_differences(self.split.losses, self.alone.losses)

    @property
    def floor(self) -> list[float]:
        """Step by step, of one process's loss from its own in another order of the sums."""
        return relative_differences(self.backwards.losses, self.alone.losses)

    @property
    def accuracy(self) -> float:
        """The share of held-out digits that the split training's model reads right, packed over ranks."""
        return self.split.accuracy[-1][1]

    @property
    def stock_accuracy(self) -> float:
        """The same with stock transformers, each sample alone."""
        pairs = zip(self.stock_predictions, self.held_out.labels.tolist(), strict=True)
        return sum(int(found == label) for found, label in pairs) / len(self.held_out)

    @property
    def curves_agree(self) -> bool:
        """Whether the split training never was further off than rounding, amplified by training, explains."""
        return within_floor(self.differences, self.floor)

    @property
    def holds(self) -> bool:
        """Whether the demo showed what it set out to show."""
        return self.curves_agree and self.accuracy >= LEAST_ACCURACY


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|a − b| / b, step by step."""
    return [abs(a - b) / b for a, b in zip(losses, reference, strict=True)]


def within_floor(differences: Sequence[float], floor: Sequence[float]) -> bool:
    """Whether each difference is within the allowance of the largest floor seen up to its step.

    >>> within_floor([1e-7, 4e-5, 1e-5], [0.0, 5e-6, 2e-6]), within_floor([2e-5, 4e-5], [0.0, 5e-6])
    (True, False)
    """
    largest = accumulate(floor, max, initial=ROUNDING)
    next(largest)
    return all(d <= ALLOWANCE * allowed for d, allowed in zip(differences, largest, strict=True))
