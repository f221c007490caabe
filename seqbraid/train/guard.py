"""Steps whose gradient is a spike: told from the norms of the steps before, and left out by choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from ..comm.consensus import gather_floats
from ..mesh import Mesh

WINDOW = 64
"""Norms that a step is compared with; spikes are among them, so that a lasting change soon is none."""
FEWEST = 16
"""Norms that must be known before any step is a spike."""


class SpikeGuard:
    """Decides, the same on every rank and after a resume, whether a step's update is left out.

    >>> guard = SpikeGuard(5.0, Mesh(rank=0, world_size=1))
    >>> [guard.is_spike(norm) for norm in [1.0] * 16 + [6.0, 4.0]][-2:], guard.skipped
    ([True, False], 1)
    """

    def __init__(self, factor: float | None, mesh: Mesh) -> None:
        """
        Args:
            factor: a spike's norm is more than this many times the median; None: nothing is one.
            mesh: of the run.
        """
        self.factor, self.mesh = factor, mesh
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0
        """Steps that were left out so far."""

    def agreed(self, norm: float) -> float:
        """The first rank's norm: replicas may sum in another order, and half a step is worse than none."""
        return norm if self.factor is None else gather_floats(self.mesh.cpu_group, [norm])[0][0]

    def is_spike(self, norm: float) -> bool:
        """Whether a norm that all ranks agree on is a spike; later ones are compared with it too."""
        if self.factor is None:
            return False
        spike = len(self.norms) >= FEWEST and norm > self.factor * median(self.norms)
        self.norms.append(norm)
        self.skipped += spike
        return spike

    @property
    def usual(self) -> float:
        """The median that the next step is compared with."""
        return median(self.norms) if self.norms else 0.0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"norms": list(self.norms), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What a run had when it was saved; runs of earlier versions had none."""
        self.norms = deque(state.get("norms", []), maxlen=WINDOW)
        self.skipped = state.get("skipped", 0)
