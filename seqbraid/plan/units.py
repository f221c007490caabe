"""The units of sharding: modules whose parameters are gathered, freed and reduced together.

A rank holds its shards and, at any time, the units at work: one, the next that is on its way, and what stays
gathered. What stays, and why:
- what belongs to no unit (final norms, embeddings of positions, a tied embedding and head) over the whole
  step; a tied weight is read by the first and the last module, and its gradient is whole at the very end;
- the last decoder layer from its forward to its backward, which is the next to need it: the loss makes its
  gradients in the forward, so there is nothing to hide another gather behind;
- the head while the loss goes through its chunks. Then it is freed: its gradients are made by then, and its
  backward needs no weight. Neither does that of an embedding;
- an audio tower while all clips of a rank are encoded. It is called once for each length of clips below a
  chunk, so ranks differ in how often, and blocks of its own would be gathered by some and not by others.

Experts that lie over ranks are units of their own within their layer: a rank gathers its own experts alone,
over the ranks that share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..models.parts import ModelParts, TowerParts


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is gathered by itself."""

    name: str
    module: nn.Module
    stays_for_backward: bool = False
    """Gathered from its forward to its backward."""
    backward_reads: bool = True
    """Whether its backward needs its weights; where it does not, they are not gathered for it."""
    has_backward: bool = True
    """Whether a gradient passes through it."""
    axes: str = "fsdp"
    """The mesh over which it is sharded, in `Mesh.device_meshes`."""
    in_layer: bool = False
    """Part of a layer, and so called again where its layer is computed again."""

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All of the module's, those of units within it included."""
        return self.module.parameters()


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a model in the order of the forward, and what belongs to none of them."""

    units: tuple[Unit, ...]
    rest: tuple[nn.Parameter, ...]
    """Gathered over the whole step."""

    @staticmethod
    def of(parts: ModelParts, ep: int = 1) -> Units:
        """Parameters that two units would share are left to what lies around both. Over how many ranks the
        experts lie is `ep`.
        """
        units = tuple(_candidates(parts, ep))
        while shared := _sharing(parts.model, units):
            units = tuple(unit for unit in units if id(unit.module) not in shared)
        inside = {id(p) for unit in units for p in unit.parameters}
        return Units(units, tuple(p for p in parts.model.parameters() if id(p) not in inside))

    def own(self, unit: Unit) -> list[nn.Parameter]:
        """The parameters of a unit without those of units within it."""
        within = {id(m) for m in unit.module.modules() if m is not unit.module}
        inner = {id(p) for other in self.units if id(other.module) in within for p in other.parameters}
        return [p for p in unit.parameters if id(p) not in inner]

    def forward_prefetch(self, model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
        """What is gathered while a module computes: the next unit; and beside a layer its own units and the
        next layer, as units in a layer are called again in the backward, where nothing ahead is gathered.
        """
        found: list[tuple[nn.Module, list[nn.Module]]] = [(model, [])]
        for unit in self.units:
            found[-1][1].append(unit.module)
            if not unit.in_layer:
                found.append((unit.module, []))
        return [(module, following) for module, following in found if following]

    @property
    def backward(self) -> list[Unit]:
        """In the order of the backward, without those through which none passes."""
        whole = [unit for unit in self.units if unit.has_backward]
        # The gradient of a tower comes to what is around its blocks first, as the features did last.
        outer = [u for u in whole if any(_is_within(other, u) for other in whole)]
        order = list(reversed(whole))
        for unit in outer:
            order.remove(unit)
            order.insert(min(i for i, other in enumerate(order) if _is_within(other, unit)), unit)
        return order


def expert_cut(own: Sequence[int], shards: int) -> int:
    """The axis along which FSDP2 cuts a rank's experts: that of the experts where they divide; else, as there
    may be fewer than ranks, that of the channels behind it where these divide.
    """
    return next((dim for dim in range(min(2, len(own))) if own[dim] % shards == 0), 0)


def _candidates(parts: ModelParts, ep: int) -> Iterator[Unit]:
    reached = _learns(parts.embedding)
    yield Unit("embedding", parts.embedding, backward_reads=False, has_backward=reached)
    for tower in parts.towers:
        yield from _of_tower(tower)
        reached = reached or _learns(tower.module)
    for layer in parts.layers:
        reached = reached or _learns(layer.module)
        is_last = layer.index == len(parts.layers) - 1
        yield Unit(f"layer {layer.index}", layer.module, stays_for_backward=is_last, has_backward=reached)
        for experts in layer.experts if ep > 1 else ():
            yield Unit(
                f"experts {layer.index}",
                experts,
                stays_for_backward=is_last,
                has_backward=reached,
                axes="efsdp",
                in_layer=True,
            )
    reached = reached or _learns(parts.head)
    yield Unit("head", parts.head, backward_reads=False, has_backward=reached)


def _of_tower(tower: TowerParts) -> Iterator[Unit]:
    yield Unit(tower.kind, tower.module, has_backward=_learns(tower.module))
    if tower.kind == "audio":
        return
    apart = {id(p) for part in (*tower.blocks, *tower.mergers) for p in part.parameters()}
    reached = any(p.requires_grad for p in tower.module.parameters() if id(p) not in apart)
    for index, block in enumerate(tower.blocks):
        reached = reached or _learns(block)
        yield Unit(f"{tower.kind} block {index}", block, has_backward=reached)


def _sharing(model: nn.Module, units: Sequence[Unit]) -> set[int]:
    """The ids of unit modules that have a parameter in common with another, or with what is in none."""
    starts = {id(unit.module) for unit in units}
    owners: dict[int, set[int]] = {}

    def walk(module: nn.Module, unit: int) -> None:
        unit = id(module) if id(module) in starts else unit
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(unit)
        for child in module.children():
            walk(child, unit)

    walk(model, 0)
    return {unit for found in owners.values() if len(found) > 1 for unit in found if unit}


def _is_within(inner: Unit, outer: Unit) -> bool:
    return inner is not outer and any(module is inner.module for module in outer.module.modules())


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
