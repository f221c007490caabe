"""From items of a data set, through the user's collator, to the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..models.batch import BadBatch, PackedBatch
from ..models.families import family_of
from ..models.step import Step
from ..train.batches import COUNTS, StepMaker

PER_TOKEN = ("input_ids", "labels", "mm_token_type_ids", "token_type_ids")
OF_ONE_SAMPLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What padding-free collators add, which says nothing new about a single sample."""


@dataclass(frozen=True)
class RowMaker:
    """A `collate_fn`: takes the rows of one micro-batch, each a list of items, and gives its `Step`.

    Each item goes through the collator by itself, so that nothing is padded. What goes wrong on this rank is
    raised on every rank, in the agreement of the step.
    """

    dataset: Any
    """What the numbers of an item are looked up in; None where the items themselves come."""
    collator: Callable[[list[Any]], Mapping[str, Any]]
    steps: StepMaker

    def __call__(self, rows: Sequence[Sequence[Any]]) -> Step:
        """The micro-batch of these rows; one without items is filled up, as every rank takes part."""
        try:
            return self.steps([[self.sample(item) for item in row] for row in rows])
        except Exception as error:
            return bad_step(error, len(rows))

    def sample(self, item: Any) -> dict[str, Any]:
        """The sample of an item, or of an item's number."""
        if isinstance(item, Exception):  # met while a stream was read
            raise item
        found = item if self.dataset is None else self.dataset[item]
        try:
            return sample_of(self.collator([found]), self.steps.config)
        except ValueError as error:
            where = "an item of the stream" if self.dataset is None else f"item {item} of the data set"
            raise ValueError(f"{where}: {error}") from error


class LabelledStep(NamedTuple):
    """A micro-batch of held-out data, and the labels of each sample of its rows."""

    step: Step
    labels: list[list[Tensor]]


class LabelledRowMaker(RowMaker):
    """A `RowMaker` for held-out data."""

    def __call__(self, rows: Sequence[Sequence[Any]]) -> LabelledStep:  # type: ignore[override]
        """The micro-batch of these rows, and their labels."""
        try:
            samples = [[self.sample(item) for item in row] for row in rows]
            step = self.steps(samples)
            step = replace(step, counts={**step.counts, "samples": sum(map(len, samples))})
            return LabelledStep(step, [[one["labels"] for one in row] for row in samples])
        except Exception as error:
            return LabelledStep(bad_step(error, len(rows)), [[] for _ in rows])


def bad_step(error: Exception, num_batches: int = 1) -> Step:
    """A step that raises an error on every rank when they agree on it."""
    return Step([cast(PackedBatch, BadBatch(error))] * num_batches, dict.fromkeys(COUNTS, 0))


def sample_of(collated: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """What a collator gives for a batch of one, as a sample for `seqbraid.pack`.

    >>> from transformers import LlamaConfig
    >>> batch = {"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]], "labels": [[-100, 6, -100]]}
    >>> sample_of(batch, LlamaConfig())
    {'input_ids': tensor([5, 6]), 'labels': tensor([-100,    6])}
    """
    if collated.get("labels") is None:
        raise ValueError(
            f"the collator gives no labels, only {', '.join(collated)}; give one per token, −100 to ignore"
        )
    family = family_of(config)
    media_keys = () if family is None else family.keys
    known = {*PER_TOKEN, "attention_mask", "position_ids", *OF_ONE_SAMPLE, *media_keys}
    if unknown := [key for key in collated if key not in known]:
        raise ValueError(
            f"the collator gives {unknown[0]!r}, which a packed row does not use; it uses "
            f"{', '.join(['input_ids', 'labels', *media_keys])}"
        )
    ids = _row(collated["input_ids"], "input_ids")
    mask = collated.get("attention_mask")
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else _row(mask, "attention_mask") == 1
    if collated.get("position_ids") is not None:
        _check_positions(collated["position_ids"], kept)
    sample = {key: _row(collated[key], key)[kept] for key in PER_TOKEN if collated.get(key) is not None}
    if family is None:
        sample.pop("mm_token_type_ids", None)
    sample.pop("token_type_ids", None)
    return sample | {key: collated[key] for key in media_keys if collated.get(key) is not None}


def _row(value: Any, name: str) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1:
        raise ValueError(f"the collator gives {name} of shape {tuple(tensor.shape)} for one item, not [1, T]")
    return tensor


def _check_positions(value: Any, kept: Tensor) -> None:
    """Refuse rows that were packed elsewhere: their samples would see each other."""
    positions = torch.as_tensor(value)
    if positions.ndim != 2 or positions.shape[0] != 1:
        return  # several rows: those of media, which are computed here
    own = positions[0][kept]
    if (own != torch.arange(len(own))).any():
        raise ValueError(
            "its position_ids are not 0, 1, 2, …: it seems to hold several samples, packed before; give "
            "single samples, and row_tokens= to the trainer, which packs them into rows"
        )
