"""`BraidedModel`: the stock model, fed packed rows."""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..comm.consensus import agree
from ..comm.group import Group
from ..mesh import Mesh
from ..ops.linear_cross_entropy import linear_cross_entropy
from ..sequence_parallel.context import StepContext
from .batch import PackedBatch
from .media_adapter import make_adapter
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

    def __init__(self, model: PreTrainedModel, mesh: Mesh, gated_delta: str = "auto") -> None:
        super().__init__()
        self.model = model
        self.mesh = mesh
        self.gated_delta = gated_delta
        self.loss_chunk: int | None = None
        """Tokens per chunk of head and loss; None lets the size of the vocabulary decide."""
        self._until_release = ExitStack()
        self._adapter = make_adapter(model)
        self._adapter.check_mesh(mesh, gated_delta)
        self.groups = {
            axis: Group.of(mesh.process_group(axis)) for axis in ("ring", "ulysses", "sequence", "loss")
        }
        self._adapter.braid()

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """The layers of the decoder, each of them a unit for sharding and checkpointing."""
        return self._adapter.decoder_layers

    @property
    def towers(self) -> list[nn.Module]:
        """The media encoders; a text model has none."""
        encoders = getattr(self._adapter, "encoders", None)
        found = (getattr(encoders, name, None) for name in ("visual", "audio"))
        return [tower for tower in found if tower is not None]

    def forward(self, batch: PackedBatch, label_tokens: int | None = None) -> StepOutput:
        """The loss of a packed batch, divided once by `label_tokens`.

        `label_tokens` is the count of the whole optimizer step where several batches are accumulated; the
        batch's own when left out.
        """
        batch_labels = self._agree(batch, label_tokens)
        hidden_TD, router = self._hidden(batch, with_router=self._uses_router_loss)
        head = self._adapter.head
        sums = linear_cross_entropy(hidden_TD, head.weight, batch.targets, head.bias, self.loss_chunk)
        divisor = batch_labels if label_tokens is None else label_tokens
        # A rank without labels contributes an exact zero, and still takes part in the backward.
        loss = sums.loss / max(divisor, 1)
        # In float64, where the count of correct tokens is exact.
        totals = self.groups["loss"].all_reduce(
            torch.stack([sums.loss.detach().double(), sums.correct.double()])
        )
        loss_sum, correct = totals.unbind()
        aux = None
        if router is not None:
            top_k = self._adapter.config.num_experts_per_tok
            own, aux = load_balancing_loss(router, batch.real, top_k, self.groups["loss"])
            # Accumulated batches weigh by their labels, so that the step's loss keeps one coefficient.
            share = batch_labels / max(divisor, 1)
            loss = loss + self._adapter.config.router_aux_loss_coef * share * own
        return StepOutput(
            loss=loss,
            mean_loss=(loss_sum / max(divisor, 1)).to(sums.loss.dtype),
            loss_sum=loss_sum.to(sums.loss.dtype),
            label_tokens=divisor,
            correct_tokens=correct.long(),
            aux_loss=aux,
        )

    @torch.no_grad()
    def logits(self, batch: PackedBatch) -> list[Tensor]:
        """One `[T, V]` tensor per sample, in the order given: for checks, it holds all logits at once."""
        self._agree(batch, None)
        hidden_TD, _ = self._hidden(batch, with_router=False)
        head = self._adapter.head
        parts = self.groups["sequence"].all_gather(F.linear(hidden_TD, head.weight, head.bias))
        row = batch.layout.unshard(parts)
        return list(row.split(list(batch.layout.lengths)))

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Write the stock checkpoint that `from_pretrained` loads; all ranks call it, the first writes."""
        if hasattr(self.model, "peft_config"):
            raise ValueError(
                "the model has LoRA adapters, which a stock checkpoint cannot name; write them with "
                "seqbraid.train.lora.save_adapter, or merge them with seqbraid.train.export.export"
            )
        if not isinstance(self, FSDPModule):
            self.model.save_pretrained(directory, **kwargs)
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.mesh.rank == 0:
            self.model.save_pretrained(directory, state_dict=state, **kwargs)
        agree(self.mesh.cpu_group, None)

    def until_release(self, change: AbstractContextManager[Any]) -> None:
        """Make a change to the stock model that `release` undoes."""
        self._until_release.enter_context(change)

    def release(self) -> PreTrainedModel:
        """Undo the braid and give the stock model back."""
        self._until_release.close()
        self._adapter.unbraid()
        return self.model

    @property
    def _uses_router_loss(self) -> bool:
        return bool(getattr(self._adapter.config, "output_router_logits", False))

    def _hidden(self, batch: PackedBatch, with_router: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        ring, ulysses, sequence = (self.groups[axis] for axis in ("ring", "ulysses", "sequence"))
        context = StepContext(batch.layout, batch.rank, ring, ulysses, sequence, self.gated_delta)
        return self._adapter.hidden(batch, context, with_router)

    def _agree(self, batch: PackedBatch, label_tokens: int | None) -> int:
        """Make sure that all ranks can do the step, before its first exchange; gives the labels of all data
        ranks.
        """
        error = None
        try:
            self._check(batch)
        except ValueError as problem:
            error = problem
        mesh = self.mesh
        # Ranks that exchange by different methods would wait for each other.
        fingerprint = zlib.crc32(self.gated_delta.encode(), batch.fingerprint)
        own = [mesh.data_rank, mesh.sequence_rank, fingerprint, batch.label_tokens]
        found = agree(mesh.cpu_group, error, own)
        leaders = {data: rank for rank, (data, sequence, _, _) in enumerate(found) if sequence == 0}
        for rank, (data, _, fingerprint, _) in enumerate(found):
            if fingerprint != found[leaders[data]][2]:
                raise ValueError(
                    f"ranks {leaders[data]} and {rank} share a row but packed different samples, or with "
                    "other settings, or differ in gated_delta; give every rank of a sequence group the same "
                    "samples, by mesh.data_rank, and the same settings"
                )
        labels = sum(count for _, sequence, _, count in found if sequence == 0)
        if label_tokens is not None and label_tokens < labels:
            raise ValueError(
                f"label_tokens={label_tokens} is less than the {labels} labels of this batch alone; give "
                "the count of all batches of the optimizer step, over all data ranks"
            )
        return labels

    def _check(self, batch: PackedBatch) -> None:
        self._adapter.check_step(self.training)
        layout, mesh = batch.layout, self.mesh
        if (layout.ring, layout.ulysses) != (mesh.ring, mesh.ulysses) or batch.rank != mesh.sequence_rank:
            raise ValueError(
                f"the batch was packed for rank {batch.rank} of ring={layout.ring} × "
                f"ulysses={layout.ulysses}; this is rank {mesh.sequence_rank} of ring={mesh.ring} × "
                f"ulysses={mesh.ulysses}: pass the model's mesh to pack"
            )
