"""The loss of held-out data, and what `compute_metrics` is given: log-probabilities, never logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..comm.consensus import gather_objects
from ..layout.labels import IGNORE
from ..models.batch import PackedBatch
from ..models.braided import BraidedModel
from ..models.step import agree_on, forward_backward
from .samples import LabelledStep

Scored = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Of a sample: the log-probability of each label, 0 where there is none; and the labels."""


@dataclass
class Found:
    """What one pass over a data set gave, the same on every rank."""

    loss_sum: float = 0.0
    correct: int = 0
    labels: int = 0
    num_samples: int = 0
    samples: list[Scored] = field(default_factory=list)
    """In the order of the data set; empty unless they were asked for."""

    def arrays(self) -> Scored:
        """Log-probabilities and labels `[N, T]`, padded with 0 and −100."""
        longest = max((len(labels) for _, labels in self.samples), default=0)
        shape = (len(self.samples), longest)
        scores, labels = np.zeros(shape, np.float32), np.full(shape, IGNORE, np.int64)
        for row, (of_sample, its_labels) in enumerate(self.samples):
            scores[row, : len(of_sample)], labels[row, : len(its_labels)] = of_sample, its_labels
        return scores, labels


@torch.no_grad()
def run_through(
    model: BraidedModel, loader: Iterable[LabelledStep], scored: bool, after: Callable[[], None]
) -> Found:
    """One pass: sums over all ranks, to be divided once; with log-probabilities if `scored`.

    Rows are dealt to the data ranks in turn, so that the samples come in the order of the data set.
    """
    found = Found()
    for step, labels_of_rows in loader:
        agreed = agree_on(model, step)
        out = forward_backward(model, step, agreed=agreed)
        found.num_samples += agreed.counts["samples"]
        found.loss_sum += float(out.loss_sum)
        found.correct += int(out.correct_tokens)
        found.labels += out.label_tokens
        if scored:
            rows = zip(step.batches, labels_of_rows, strict=True)
            own = [one for batch, labels in rows for one in _scores(model, batch, labels)]
            of_ranks = gather_objects(model.mesh.cpu_group, own)
            found.samples += [one for rank in model.mesh.leaders for one in of_ranks[rank]]
        after()
    return found


def _scores(model: BraidedModel, batch: PackedBatch, labels_of_samples: Sequence[Tensor]) -> list[Scored]:
    """Of the samples of a row, on every rank that shares it; none of a row that was filled up."""
    found = model.token_logprobs(batch).per_sample()
    own = zip(found, labels_of_samples, strict=False)
    return [_score(scores_T, labels_T) for scores_T, labels_T in own]


def _score(scores_T: Tensor, labels_T: Tensor) -> Scored:
    labels_T = labels_T.clone()
    labels_T[0] = IGNORE  # nothing comes before it
    return scores_T.float().cpu().numpy(), labels_T.numpy()
