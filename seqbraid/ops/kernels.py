"""The table of kernels: which candidate computes an op, and why not the others.

An op has candidates in order of preference, the last of which takes everything. Each says itself why it
cannot be used: it does not support the dtype, device or shapes, it is not installed, or it gives wrong
results here. The choice belongs to a model and travels in the step's context; nothing is process-wide.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class KernelOptions:
    """Which kernels compute a model: `auto` uses the first of each op that is installed,
    applicable and correct.

    A kernel that is asked for by name and is not installed is refused. Where it does not support the tensors
    (float32, another device), `auto` decides.
    """

    attention: str = AUTO
    """`torch`, `flash_attention_3`, `flash_attention_4`, or a kernel of the Hub (`owner/name`)."""
    gated_delta: str = AUTO
    """`flash_qla` (FlashQLA), `fla` (flash-linear-attention) or `torch`."""
    convolution: str = AUTO
    """The short convolution of gated-delta layers: `fla` or `torch`."""
    merge: str = AUTO
    """Sums over the blocks of a ring: `triton` or `torch`."""
    loss: str = AUTO
    """Cross entropy of the rows of a chunk: `triton` or `torch`."""
    norm: str = AUTO
    """RMSNorm of a decoder's tokens, queries and keys: `triton` or `torch` (the stock modules)."""
    rotary: str = AUTO
    """The rotation of queries and keys: `triton` or `torch` (the stock function)."""
    swiglu: str = AUTO
    """silu(gate) · up of MLPs: `triton` or `torch` (the stock modules)."""
    experts: str = AUTO
    """Matrix products of experts: `grouped_mm` (torch's, all experts in one call) or `torch` (a loop)."""


def needs_16_bits_on_a_gpu(need: Any) -> str | None:
    """What most packages of kernels are made for; a need names its device and dtype."""
    if need.device.type != "cuda":
        return "its kernels need a GPU"
    if need.dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels take 16-bit numbers, not {need.dtype}"
    return None


def _no_reason(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Candidate:
    """A kernel that may compute an op, and the reasons against it; None where there is none."""

    name: str
    unfit: Callable[[Any], str | None] = _no_reason
    """Device, dtype and shapes: what the op is needed for."""
    missing: Callable[[], str | None] = _no_reason
    """Package and version."""
    wrong: Callable[[Any], str | None] = _no_reason
    """Results that are off: a comparison that failed, a compiler known to break it."""

    def why_not(self, need: Hashable) -> str | None:
        """The first reason, the cheapest first."""
        return self.unfit(need) or self.missing() or self.wrong(need)


@dataclass(frozen=True)
class Op:
    """Something that several kernels can compute."""

    name: str
    """As `KernelOptions` has it."""
    candidates: tuple[Candidate, ...]
    other: Callable[[str], Candidate | None] = _no_reason
    """The candidate of a name that is not in the list; None where there is none."""

    def candidate(self, name: str) -> Candidate:
        """The candidate of this name."""
        found = next((c for c in self.candidates if c.name == name), None) or self.other(name)
        if found is None:
            known = ", ".join(repr(known) for known in (AUTO, *(c.name for c in self.candidates)))
            raise ValueError(f"kernels.{self.name}={name!r} is not a kernel for this op; use one of {known}")
        return found

    def check(self, options: KernelOptions) -> None:
        """Refuse an option that names a kernel which is not installed."""
        wish = getattr(options, self.name)
        reason = None if wish == AUTO else self.candidate(wish).missing()
        if reason is not None:
            raise ValueError(f"kernels.{self.name}={wish!r} cannot be used: {reason}; or use {AUTO!r}")


@dataclass(frozen=True)
class Kernels:
    """The choices of one model."""

    options: KernelOptions = KernelOptions()
    _chosen: dict[tuple[str, Hashable], str] = field(default_factory=dict, compare=False, repr=False)

    def choose(self, op: Op, need: Hashable) -> str:
        """The name of the kernel that computes this; said once in the log."""
        key = (op.name, need)
        if key not in self._chosen:
            self._chosen[key] = self._wished(op, need) or self._first(op, need)
        return self._chosen[key]

    def _wished(self, op: Op, need: Hashable) -> str | None:
        wish = getattr(self.options, op.name)
        if wish == AUTO:
            return None
        candidate = op.candidate(wish)
        if candidate.unfit(need) is not None:
            return None
        reason = candidate.missing() or candidate.wrong(need)
        if reason is not None:
            raise ValueError(f"kernels.{op.name}={wish!r} cannot be used: {reason}; or use {AUTO!r}")
        return candidate.name

    @staticmethod
    def _first(op: Op, need: Hashable) -> str:
        passed: list[str] = []
        for candidate in op.candidates:
            reason = candidate.unfit(need) or candidate.missing()
            if reason is None:
                reason = candidate.wrong(need)
                if reason is None:
                    logger.info("%s by %s for %s %s", op.name, candidate.name, need, "; ".join(passed))
                    return candidate.name
                warnings.warn(f"{candidate.name} is not used for {op.name}: {reason}", stacklevel=4)
            passed.append(f"not {candidate.name}: {reason}")
        raise AssertionError(f"the last candidate of {op.name} takes everything: {passed}")


DEFAULT = Kernels()
"""For calls that come from no model: all `auto`."""
