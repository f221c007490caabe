"""The longest sequence that a model trains on this device, for each setting of the memory switches.

A peak is affine in the number of layers: steps with two depths give that of the whole model. `layers` names
the depths, so that a model of which one step takes an hour is measured in minutes; a third depth checks what
the first two foretell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import torch

from ..mesh import Mesh
from ..plan.estimate import memory_estimate
from ..plan.memory import MemoryOptions
from .search import longest
from .trial import Trial, layer_period, run_trial, whole_model

GIB = 2**30

START = 4096


@dataclass(frozen=True)
class Limits:
    """What a step may take, in bytes."""

    device: int
    host: int
    most: int = 4 << 20
    """Tokens beyond which nothing is tried."""
    step: int = 1024
    """Lengths are multiples of this many tokens."""


@dataclass(frozen=True)
class Longest:
    """What was found for one setting."""

    memory: MemoryOptions
    depth: int
    """Layers of the whole model."""
    tokens: int | None
    """None where not even the shortest length fits."""
    peak: float = 0
    """Bytes of the whole model at that length: measured, or from two depths."""
    seconds: float = 0
    """Of a step of the whole model."""
    host_bytes: int = 0
    """What the host holds at that length, by the estimate."""
    trials: tuple[Trial, ...] = ()
    """The steps at that length."""
    checked: tuple[float, float] | None = None
    """How far the peak and the time of the third depth are from what the first two foretell, as shares."""

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return asdict(self)


@dataclass
class MaxLength:
    """The search for one model."""

    config: Any
    dtype: torch.dtype
    device: torch.device
    layers: tuple[int, ...]
    """Depths that are run; one alone is the whole model's."""
    limits: Limits
    say: Callable[[str], None] = print
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        self.model = whole_model(self.config)
        self.depth = self.model.config.get_text_config().num_hidden_layers
        period = layer_period(self.model)
        self.layers = tuple(sorted(set(self.layers))) or (self.depth,)
        alone = self.layers == (self.depth,)
        if not alone and (len(self.layers) < 2 or any(n < 1 or n % period for n in self.layers)):
            raise ValueError(
                f"layers={','.join(map(str, self.layers))}: the peak of all {self.depth} layers follows from "
                f"two depths or more, each a multiple of {period}, after which the kinds of layers repeat; "
                f"use {period},{2 * period} or leave it out"
            )
        if self.layers[-1] > self.depth:
            raise ValueError(f"layers={self.layers[-1]} is more than the model's {self.depth}")

    def find(self, memory: MemoryOptions) -> Longest:
        """The longest sequence with these switches."""
        seen: dict[int, list[Trial]] = {}

        def peak(tokens: int) -> float:
            if self._host_bytes(memory, tokens) > self.limits.host:
                return inf
            trials = self._run(self.layers[:2], tokens, memory)
            if trials is None:
                return inf
            seen[tokens] = trials
            return self._whole([trial.peak for trial in trials])

        step, most = self.limits.step, self.limits.most
        tokens = longest(peak, self.limits.device, min(START, most), most, step)
        if tokens is None:
            return Longest(memory, self.depth, None)
        trials = seen[tokens]
        peaks, times = [trial.peak for trial in trials], [trial.seconds for trial in trials]
        checked = None
        if len(self.layers) > 2:
            third = self._run(self.layers[2:3], tokens, memory)
            if third is not None:
                trials = [*trials, *third]
                foretold = self._line(peaks, self.layers[2]), self._line(times, self.layers[2])
                checked = (third[0].peak / foretold[0] - 1, third[0].seconds / foretold[1] - 1)
        host = self._host_bytes(memory, tokens)
        return Longest(
            memory, self.depth, tokens, self._whole(peaks), self._whole(times), host, tuple(trials), checked
        )

    def _run(self, layers: Sequence[int], tokens: int, memory: MemoryOptions) -> list[Trial] | None:
        found: list[Trial] = []
        for depth in layers:
            trial = run_trial(self.config, depth, tokens, memory, self.dtype, self.device)
            if trial is None:
                self.say(f"{tokens:,} tokens, {depth} layers: out of memory")
                return None
            self.say(f"{tokens:,} tokens, {depth} layers: {trial.peak / GIB:.2f} GiB, {trial.seconds:.2f} s")
            found.append(trial)
        return found

    def _whole(self, of_depths: Sequence[float]) -> float:
        return of_depths[0] if len(of_depths) == 1 else self._line(of_depths, self.depth)

    def _line(self, of_depths: Sequence[float], depth: int) -> float:
        """What two depths foretell of another."""
        (few, many), (less, more) = self.layers[:2], of_depths[:2]
        return less + (more - less) / (many - few) * (depth - few)

    def _host_bytes(self, memory: MemoryOptions, tokens: int) -> int:
        precision = "float32" if self.dtype == torch.float32 else "bfloat16"
        mesh = Mesh(rank=0, world_size=1)
        return memory_estimate(self.model, mesh, memory, precision, "sgd", tokens).host_bytes  # type: ignore[arg-type]


def switches(
    checkpointing: Sequence[str], offload: Sequence[bool], mlp_tile: int | None
) -> list[MemoryOptions]:
    """Every setting of what was asked for that there is; offload needs checkpointing."""
    return [
        MemoryOptions(kind, offload=away, mlp_tile=mlp_tile)  # type: ignore[arg-type]
        for kind in checkpointing
        for away in offload
        if not (away and kind == "none")
    ]
