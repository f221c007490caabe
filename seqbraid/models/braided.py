"""`BraidedModel`: the stock model, fed packed rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..mesh import Mesh
from ..ops.linear_cross_entropy import linear_cross_entropy
from .adapter import TextAdapter
from .batch import PackedBatch
from .context import StepContext
from .router import load_balancing_loss


@dataclass(frozen=True)
class StepOutput:
    """What one forward pass gives."""

    loss: Tensor
    """This rank's share of the step's loss: call backward on it."""
    mean_loss: Tensor
    """Mean loss per label token, detached, the same on every rank: log it."""
    loss_sum: Tensor
    """Sum of the token losses of the batch, detached."""
    label_tokens: int
    """What `loss_sum` was divided by."""
    correct_tokens: Tensor
    """How often the largest logit was the target."""
    aux_loss: Tensor | None = None
    """The routers' load-balancing loss, detached; None where the model has none switched on."""
    mtp_loss: Tensor | None = None
    """The loss of multi-token prediction; None where there is none."""


class BraidedModel(nn.Module):
    """A stock model and the mesh it runs on.

    The stock model is kept as it is: without a packed batch it behaves as before, `generate` included.
    """

    def __init__(self, model: PreTrainedModel, mesh: Mesh) -> None:
        super().__init__()
        self.model = model
        self.mesh = mesh
        self._adapter = TextAdapter(model)
        self._adapter.braid()

    def forward(self, batch: PackedBatch, label_tokens: int | None = None) -> StepOutput:
        """The loss of a packed batch, divided once by `label_tokens`.

        `label_tokens` is the count of the whole optimizer step where several batches are accumulated; the
        batch's own when left out.
        """
        hidden_TD, router = self._hidden(batch, with_router=self._uses_router_loss)
        head = self._adapter.head
        sums = linear_cross_entropy(hidden_TD, head.weight, batch.targets, head.bias)
        divisor = batch.label_tokens if label_tokens is None else label_tokens
        if divisor < batch.label_tokens:
            raise ValueError(
                f"label_tokens={divisor} is less than the {batch.label_tokens} labels of this batch alone; "
                "give the "
                "count of all batches of the optimizer step"
            )
        # A batch without labels contributes an exact zero, and still takes part in the backward.
        loss = sums.loss / max(divisor, 1)
        mean = loss.detach()
        aux = None
        if router is not None:
            aux = load_balancing_loss(router, batch.real, self._adapter.config.num_experts_per_tok)
            # Accumulated batches weigh by their labels, so that the step's loss keeps one coefficient.
            share = batch.label_tokens / max(divisor, 1)
            loss = loss + self._adapter.config.router_aux_loss_coef * share * aux
        return StepOutput(
            loss=loss,
            mean_loss=mean,
            loss_sum=sums.loss.detach(),
            label_tokens=divisor,
            correct_tokens=sums.correct,
            aux_loss=None if aux is None else aux.detach(),
        )

    @torch.no_grad()
    def logits(self, batch: PackedBatch) -> list[Tensor]:
        """One `[T, V]` tensor per sample, in the order given: for checks, it holds all logits at once."""
        hidden_TD, _ = self._hidden(batch, with_router=False)
        head = self._adapter.head
        row = batch.layout.unshard([F.linear(hidden_TD, head.weight, head.bias)])
        return list(row.split(list(batch.layout.lengths)))

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Write the stock checkpoint that `from_pretrained` loads."""
        self.model.save_pretrained(directory, **kwargs)

    def release(self) -> PreTrainedModel:
        """Undo the braid and give the stock model back."""
        self._adapter.unbraid()
        return self.model

    @property
    def _uses_router_loss(self) -> bool:
        return bool(getattr(self._adapter.config, "output_router_logits", False))

    def _hidden(self, batch: PackedBatch, with_router: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        self._adapter.check_step(self.training)
        context = StepContext(batch.layout, batch.rank)
        return self._adapter.hidden(batch.input_ids, batch.positions, context, with_router)
