"""Whether a step fits the device: `memory.checkpointing=auto`, the least that is computed again and fits, and
the smallest change that makes a step fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from ..mesh import Mesh
from .estimate import Estimate, Precision, memory_estimate
from .memory import Checkpointing, MemoryOptions
from .pipeline import PipelineOptions

LEAST_FIRST: tuple[Checkpointing, ...] = ("none", "selective", "full")

RESERVE = 0.1
"""Share of a device that the estimate leaves to fragmentation, buffers of collectives and the driver."""

MORE: tuple[dict[str, Any], ...] = ({"offload": True}, {"offload": True, "mlp_tile": 4096})
"""What takes less than full checkpointing alone, the cheapest first."""


@dataclass(frozen=True)
class AutoChoice:
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


@dataclass(frozen=True)
class EstimateInputs:
    """What is estimated, but for the switches of memory."""

    model: nn.Module
    mesh: Mesh
    precision: Precision = "mixed"
    row_tokens: int = 8192
    fused: bool = False
    optimizer: str | float = "adamw"
    pipeline: PipelineOptions | None = None

    def estimate(self, memory: MemoryOptions) -> Estimate:
        """See `memory_estimate`."""
        asked = {field.name: getattr(self, field.name) for field in fields(self)}
        return memory_estimate(memory=memory, **asked)

    def takes(self, memory: MemoryOptions) -> int:
        """Bytes of a device."""
        return self.estimate(memory).total


@dataclass(frozen=True)
class Fit:
    """How a step compares with the device."""

    estimate: int
    limit: int
    """Bytes that a step may take."""
    advice: str | None
    """Where it does not fit: the smallest change that would."""

    def __str__(self) -> str:
        said = f"a step takes an estimated {self.estimate / 2**30:.1f} GiB"
        of = f"of {self.limit / 2**30:.1f} on each device"
        return f"{said} {of}" if self.advice is None else f"{said} {of}, which may be too much: {self.advice}"


def fit(step: EstimateInputs, memory: MemoryOptions, device_bytes: int) -> Fit:
    """The estimate of a step beside the device, the smallest among the ranks, and what to change where it
    does not fit.
    """
    limit = int(device_bytes * (1 - RESERVE))
    estimate = step.takes(memory)
    return Fit(estimate, limit, None if estimate <= limit else _advice(step, memory, limit))


def choose_checkpointing(step: EstimateInputs, memory: MemoryOptions, device_bytes: int) -> AutoChoice:
    """The first of none, selective and full checkpointing whose step fits a device; full where none does.

    Args:
        step: of the run.
        memory: the other switches, which stay as they are.
        device_bytes: of a device; the smallest among the ranks, so that all choose the same.
    """
    limit = int(device_bytes * (1 - RESERVE))
    candidates: Sequence[Checkpointing] = LEAST_FIRST[1:] if memory.offload else LEAST_FIRST
    estimates: dict[str, int] = {}
    for checkpointing in candidates:
        estimates[checkpointing] = step.takes(replace(memory, checkpointing=checkpointing))
        if estimates[checkpointing] <= limit:
            return AutoChoice(checkpointing, estimates, limit)
    return AutoChoice("full", estimates, limit, _advice(step, replace(memory, checkpointing="full"), limit))


def _advice(step: EstimateInputs, memory: MemoryOptions, limit: int) -> str:
    """Switches first, which change no gradient; then shorter rows, and more ranks."""
    changes: list[dict[str, Any]] = [{"checkpointing": kind} for kind in LEAST_FIRST[1:]]
    changes += [{"checkpointing": "full", **more} for more in MORE]
    for change in changes:
        if LEAST_FIRST.index(change["checkpointing"]) < LEAST_FIRST.index(memory.checkpointing):
            continue
        tried = replace(memory, **change)
        if step.takes(tried) <= limit:
            new = {name: value for name, value in change.items() if getattr(memory, name) != value}
            return f"set {' and '.join(f'memory.{name}={_written(value)}' for name, value in new.items())}"
    for part in (2, 4, 8):
        shorter = step.row_tokens // part
        if shorter and replace(step, row_tokens=shorter).takes(memory) <= limit:
            return f"set data.row_tokens={shorter}"
    mesh = step.mesh
    for more in (2, 4, 8, 16, 32, 64):
        wider = replace(mesh, ring=mesh.ring * more, world_size=mesh.world_size * more, rank=0)
        if replace(step, mesh=wider).takes(memory) <= limit:
            return f"share the row among {more} times as many ranks, with mesh.ring={wider.ring}"
    return "shorten data.row_tokens, or share the row or the parameters among more ranks"


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
