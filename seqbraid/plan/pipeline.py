"""Which layers each pipeline stage has: by what they cost, or as the user says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

from ..models.mixers import gated_delta_sizes
from ..models.parts import LayerParts, ModelParts
from ..models.stage import Stage
from .anatomy import active_share, matrices
from .flops import seen_keys

Schedule = Literal["1f1b", "interleaved"]

LENGTH = 8192
"""Tokens of a sample that costs are compared for."""

MEDIA_TOKENS = 0.25
"""The share of its tokens that encoders are taken to make."""


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is cut into pipeline stages, and how micro-batches go through them.

    >>> PipelineOptions("interleaved").num_stages(pp=4)
    8
    """

    schedule: Schedule = "1f1b"
    """`1f1b`: one forward, one backward. `interleaved`: with several stages on each rank, so that ranks wait
    less and send more.
    """
    stages: list[int] | None = None
    """How many layers each stage has, from the first to the last; by default their costs are levelled."""
    stages_per_rank: int | None = None
    """Stages on each rank; by default 1 for `1f1b` and 2 for `interleaved`."""

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            choices = ", ".join(repr(choice) for choice in get_args(Schedule))
            raise ValueError(f"pipeline.schedule={self.schedule!r} is unknown; use one of {choices}")
        stages: Any = self.stages
        if stages is not None:
            if not all(isinstance(n, int) and n > 0 for n in stages):
                raise ValueError(f"pipeline.stages={list(stages)} must be numbers of layers, each at least 1")
            object.__setattr__(self, "stages", list(stages))
        each: Any = self.stages_per_rank
        fewest = 1 if self.schedule == "1f1b" else 2
        if each is not None and (not isinstance(each, int) or each < fewest or (fewest == 1 and each > 1)):
            raise ValueError(
                f"pipeline.stages_per_rank={each!r} must be "
                + (
                    "1 for 1f1b; use pipeline.schedule=interleaved"
                    if fewest == 1
                    else "at least 2 for interleaved"
                )
            )

    def num_stages(self, pp: int) -> int:
        """Of all ranks."""
        return pp * (self.stages_per_rank or (1 if self.schedule == "1f1b" else 2))

    def waiting(self, pp: int, micro_batches: int) -> float:
        """The share of a step that ranks wait where all stages are alike.

        >>> PipelineOptions().waiting(pp=4, micro_batches=12)
        0.2
        """
        each = self.num_stages(pp) // pp
        return (pp - 1) / (each * micro_batches + pp - 1)

    def in_flight(self, pp: int, rank: int) -> float:
        """Micro-batches whose activations a rank holds at the most, in those of all its layers."""
        if self.schedule == "1f1b":
            return pp - rank
        each = self.num_stages(pp) // pp
        return (2 * (pp - rank - 1) + (each - 1) * pp + 1) / each


def cut_into_stages(parts: ModelParts, pp: int, options: PipelineOptions) -> tuple[Stage, ...]:
    """All stages of a model, in their order; `ValueError` where it cannot be cut so."""
    count, layers = options.num_stages(pp), len(parts.layers)
    name = type(parts.model).__name__
    if count > layers:
        raise ValueError(
            f"{name} has {layers} layers, too few for {count} stages (pp={pp} with "
            f"{count // pp} on each rank); use pp of at most {layers // (count // pp)}"
        )
    first = max(1, deepstack_layers(parts))
    if options.stages is None:
        sizes = _level(stage_costs(parts), count, first, name)
    else:
        sizes = list(options.stages)
        if len(sizes) != count or sum(sizes) != layers:
            raise ValueError(
                f"pipeline.stages={sizes} are {len(sizes)} stages of {sum(sizes)} layers; {name} on pp={pp} "
                f"needs {count} stages of {layers} layers in all"
            )
        if sizes[0] < first:
            raise ValueError(
                f"pipeline.stages={sizes} gives the first stage {sizes[0]} layers, but {name} adds DeepStack "
                f"features behind its first {first}, which only the first stage has; give it at least {first}"
            )
    ends = list(accumulate(sizes, initial=0))
    return tuple(Stage(i, count, range(a, b)) for i, (a, b) in enumerate(pairwise(ends)))


def deepstack_layers(parts: ModelParts) -> int:
    """Behind how many of the first layers features of media are added."""
    vision = parts.tower("vision")
    levels = None if vision is None else getattr(vision.module.config, "deepstack_visual_indexes", None)
    return len(levels or ())


def stage_costs(parts: ModelParts) -> tuple[list[float], float, float]:
    """What each layer costs for a token, the media encoders before and the head behind them."""
    try:
        layers = [_layer_cost(parts, layer) for layer in parts.layers]
    except ValueError:  # a layer that we cannot count costs what the others do
        return [1.0] * len(parts.layers), 0.0, 0.0
    before = sum(
        2.0 * p.numel() * MEDIA_TOKENS * _merged(tower.module)
        for tower in parts.towers
        for p in tower.module.parameters()
        if p.ndim >= 2
    )
    behind = 2.0 * parts.head.weight.numel()
    if parts.mtp is not None:  # on the last stage, with the head once more for each depth
        depths = parts.mtp.of_depths
        own = 2.0 * parts.mtp.module.fc.weight.numel()
        behind += sum(behind + own + _layer_cost(parts, layer) for layer in depths)
    return layers, before, behind


def _merged(tower: Any) -> int:
    """Patches that become a token."""
    return int(getattr(tower.config, "spatial_merge_size", 1)) ** 2


def _layer_cost(parts: ModelParts, layer: LayerParts) -> float:
    cost = sum(2.0 * p.numel() * active_share(parts, p, name) for name, p in matrices(parts, layer.module))
    if layer.kind == "gated_delta":
        sizes = gated_delta_sizes(layer.mixer)
        return cost + 6.0 * sizes.num_values * sizes.key_size * sizes.value_size
    if layer.mixer is not None:
        heads = parts.heads(layer)
        pairs = seen_keys(LENGTH, layer.window) / LENGTH
        cost += 2.0 * heads.num_queries * (heads.key_size + heads.value_size) * pairs
    return cost


def _level(costs: tuple[Sequence[float], float, float], count: int, first: int, model: str) -> list[int]:
    """How many layers each stage gets so that the most expensive stage costs least."""
    layers, before, behind = costs
    sums = list(accumulate(layers, initial=0.0))
    total = len(layers)
    if total - (count - 1) < first:
        raise ValueError(
            f"{model} adds DeepStack features behind its first {first} layers, which must all be on the "
            f"first of {count} stages, but has {total} layers; use at most {max(1, total - first + 1)} stages"
        )
    # best[n][end]: the least that the most expensive of n stages can cost that have `end` layers in all.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for n in range(1, count + 1):
        row: dict[int, tuple[float, int]] = {}
        fewest = first if n == 1 else 1
        for end in range(n - 1 + first, total - (count - n) + 1) if n < count else [total]:
            extra = (before if n == 1 else 0.0) + (behind if n == count else 0.0)
            found = [
                (max(best[n - 1][start][0], sums[end] - sums[start] + extra), start)
                for start in best[n - 1]
                if end - start >= fewest
            ]
            row[end] = min(found)
        best.append(row)
    ends = [total]
    for n in range(count, 0, -1):
        ends.append(best[n][ends[-1]][1])
    return [b - a for a, b in pairwise(reversed(ends))]
