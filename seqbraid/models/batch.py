"""`PackedBatch`: a row as one rank sees it, ready for the step; `BadBatch`: why there is none."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..layout import SequenceLayout
from ..layout.labels import IGNORE, ahead_of
from ..sequence_parallel.plans import RowPlans
from .media import MediaBatch, MediaInput

WEIGHTS = "weights"
"""The field that the built-in loss multiplies each token's loss by."""


@dataclass(frozen=True)
class PackedBatch:
    """One rank's tokens of a row. A full row is another type (`Row`), so nothing can be sliced twice."""

    plans: RowPlans
    """The layout of the row, and what the mixers of this rank do with it."""
    input_ids: Tensor
    """`[T]`; padding slots hold the id of a token of the row."""
    targets: Tensor
    """`[T]`, shifted per sample before the split; −100 where there is nothing to predict."""
    positions: Tensor
    """`[4, T]`: text, time, height, width, each counted from the start of its own sample."""
    label_tokens: int
    """Targets of the whole row, all ranks together."""
    fingerprint: int
    """Of the row and its layout: ranks of one sequence group must agree on it."""
    keys: Tensor | None = None
    """`[T]`: what tells a token from others, on any mesh: its sample's ids and its place among them."""
    media: MediaBatch | None = None
    """What this rank encodes, and where features go; None for text models, and behind the first
    pipeline stage."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """`[T, …]`: what samples have beside, for each token's target, by name; 0 in padding slots."""
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    """`[N]`: what the N samples of the whole row have beside, by name."""
    num_labelled: int = 0
    """Samples of the whole row that have a target."""
    weight_sum: float | None = None
    """Sum of the weights of the targets of the whole row; None where samples have no `weights`."""
    mtp_targets: Tensor | None = None
    """`[K, T]`: of each depth of multi-token prediction, shifted per sample before the split."""
    mtp_weights: Tensor | None = None
    """`[K, T]`: what the loss of each of them is multiplied by; None where each counts once."""

    @property
    def weights(self) -> Tensor | None:
        """`[T]`: what the loss of each token is multiplied by; None where each counts once."""
        return self.fields.get(WEIGHTS)

    def with_fields(self, **fields: Tensor) -> PackedBatch:
        """The batch with more fields, `[T, …]` of this rank's tokens: what a model on the same mesh gave for
        it, such as log-probabilities of a reference.
        """
        for name, values in fields.items():
            if name in self.fields or name in self.scalars or name == WEIGHTS:
                raise ValueError(f"the batch has a field {name!r}; give another name")
            if values.shape[:1] != self.targets.shape:
                raise ValueError(
                    f"field {name!r} has shape {tuple(values.shape)}; this rank's tokens are "
                    f"[{len(self.targets)}]: give one entry for each, as `token_logprobs` does"
                )
        return replace(self, fields={**self.fields, **{name: x.detach() for name, x in fields.items()}})

    @property
    def mtp_depth(self) -> int:
        """Depths of multi-token prediction that the batch was packed for."""
        return 0 if self.mtp_targets is None else len(self.mtp_targets)

    @property
    def layout(self) -> SequenceLayout:
        """Where the tokens of the row are."""
        return self.plans.layout

    @property
    def rank(self) -> int:
        """This rank's place in the sequence group."""
        return self.plans.rank

    @property
    def real(self) -> Tensor:
        """`[T]`, False where a slot is padding."""
        padding, _ = self.plans.slots(self.input_ids.device)
        real = torch.ones(len(self.input_ids), dtype=torch.bool, device=self.input_ids.device)
        return real if padding is None else real.index_fill_(0, padding, False)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch with its tensors on another device."""
        names = ("input_ids", "targets", "positions", "keys", "mtp_targets", "mtp_weights")
        tensors: dict[str, Any] = {
            name: x.to(device) for name in names if (x := getattr(self, name)) is not None
        }
        for name in ("fields", "scalars"):
            tensors[name] = {key: x.to(device) for key, x in getattr(self, name).items()}
        media = None if self.media is None else self.media.to(device)
        return replace(self, media=media, **tensors)


class BadBatch:
    """Stands in for a batch that could not be packed: the step raises the reason on every rank.

    `pack` must not raise it where other ranks share the step, since they would wait for this one.
    """

    def __init__(self, error: Exception) -> None:
        if not isinstance(error, ValueError):  # it may have to be sent to another process, in words
            words = ValueError(f"{type(error).__name__}: {error}")
            words.__cause__ = error
            error = words
        self.error = error

    def to(self, device: torch.device | str) -> BadBatch:
        """Itself: there is nothing to move."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "error" or name.startswith("__"):  # asked for while it is copied or unpickled
            raise AttributeError(name)
        raise self.error


@dataclass(frozen=True)
class Row:
    """A whole packed row, before it is split."""

    lengths: tuple[int, ...]
    input_ids: Tensor
    targets: Tensor
    positions: Tensor
    media: tuple[MediaInput, ...] | None = None
    """In row order; None for text models."""
    filler: int = 0
    """What padding slots hold: the id of a text token of the row. What a family computes on it, it computes
    on that token too; at the id 0, which may have no embedding, it may have no gradient.
    """
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """As `PackedBatch` has them, of the whole row."""
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    mtp_targets: Tensor | None = None
    """As `PackedBatch` has them, of the whole row."""
    is_encoded: bool = True
    """Whether its media are encoded on this pipeline stage; then alone they go into the batch."""

    def split(self, plans: RowPlans) -> PackedBatch:
        """Select a rank's part of everything by the layout's one index."""
        layout, rank = plans.layout, plans.rank
        is_target = self.targets != IGNORE
        weights = self.fields.get(WEIGHTS)
        ahead = None
        if weights is not None and self.mtp_targets is not None:
            ahead = torch.cat(
                [ahead_of(x, len(self.mtp_targets)) for x in weights.split(self.lengths)], dim=1
            )
        return PackedBatch(
            plans,
            layout.shard(self.input_ids, rank, fill=self.filler),
            layout.shard(self.targets, rank, fill=IGNORE),
            layout.shard(self.positions, rank, dim=1, fill=0),
            int(is_target.sum()),
            self._fingerprint(layout),
            layout.shard(self._keys(), rank),
            MediaBatch.of(plans, self.media) if self.media is not None and self.is_encoded else None,
            {name: layout.shard(values, rank) for name, values in self.fields.items()},
            self.scalars,
            sum(bool(of_sample.any()) for of_sample in is_target.split(self.lengths)),
            None if weights is None else float(weights[is_target].double().sum()),
            None if self.mtp_targets is None else layout.shard(self.mtp_targets, rank, dim=1, fill=IGNORE),
            None if ahead is None else layout.shard(ahead, rank, dim=1),
        )

    def _keys(self) -> Tensor:
        digests = [zlib.crc32(ids.numpy().tobytes()) >> 1 for ids in self.input_ids.split(self.lengths)]
        places = torch.cat([torch.arange(length) for length in self.lengths])
        return (torch.tensor(digests).repeat_interleave(torch.tensor(self.lengths)) << 32) | places

    def _fingerprint(self, layout: SequenceLayout) -> int:
        shape = (self.lengths, layout.ring, layout.ulysses, layout.policy, layout.num_local_tokens)
        digest = zlib.crc32(repr(shape).encode())
        beside = {**self.fields, **self.scalars}
        digest = zlib.crc32(repr([*beside]).encode(), digest)
        for tensor in (self.input_ids, self.targets, self.positions, *beside.values()):
            digest = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), digest)
        return zlib.crc32(repr([media.item for media in self.media or ()]).encode(), digest)
