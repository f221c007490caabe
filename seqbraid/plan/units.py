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

Under tensor parallelism what is cut over `tp` is gathered over `fsdp`, all else over fsdp × tp (`tokens`): a
layer is then a unit of norms, routers and whatever is not cut, with a unit for each matrix of its mixer and
each MLP within it. Experts that lie over ranks are units of their own within their layer as well: a rank
gathers its own experts alone, over the ranks that share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..models.parts import ModelParts, TowerParts
from ..models.tensor import TensorPlan
from ..models.tensor_parts import Region


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
    begins_stage: bool = False
    """Whether another pipeline stage lies between this unit and the one before."""

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
    rest_axes: str = "fsdp"

    @staticmethod
    def of(parts: ModelParts, ep: int = 1, tensor: TensorPlan | None = None) -> Units:
        """Parameters that two units would share are left to what lies around both. Over how many ranks the
        experts lie is `ep`; `tensor` says what is cut over `tp`.
        """
        units = tuple(unit for unit in _candidates(parts, ep, tensor) if any(True for _ in unit.parameters))
        while shared := _sharing(parts.model, units):
            units = tuple(unit for unit in units if id(unit.module) not in shared)
        inside = {id(p) for unit in units for p in unit.parameters}
        cut = frozenset[int]() if tensor is None else tensor.cut_parameters
        if not cut <= inside:  # a tied weight, which is then all that is left
            units += tuple(_others(parts.model, inside | cut))
            inside = {id(p) for unit in units for p in unit.parameters}
        rest = tuple(p for p in parts.model.parameters() if id(p) not in inside)
        return Units(units, rest, "tokens" if tensor is not None and cut <= inside else "fsdp")

    def own(self, unit: Unit) -> list[nn.Parameter]:
        """The parameters of a unit without those of units within it."""
        within = {id(m) for m in unit.module.modules() if m is not unit.module}
        inner = {id(p) for other in self.units if id(other.module) in within for p in other.parameters}
        return [p for p in unit.parameters if id(p) not in inner]

    def forward_prefetch(self, model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
        """What is gathered while a module computes: the next unit; and beside a layer its own units and the
        next layer with the matrices that are cut over `tp`, which are most of it. Units in a layer are called
        again in the backward, where nothing ahead is gathered.
        """
        found: list[tuple[nn.Module, list[nn.Module]]] = [(model, [])]
        of_several = any(unit.begins_stage for unit in self.units)  # then the model is called for each
        for unit in self.units:
            if not (unit.begins_stage or (of_several and unit is self.units[0])):
                found[-1][1].append(unit.module)
            if not unit.in_layer:
                found.append((unit.module, []))
            elif unit.axes == "fsdp":
                found[-2][1].append(unit.module)
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


def _candidates(parts: ModelParts, ep: int, tensor: TensorPlan | None) -> Iterator[Unit]:
    whole = "fsdp" if tensor is None else "tokens"
    reached = _learns(parts.embedding)
    yield Unit("embedding", parts.embedding, backward_reads=False, has_backward=reached)
    for tower in parts.towers:
        for unit in _of_tower(tower):
            yield replace(unit, axes=whole)
        reached = reached or _learns(tower.module)
    for number, layer in enumerate(parts.every_layer):
        if parts.mtp is not None and layer is parts.mtp.layers[0]:
            reached = reached or _learns(parts.mtp.module)
            yield Unit("mtp", parts.mtp.module, has_backward=reached, axes=whole)
        reached = reached or _learns(layer.module)
        is_last = layer.index == len(parts.layer_list) - 1
        behind = 0 < number < len(parts.layers)
        begins = behind and parts.layers[number - 1].index != layer.index - 1
        of_layer = Unit(f"layer {layer.index}", layer.module, is_last, has_backward=reached, axes=whole)
        yield replace(of_layer, begins_stage=begins)
        for region in () if tensor is None else tensor.regions[layer.index]:
            for part, module in _of_region(region):
                name = f"layer {layer.index} {part}"
                yield replace(of_layer, name=name, module=module, axes="fsdp", in_layer=True)
        for experts in layer.experts if ep > 1 else ():
            name = f"experts {layer.index}"
            yield replace(of_layer, name=name, module=experts, axes="efsdp", in_layer=True)
    reached = reached or _learns(parts.head)
    yield Unit("head", parts.head, backward_reads=False, has_backward=reached)


def _of_region(region: Region) -> Iterator[tuple[str, nn.Module]]:
    if region.is_whole:
        yield region.name, region.module
        return
    names = {id(module): name for name, module in region.module.named_modules()}
    for cut in region.cuts:
        yield names[id(cut.module)], cut.module


def _others(model: nn.Module, inside: set[int]) -> Iterator[Unit]:
    """Modules that have parameters of their own outside of all units."""
    for name, module in model.named_modules():
        if any(id(p) not in inside for p in module.parameters(recurse=False)):
            yield Unit(name, module, stays_for_backward=True, axes="tokens")


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
