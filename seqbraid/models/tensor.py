"""What tensor parallel ranks share of a model: which matrices are cut, and which rows of others a rank uses.

A mixer or MLP is given all tokens of the ranks and works with its own heads or channels; between them a rank
has its own tokens. Nothing is computed by two ranks:
- matrices are cut by heads, channels or tokens of the vocabulary (`ShardedWeight`);
- what a rank uses some rows of, without the cut being even (key heads for several ranks, rows that lie in
  sections), is whole when it is gathered, as all is that works on a rank's own tokens or heads: norms,
  routers, experts, towers, LoRA (`Chosen`). The ranks' gradients of those add up to the whole one.

`tensor_regions.py` finds what is what in a mixer or MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ..mesh import Mesh
from .lora import lora_of
from .parts import ModelParts
from .tensor_parts import Region, ShardedWeight
from .tensor_probe import parts_make_the_whole
from .tensor_regions import regions_of


@dataclass(frozen=True, eq=False)
class TensorPlan:
    """How the matrices of a model are shared; made before anything is changed, alike on all ranks."""

    size: int
    vocabulary: int
    """All tokens of it."""
    embedding: ShardedWeight
    head: ShardedWeight
    regions: tuple[tuple[Region, ...], ...]
    """Of each layer."""

    @staticmethod
    def of_mesh(parts: ModelParts, mesh: Mesh) -> TensorPlan:
        """Of this rank."""
        return TensorPlan.of(parts, mesh.tp, mesh.axis_rank("tp"))

    @staticmethod
    def of(parts: ModelParts, size: int, rank: int = 0, is_tried: bool = True) -> TensorPlan:
        """`ValueError` where a model cannot be shared by so many, naming the part and what can.

        Without `is_tried`, names and shapes are all that is looked at: for a model that is shared already.
        """
        model = type(parts.model).__name__
        vocabulary = int(parts.head.weight.shape[0])
        if vocabulary_rows(vocabulary, size, size - 1).start >= vocabulary:
            raise ValueError(
                f"tp={size} is too large for the {vocabulary} tokens of the vocabulary of {model}"
            )
        _check_embedding(parts, size)
        if is_tried:
            _check_parts(parts, size)
        layers = tuple(tuple(regions_of(parts, layer, size, rank)) for layer in parts.every_layer)
        plan = TensorPlan(
            size, vocabulary, ShardedWeight(parts.embedding, 0), ShardedWeight(parts.head, 0), layers
        )
        plan._check_shared(parts)
        return plan

    def kept(self, parts: ModelParts) -> TensorPlan:
        """Of the pipeline stages that a rank has left."""
        own = {layer.index for layer in parts.every_layer}
        regions = tuple(layer if index in own else () for index, layer in enumerate(self.regions))
        embedding, head = (
            replace(self.embedding, module=parts.embedding),
            replace(self.head, module=parts.head),
        )
        return replace(self, embedding=embedding, head=head, regions=regions)

    @property
    def cuts(self) -> Iterator[ShardedWeight]:
        """All of them, a tied weight twice."""
        yield self.embedding
        yield self.head
        for layer in self.regions:
            for region in layer:
                yield from region.cuts

    @property
    def cut_parameters(self) -> frozenset[int]:
        """The ids of all parameters that are cut."""
        return frozenset(id(p) for cut in self.cuts for p in cut.module.parameters())

    @cached_property
    def inside(self) -> frozenset[int]:
        """The ids of modules that see a rank's part of heads or channels; adapters draw dropout as
        one rank would."""
        adapters = {id(a.lora.dropout) for layer in self.regions for region in layer for a in region.adapted}
        modules = (m for layer in self.regions for region in layer for m in region.module.modules())
        return frozenset(map(id, modules)) - adapters

    def check_step(self, model: str, dropping: Mapping[str, nn.Dropout]) -> None:
        """Refuse what was changed after the plan was made, and ranks that share heads cannot do."""
        for name, module in dropping.items():
            if id(module) in self.inside:
                raise ValueError(
                    f"{model} trains with dropout at {name!r}, among heads or channels that tp={self.size} "
                    "shares out; set it to 0 or use tp=1"
                )
        for region in (region for layer in self.regions for region in layer):
            for adapted in region.adapted:
                lora = adapted.lora
                if lora.is_on or lora.layer.merged:
                    lora_of(lora.layer, f"a layer of the {type(region.module).__name__} of {model}")

    def _check_shared(self, parts: ModelParts) -> None:
        found: dict[int, nn.Module] = {}
        tied = {id(parts.embedding), id(parts.head)}
        for cut in self.cuts:
            for p in cut.module.parameters():
                other = found.setdefault(id(p), cut.module)
                if other is not cut.module and not {id(other), id(cut.module)} <= tied:
                    raise ValueError(
                        f"layers of {type(parts.model).__name__} share a weight, which tp={self.size} does "
                        "not cut yet; use tp=1"
                    )


def vocabulary_rows(vocabulary: int, size: int, rank: int) -> slice:
    """The tokens of a rank, cut as `torch.chunk` does.

    >>> vocabulary_rows(97, 2, 1)
    slice(49, 97, None)
    """
    widest = -(-vocabulary // size)
    return slice(min(vocabulary, rank * widest), min(vocabulary, (rank + 1) * widest))


def _check_embedding(parts: ModelParts, size: int) -> None:
    name = type(parts.model).__name__
    if not isinstance(parts.embedding, nn.Embedding):
        raise ValueError(
            f"tp={size} cuts the embedding of {name} by tokens, but it is a "
            f"{type(parts.embedding).__name__}; use tp=1"
        )
    if parts.other_embeddings:
        raise ValueError(
            f"{name} has {len(parts.other_embeddings)} embeddings beside that of its tokens, which tp={size} "
            "does not know to share; use tp=1"
        )


def _check_parts(parts: ModelParts, size: int) -> None:
    """One mixer and MLP of each class and size is tried."""
    tried: set[Any] = set()
    for layer in parts.every_layer:
        of_ranks = zip(*(regions_of(parts, layer, size, rank) for rank in range(size)), strict=True)
        for regions in of_ranks:
            region = regions[0]
            shapes = tuple(tuple(cut.module.weight.shape) for cut in region.cuts)
            if layer.kind == "gated_delta" and region.module is layer.mixer:
                continue  # whose forward is ours
            if (key := (type(region.module), shapes)) in tried:
                continue
            tried.add(key)
            is_mixer = region.module is layer.mixer
            found = parts_make_the_whole(regions, parts.heads(layer).key_size if is_mixer else None)
            if found is False or (region.must_be_seen and not found):
                raise ValueError(
                    f"the {'attention' if is_mixer else 'MLP'} of layer {layer.index} of "
                    f"{type(parts.model).__name__} ({type(region.module).__name__}) does not give in {size} "
                    f"parts what it gives whole, so tp={size} cannot share it; use tp=1"
                )
