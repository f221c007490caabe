"""`pack`: samples in, this rank's `PackedBatch` out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import lcm
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..layout import SequenceLayout
from ..layout.labels import IGNORE, mtp_targets_of, targets_of
from ..mesh import Mesh
from ..models.batch import BadBatch, PackedBatch, Row
from ..models.families import MediaFamily, family_of
from ..models.media import MediaInput, sample_media
from ..models.media_tokens import TEXT, token_types
from ..models.needs import prepare_plans
from ..models.positions import sample_positions
from ..models.running import normal_tensors
from ..sequence_parallel.plans import RowPlans
from .fields import Fields


def pack(
    samples: Sequence[Mapping[str, Any]],
    config: Any,
    mesh: Mesh | None = None,
    policy: str = "balanced",
    multiple_of: int = 1,
    pad_to: int | None = None,
    fp8: bool = False,
    check_media: bool = False,
    plans: RowPlans | None = None,
    mtp_depth: int = 0,
) -> PackedBatch:
    """Pack samples into one row and return this rank's part of it; pure: no communication between ranks.

    It may run ahead of the step, in a thread, or in a worker of `torch.utils.data.DataLoader` (as its
    `collate_fn`). In a job of several processes, samples that cannot be packed give a `BadBatch`, whose
    reason the step raises on every rank; in one process the `ValueError` is raised at once.

    Args:
        samples: dicts with `input_ids [T]` and, unless the loss covers every token, `labels [T]`, unshifted,
            −100 where ignored. They are the samples of this data rank, the same on every rank of its sequence
            group; only pixels and mel frames may be those of this rank's media alone, where `media_ranks`
            tells which rank encodes each image, video and clip (`SampleEncoder.encode` makes such samples).
            `fields`, a dict, has what a loss wants beside: `[T, …]` by name, where entry t belongs to label
            t, or one number for the sample. `weights` among them multiply the losses of the labels.
        config: the model's config.
        mesh: the device mesh; by default one process.
        policy: how sequences are split: `balanced`, `zigzag` or `contiguous`.
        multiple_of: pad the tokens of a rank to a multiple of this.
        pad_to: pad the whole row to this many tokens, for fixed shapes.
        fp8: pad the tokens of a rank to a multiple of 16 as well.
        check_media: check pixels and audio for NaN and infinity, which takes a pass over them.
        plans: the result of `plan_row` for these samples and settings; made here by default.
        mtp_depth: depths of the model's multi-token prediction, where it has that.

    >>> from transformers import LlamaConfig
    >>> batch = pack([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}], LlamaConfig())
    >>> batch.targets.tolist(), batch.positions[0].tolist(), batch.label_tokens
    ([6, 7, -100, 9, -100], [0, 1, 2, 0, 1], 3)
    """
    mesh = Mesh() if mesh is None else mesh
    try:
        with normal_tensors():
            row = build_row(samples, config, check_media, mesh.media_rank, mtp_depth)
            if plans is None:
                plans = plan_row(row.lengths, config, mesh, policy, multiple_of, pad_to, fp8)
            if mtp_depth:
                plans.shift(mtp_depth, torch.device("cpu"))
            return row.split(plans)
    except Exception as error:
        bad = BadBatch(error)
        if mesh.world_size == 1:
            raise bad.error from bad.error.__cause__
        return cast(PackedBatch, bad)


def plan_row(
    lengths: Sequence[int],
    config: Any,
    mesh: Mesh,
    policy: str = "balanced",
    multiple_of: int = 1,
    pad_to: int | None = None,
    fp8: bool = False,
) -> RowPlans:
    """The layout of a row and this rank's plans for it, which follow from the lengths of its samples alone.

    >>> from transformers import LlamaConfig
    >>> plan_row([5, 3], LlamaConfig(), Mesh(ring=2, rank=1, world_size=2), policy="zigzag").layout.index(1)
    tensor([ 2,  3,  4, -1,  6,  7])
    """
    layout = SequenceLayout(lengths, mesh.ring, mesh.ulysses, policy, lcm(multiple_of, mesh.tp), pad_to, fp8)
    plans = RowPlans(layout, mesh.sequence_rank, mesh.tp, mesh.axis_rank("tp"))
    prepare_plans(plans, config)
    return plans


def build_row(
    samples: Sequence[Mapping[str, Any]],
    config: Any,
    check_media: bool = False,
    rank: int = 0,
    mtp_depth: int = 0,
) -> Row:
    """Check the samples one by one and join them; targets are shifted and positions counted per sample.

    `rank` is the one whose media the samples hold, where they say who encodes what, −1 encodes none;
    `mtp_depth` how many tokens beyond the next one are predicted.
    """
    if isinstance(samples, Mapping | Tensor) or not isinstance(samples, Iterable):
        raise ValueError(
            f"pack takes a list of samples, not {type(samples).__name__}; "
            + ("put the one sample into a list" if isinstance(samples, Mapping) else "each sample is a dict")
        )
    if not samples:
        raise ValueError("samples is empty: a row needs at least one sample")
    family = family_of(config)
    ids, targets, further, positions = [], [], [], []
    media: list[MediaInput] = []
    fields = Fields(samples)
    first = 0
    for number, sample in enumerate(samples):
        sample_ids, labels = _checked_sample(sample, number, config, family)
        ids.append(sample_ids)
        # Shifted here, where the sample's end is known, so that no rank ever needs its neighbour's label.
        targets.append(targets_of(labels))
        further.append(mtp_targets_of(labels, mtp_depth))
        # Positions first: they find the item whose placeholders and features do not match.
        with _named(number):
            positions.append(sample_positions({**sample, "input_ids": sample_ids}, config))
            fields.add(sample, len(sample_ids))
        if family is not None:
            media += sample_media(sample, number, first, sample_ids, config, family, rank)
        first += len(sample_ids)
    if check_media:
        _check_finite(media)
    row_ids = torch.cat(ids)
    return Row(
        tuple(map(len, ids)),
        row_ids,
        torch.cat(targets),
        torch.cat(positions, 1),
        None if family is None else tuple(media),
        _filler(row_ids, config, family),
        *fields.joined(),
        mtp_targets=torch.cat(further, 1) if mtp_depth else None,
        is_encoded=rank >= 0,
    )


def _filler(ids: Tensor, config: Any, family: MediaFamily | None) -> int:
    """The row's first token that is text."""
    if family is not None:
        ids = torch.cat([ids[token_types(ids, config) == TEXT], ids])
    return int(ids[0])


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Say of which sample an error speaks."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"sample {number}: {error}") from None


