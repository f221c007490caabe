"""`memory.checkpointing=auto`: the least that is computed again and still fits the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..mesh import Mesh
from .estimate import Precision, memory_estimate
from .memory import Checkpointing, MemoryOptions

LEAST_FIRST: tuple[Checkpointing, ...] = ("none", "selective", "full")

RESERVE = 0.1
"""Share of a device that the estimate leaves to fragmentation, buffers of collectives and the driver."""

MORE: tuple[dict[str, Any], ...] = ({"offload": True}, {"offload": True, "mlp_tile": 4096})
"""What takes less than full checkpointing alone, the cheapest first."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    checkpointing: Checkpointing
    estimates: dict[str, int]
    """Bytes of the settings that were looked at, the last of them the chosen one."""
    limit: int
    """Bytes that a step may take."""
    advice: str | None = None
    """Where not even this fits: what would."""

    @property
    def estimate(self) -> int:
        """Bytes that the step is estimated to take."""
        return self.estimates[self.checkpointing]

    def __str__(self) -> str:
        gib = {name: f"{size / 2**30:.1f}" for name, size in self.estimates.items()}
        passed = [f"{name!r} would take {gib[name]}" for name in self.estimates if name != self.checkpointing]
        said = (
            f"memory.checkpointing=auto is {self.checkpointing!r}: a step takes an estimated "
            f"{gib[self.checkpointing]} GiB of {self.limit / 2**30:.1f} on each device"
        )
        said += f" ({', '.join(passed)})" if passed else ""
        return said if self.advice is None else f"{said}. That may be too much: {self.advice}"


def choose_checkpointing(
    model: nn.Module,
    mesh: Mesh,
    memory: MemoryOptions,
    device_bytes: int,
    precision: Precision = "mixed",
    row_tokens: int = 8192,
    fused: bool = False,
) -> Choice:
    """The first of none, selective and full checkpointing whose step fits a device; full where none does.

    Args:
        model, mesh, precision, row_tokens, fused: as `memory_estimate` has them.
        memory: the other switches, which stay as they are.
        device_bytes: of a device; the smallest among the ranks, so that all choose the same.
    """
    limit = int(device_bytes * (1 - RESERVE))

    def takes(options: MemoryOptions) -> int:
        return memory_estimate(model, mesh, options, precision, row_tokens=row_tokens, fused=fused).total

    candidates: Sequence[Checkpointing] = LEAST_FIRST[1:] if memory.offload else LEAST_FIRST
    estimates: dict[str, int] = {}
    for checkpointing in candidates:
        estimates[checkpointing] = takes(replace(memory, checkpointing=checkpointing))
        if estimates[checkpointing] <= limit:
            return Choice(checkpointing, estimates, limit)
    return Choice("full", estimates, limit, _advice(memory, takes, limit))


def _advice(memory: MemoryOptions, takes: Any, limit: int) -> str:
    for more in MORE:
        options = replace(memory, checkpointing="full", **more)
        if options != replace(memory, checkpointing="full") and takes(options) <= limit:
            names = " and ".join(f"memory.{name}={str(value).lower()}" for name, value in more.items())
            return f"set {names}"
    return "shorten data.row_tokens, or share the row or the parameters among more ranks"
