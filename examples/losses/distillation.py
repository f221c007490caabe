"""Distillation: the KL divergence from a teacher's distribution over the whole vocabulary, at each label.

The teacher's hidden states are kept, `[T, E]` for this rank's tokens; logits of both are made in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

import seqbraid as sb

TEMPERATURE = 2.0


@dataclass
class Distillation:
    """A loss that reads the field `teacher`, the teacher's hidden states."""

    head: Tensor
    """`[V, E]`: the weight of the teacher's head."""

    def __call__(self, tokens: sb.LocalTokens) -> Tensor:
        hidden = tokens.fields["teacher"]
        return TEMPERATURE**2 * tokens.kl(hidden, self.head, temperature=TEMPERATURE).sum()


def train_step(
    model: sb.BraidedModel, teacher: sb.BraidedModel, batches: Sequence[sb.PackedBatch]
) -> sb.StepOutput:
    """Mean over label tokens; the teacher is on the same mesh and has the same vocabulary."""
    batches = [batch.with_fields(teacher=teacher.hidden_states(batch)) for batch in batches]
    head = teacher.head_weight().to(batches[0].fields["teacher"].dtype)  # what the teacher computes in
    return sb.forward_backward(model, batches, Distillation(head))