def _check_finite(media: Sequence[MediaInput]) -> None:
    for item, payload, _ in media:
        if not payload.isfinite().all():
            raise ValueError(
                f"sample {item.sample}: {item.kind} {item.index} holds NaN or infinity; leave it out or "
                "decode it again"
            )


def _checked_sample(
    sample: Mapping[str, Any], number: int, config: Any, family: MediaFamily | None
) -> tuple[Tensor, Tensor]:
    where = f"sample {number}"
    if not isinstance(sample, Mapping):
        raise ValueError(f"{where} is a {type(sample).__name__}; a sample is a dict with input_ids [T]")
    vocab_size = config.get_text_config().vocab_size
    if "input_ids" not in sample:
        raise ValueError(f"{where} has no input_ids; it has {', '.join(map(str, sample)) or 'no keys'}")
    ids = _vector(sample["input_ids"], f"{where}: input_ids")
    if not len(ids):
        raise ValueError(f"{where} is empty: input_ids has no token; leave empty samples out")
    _check_range(ids, vocab_size, f"{where}: input_ids")
    fixed = [("attention_mask", 1, "padding")]
    if family is None:
        fixed.append(("mm_token_type_ids", 0, "media tokens"))
    for key, wanted, why in fixed:
        if key in sample:
            values = _vector(sample[key], f"{where}: {key}")
            if len(values) != len(ids) or (values != wanted).any():
                raise ValueError(
                    f"{where}: {key} must be {wanted} for each of the {len(ids)} tokens (a sample has no "
                    f"{why} here; convert padded batches with seqbraid.layout.samples_from_dense)"
                )
    if sample.get("labels") is None:
        return ids, ids
    labels = _vector(sample["labels"], f"{where}: labels")
    if len(labels) != len(ids):
        raise ValueError(
            f"{where}: {len(labels)} labels for {len(ids)} input_ids; give one unshifted label per token, "
            "−100 where ignored"
        )
    _check_range(labels[labels != IGNORE], vocab_size, f"{where}: labels")
    return ids, labels


def _vector(value: Any, what: str) -> Tensor:
    try:
        tensor = torch.as_tensor(np.asarray(value) if isinstance(value, list | tuple) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"{what} is {_short(value)}, not a list of token ids; give integers that fit into 64 bits"
        ) from None
    if tensor.ndim == 2 and tensor.shape[0] == 1:  # as a processor gives it for one conversation
        tensor = tensor[0]
    if tensor.ndim != 1:
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}; one sample is [T]")
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{what} has dtype {tensor.dtype}; token ids and labels are integers")
    return tensor.long()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _check_range(values: Tensor, vocab_size: int, what: str) -> None:
    bad = ((values < 0) | (values >= vocab_size)).nonzero()
    if len(bad):
        place = int(bad[0])
        raise ValueError(
            f"{what} holds {int(values[place])}, outside the vocabulary of {vocab_size} (valid: 0 to "
            f"{vocab_size - 1}" + (", or −100 in labels)" if what.endswith("labels") else ")")
        )
