"""DPO: pairs of answers, of which the first is preferred, against a reference model.

The two samples of a pair are neighbours in one row: chosen, rejected, chosen, rejected, …
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import seqbraid as sb

BETA = 0.1


def dpo(tokens: sb.LocalTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """−log σ(β · (gain of the chosen − gain of the rejected)), summed over pairs."""
    gains = tokens.sample_sums((tokens.logprobs() - tokens.fields["reference"]) * tokens.labelled)
    margins = BETA * (gains[0::2] - gains[1::2])  # of no pair where the row's other ranks count them
    return -F.logsigmoid(margins).sum(), {"right": (margins > 0).sum(), "margin": margins.sum()}


@torch.no_grad()
def with_reference(reference: sb.BraidedModel, batches: Sequence[sb.PackedBatch]) -> list[sb.PackedBatch]:
    """What the reference, on the same mesh, makes of the batches; or give samples the field `reference`."""
    return [batch.with_fields(reference=reference.token_logprobs(batch).logprobs) for batch in batches]


def train_step(
    model: sb.BraidedModel, reference: sb.BraidedModel, batches: Sequence[sb.PackedBatch]
) -> sb.StepOutput:
    """Mean over the pairs of all ranks; `out.metrics["right"]` of them have a margin above 0."""
    return sb.forward_backward(model, with_reference(reference, batches), dpo, divisor="pairs")
