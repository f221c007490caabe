"""The loss on held-out data, as the same sums."""

from __future__ import annotations

import torch

from ..comm.whereabouts import Whereabouts
from ..data.stream.loader import Loader
from ..models.braided import BraidedModel
from ..models.step import forward_backward


@torch.no_grad()
def evaluate(model: BraidedModel, loader: Loader, where: Whereabouts | None = None) -> dict[str, float]:
    """Mean loss per label token and share of tokens predicted right, over one pass of a loader of steps."""
    where = Whereabouts() if where is None else where
    where.at("evaluating")
    was_training = model.training
    model.eval()
    loss_sum, divisor, correct, labels = 0.0, 0.0, 0, 0
    try:
        for data in loader:
            where.moves()
            out = forward_backward(model, data.prepared)
            loss_sum += float(out.loss_sum)
            divisor += out.divisor
            correct += int(out.correct_tokens)
            labels += out.label_tokens
    finally:
        model.train(was_training)
        loader.close()
    if not labels:
        raise ValueError("data.eval has no label token")
    return {
        "eval_loss": loss_sum / (divisor or 1),
        "eval_accuracy": correct / labels,
        "eval_label_tokens": labels,
    }
