"""Parts of a model that tensor parallel ranks share: matrices that are cut, rows that a rank uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from .lora import Lora


@dataclass(frozen=True, eq=False)
class ShardedWeight:
    """A layer whose weight the ranks share by rows or by columns, evenly but for the last."""

    module: nn.Module
    dim: int
    """0 where each rank makes some of the outputs; 1 where each takes some of the inputs, and gives
    a partial sum.
    """


@dataclass(frozen=True, eq=False)
class Chosen:
    """A parameter that is whole when it is gathered, and of which a rank uses some rows."""

    module: nn.Module
    name: str
    rows: tuple[slice, ...]
    """Of this rank."""
    repeated: tuple[int, ...] = ()
    """Where query heads share key heads unevenly: for each query head of this rank its key head among those
    of the rank.
    """

    def of(self, whole: Tensor) -> Tensor:
        """This rank's rows; a view where they lie together."""
        parts = [whole[rows] for rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Adapted:
    """LoRA beside a layer that the ranks share, `W·x + s·B·A·x`. Where the layer makes some of the outputs, A
    works on a rank's own tokens and B makes the same outputs; where it takes some of the inputs, A takes the
    same and B works on a rank's own tokens. Both are whole when they are gathered.
    """

    lora: Lora
    outputs: Chosen | None
    """Of B; None where the layer takes some of the inputs."""
    inputs: slice | None = None
    """Of A; None where the layer takes all."""


@dataclass(frozen=True, eq=False)
class Region:
    """A mixer or MLP: it takes the tokens of all ranks, and gives a partial sum for each."""

    name: str
    """How its sharding unit is called beside its layer's."""
    module: nn.Module
    cuts: tuple[ShardedWeight, ...]
    chosen: tuple[Chosen, ...] = ()
    attributes: tuple[tuple[str, int], ...] = ()
    """Numbers of heads that the stock forward reads, as they are on this rank."""
    must_be_seen: bool = False
    """Whether names and shapes do not say enough: whether parts make the whole must be tried."""
    adapted: tuple[Adapted, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all of its parameters are cut, so that it is gathered as one."""
        cut = {id(p) for cut in self.cuts for p in cut.module.parameters()}
        return all(id(p) in cut for p in self.module.parameters())


def own_part(x: Any) -> Any:
    """This rank's part of what lies over ranks, the same memory; anything else as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def whole_tensor(x: Any) -> Tensor:
    """All of what lies over ranks, on each of them, without a gradient; every rank of its mesh calls it."""
    x = x.detach()
    if not isinstance(x, DTensor):
        return x
    # One axis after the other, as `full_tensor` does it too, with a warning that orders of sums may differ:
    # there are none. What FSDP2 cut of a rank's part (strided) comes first, then what was cut before it.
    axes = sorted(
        range(len(x.placements)), key=lambda n: (not isinstance(x.placements[n], _StridedShard), -n)
    )
    for axis in axes:
        placements = list(x.placements)
        placements[axis] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()
