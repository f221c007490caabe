"""The loss on held-out data, as the same sums."""

from __future__ import annotations

import torch

from ..comm.whereabouts import Whereabouts
from ..data.stream.loader import Loader
from ..models.braided import BraidedModel
from ..models.output import MtpReport
from ..models.step import forward_backward


@torch.no_grad()
def evaluate(model: BraidedModel, loader: Loader, where: Whereabouts | None = None) -> dict[str, float]:
    """Mean loss per label token and share of tokens predicted right, over one pass of a loader of steps; of
    multi-token prediction, where it is trained, its loss and the share of tokens that are accepted.
    """
    where = Whereabouts() if where is None else where
    where.at("evaluating")
    was_training = model.training
    model.eval()
    loss_sum, divisor, correct, labels = 0.0, 0.0, 0, 0
    depths: MtpReport | None = None
    try:
        for data in loader:
            where.moves()
            out = forward_backward(model, data.prepared)
            loss_sum += float(out.loss_sum)
            divisor += out.divisor
            correct += int(out.correct_tokens)
            labels += out.label_tokens
            if out.mtp is not None:
                depths = out.mtp if depths is None else depths + out.mtp
    finally:
        model.train(was_training)
        loader.close()
    if not labels:
        raise ValueError("data.eval has no label token")
    found = {
        "eval_loss": loss_sum / (divisor or 1),
        "eval_accuracy": correct / labels,
        "eval_label_tokens": labels,
    }
    if depths is not None:
        found["eval_mtp_loss"] = float(depths.loss_sums_K.mean()) / (divisor or 1)
        found |= {f"eval_{name}": value for name, value in depths.summary().items()}
    return found
