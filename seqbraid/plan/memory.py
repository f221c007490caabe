"""Switches that trade time for memory; none of them changes a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..models.braided import ReduceGradients

Checkpointing = Literal["none", "selective", "full", "auto"]


@dataclass(frozen=True)
class MemoryOptions:
    """What is kept from the forward for the backward, and where.

    >>> MemoryOptions(checkpointing="full", offload=True, mlp_tile=4096)
    MemoryOptions(checkpointing='full', offload=True, mlp_tile=4096, loss_chunk=None, reduce_gradients='each')
    """

    checkpointing: Checkpointing = "none"
    """What a decoder layer recomputes in the backward: nothing, all but its token mixer (`selective`, which
    sends nothing twice), or the whole layer (`full`, blocks of media encoders too). `auto`, for
    `seqbraid train`, uses the least recomputation whose estimated memory fits the device (`plan/auto.py`).
    """
    offload: bool = False
    """Keep the activations that checkpointing saves in host memory, pinned where there is a GPU."""
    mlp_tile: int | None = None
    """Tokens per tile of the MLPs, whose intermediate tensors then exist for one tile at a time."""
    loss_chunk: int | None = None
    """Tokens per chunk of head and loss; by default the hidden size, or as many as make 64 MiB of logits
    where those are more.
    """
    reduce_gradients: ReduceGradients = "each"
    """When the gradients of a step's micro-batches are reduced over ranks: after `each` of them, or `once`,
    after the last, which sends less and keeps whole gradients on every rank until then: 4 bytes for each
    trained parameter of the model.
    """

    def __post_init__(self) -> None:
        if self.checkpointing not in get_args(Checkpointing):
            choices = ", ".join(repr(choice) for choice in get_args(Checkpointing))
            raise ValueError(f"checkpointing={self.checkpointing!r} is unknown; use one of {choices}")
        if self.reduce_gradients not in get_args(ReduceGradients):
            raise ValueError(
                f"reduce_gradients={self.reduce_gradients!r} is unknown; use 'each' or 'once' for the "
                "micro-batches of a step"
            )
        if not isinstance(self.offload, bool):
            raise ValueError(f"offload={self.offload!r} must be True or False")
        if self.offload and self.checkpointing == "none":
            raise ValueError(
                "offload=True moves the activations that checkpointing keeps, but checkpointing='none' "
                "keeps none; use checkpointing='full' or 'selective'"
            )
        for name in ("mlp_tile", "loss_chunk"):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be a number of tokens, at least 1, or None")
