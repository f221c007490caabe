"""`BraidedModel`: the stock model, fed packed rows."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
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
from ..ops.kernels import KernelOptions
from ..ops.linear_cross_entropy import linear_cross_entropy
from ..ops.table import make_kernels
from ..sequence_parallel.context import StepContext
from .backward_once import backward_once
from .batch import PackedBatch
from .media_adapter import make_adapter
from .router import load_balancing_loss
from .unchanged import Unchanged


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
    """The routers' load-balancing loss, each row's weighted by its share of `label_tokens`, as `mean_loss`
    is; detached, the same on every rank. None where the model has none switched on.
    """
    mtp_loss: Tensor | None = None
    """The loss of multi-token prediction; None where there is none."""


class BraidedModel(nn.Module):
    """A stock model and the mesh it runs on.

    The stock model is kept as it is: without a packed batch it behaves as before, `generate` included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        gated_delta: str = "auto",
        kernels: KernelOptions | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.mesh = mesh
        self.gated_delta = gated_delta
        self.loss_chunk: int | None = None
        """Tokens per chunk of head and loss; None lets the size of the vocabulary decide."""
        self.training = model.training
        self._until_release = ExitStack()
        self._adapter = make_adapter(model)
        self._adapter.check_mesh(mesh, gated_delta)
        self.kernels = make_kernels(kernels, self._adapter.stock_attention)
        self._unchanged = Unchanged(model)
        self.groups: dict[str, Group] = {}
        self._adapter.braid()

    def join_groups(self) -> None:
        """Find the groups of this rank, which all ranks make together."""
        self.groups = {
            axis: Group.of(self.mesh.process_group(axis)) for axis in ("ring", "ulysses", "sequence", "loss")
        }

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

    def __call__(
        self, batch: PackedBatch, label_tokens: int | None = None, seed: int | None = None
    ) -> StepOutput:
        """The loss of a packed batch, divided once by `label_tokens`.

        `label_tokens` is the count of the whole optimizer step where several batches are accumulated, over
        all data ranks, the same on every rank; the batch's own when left out. A model that trains with
        dropout draws it from `seed`, which is another one for every step; any mesh draws the same.
        """
        # Before anything is sent: the parameters of a sharded model are gathered around `forward`.
        count = self._agree("forward", batch, label_tokens, seed)
        divisor = count if label_tokens is None else int(label_tokens)
        output: StepOutput = super().__call__(batch, divisor, seed)
        # Around what a sharded model gathers before its backward.
        return replace(output, loss=backward_once(output.loss, self.mesh.cpu_group))

    def forward(self, batch: PackedBatch, label_tokens: int, seed: int | None = None) -> StepOutput:
        """A step that all ranks have agreed on."""
        divisor = max(1, label_tokens)
        hidden_TD, router = self._hidden(batch, self._adapter.uses_router_loss, seed)
        head = self._adapter.head
        sums = linear_cross_entropy(
            hidden_TD, head.weight, batch.targets, head.bias, self.loss_chunk, kernels=self.kernels
        )
        # A rank without labels contributes an exact zero, and still takes part in the backward.
        loss = sums.loss / divisor
        aux = torch.zeros_like(sums.loss)
        if router is not None:
            top_k = self._adapter.config.num_experts_per_tok
            share = batch.label_tokens / divisor
            # Per row, weighted by the row's labels: no mesh and no accumulation changes it.
            aux = share * load_balancing_loss(router, batch.real, top_k, self.groups["sequence"])
            loss = loss + self._adapter.config.router_aux_loss_coef * aux
        # In float64, where the count of correct tokens is exact.
        own = torch.stack([x.detach().double() for x in (sums.loss, sums.correct, aux)])
        loss_sum, correct, whole_aux = self.groups["loss"].all_reduce(own).unbind()
        return StepOutput(
            loss=loss,
            mean_loss=(loss_sum / divisor).to(sums.loss.dtype),
            loss_sum=loss_sum.to(sums.loss.dtype),
            label_tokens=label_tokens,
            correct_tokens=correct.long(),
            aux_loss=None if router is None else whole_aux.to(sums.loss.dtype),
        )

    def logits(self, batch: PackedBatch) -> list[Tensor]:
        """One `[T, V]` tensor per sample, in the order given: for checks, it holds all logits at once."""
        self._agree("logits", batch, None, 0)
        return self.gathered_logits(batch)

    @torch.no_grad()
    def gathered_logits(self, batch: PackedBatch) -> list[Tensor]:
        """`logits`, with the parameters at hand."""
        hidden_TD, _ = self._hidden(batch, with_router=False, seed=0)
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

    def _hidden(
        self, batch: PackedBatch, with_router: bool, seed: int | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        ring, ulysses, sequence = (self.groups[axis] for axis in ("ring", "ulysses", "sequence"))
        context = StepContext(
            batch.layout,
            batch.rank,
            ring,
            ulysses,
            sequence,
            self.gated_delta,
            seed,
            batch.keys,
            self.kernels,
        )
        return self._adapter.hidden(batch, context, with_router)

    def _agree(self, call: str, batch: PackedBatch, label_tokens: int | None, seed: int | None) -> int:
        """Make sure that all ranks do the same step, before its first exchange; gives the labels of all data
        ranks.
        """
        mesh, error = self.mesh, None
        own, alike = [0, 0], {}
        try:
            self._check(batch, label_tokens, seed)
            own = [batch.fingerprint, batch.label_tokens]
            alike = {"the call": call, "label_tokens": label_tokens, "seed": seed, **self._settings()}
        except Exception as problem:
            error = problem
        found = agree(mesh.cpu_group, error, own, alike)
        for rank, (fingerprint, _) in enumerate(found):
            leader = mesh.leaders[mesh.data_rank_of(rank)]
            if fingerprint != found[leader][0]:
                raise ValueError(
                    f"ranks {leader} and {rank} share a row but packed different samples, or with "
                    "other settings; give every rank of a sequence group the same samples, by "
                    "mesh.data_rank, and the same settings"
                )
        labels = mesh.sum_over_data([[count] for _, count in found])[0]
        if label_tokens is not None and label_tokens < labels:
            raise ValueError(
                f"label_tokens={label_tokens} is less than the {labels} labels of this batch alone; give "
                "the count of all batches of the optimizer step, over all data ranks"
            )
        return labels

    def _settings(self) -> dict[str, Any]:
        """What decides which exchanges a step makes, and what its sums mean: the same on every rank."""
        return {
            "gated_delta": self.gated_delta,
            "training mode": self._adapter.is_training,
            "grad mode": torch.is_grad_enabled(),
            "requires_grad of": {name: p.requires_grad for name, p in self.model.named_parameters()},
            "config": config_values(self._adapter.config),
        }

    def _check(self, batch: PackedBatch, label_tokens: int | None, seed: int | None) -> None:
        if not isinstance(batch, PackedBatch):
            raise ValueError(
                f"a braided model takes what seqbraid.pack gives, not {type(batch).__name__}; the stock "
                "model, for calls of its own, is .model"
            )
        change = self._unchanged.difference(self.model, self)
        if change is not None:
            raise ValueError(f"{change}; call release() first, then change it and parallelize again")
        for name, value in (("label_tokens", label_tokens), ("seed", seed)):
            _check_whole(name, value)
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                raise ValueError(
                    f"torch.autocast({device!r}) is on, which casts inside of kernels that choose their own "
                    "types; leave it out, and give parallelize compute_dtype=torch.bfloat16"
                )
        self._adapter.check_step(batch, seed)
        layout, mesh = batch.layout, self.mesh
        if (layout.ring, layout.ulysses) != (mesh.ring, mesh.ulysses) or batch.rank != mesh.sequence_rank:
            raise ValueError(
                f"the batch was packed for rank {batch.rank} of ring={layout.ring} × "
                f"ulysses={layout.ulysses}; this is rank {mesh.sequence_rank} of ring={mesh.ring} × "
                f"ulysses={mesh.ulysses}: pass the model's mesh to pack"
            )


def _check_whole(name: str, value: Any) -> None:
    if value is None:
        return
    try:
        operator.index(value)
    except TypeError:
        what = "the count of the labels of all batches" if name == "label_tokens" else "the seed"
        raise ValueError(
            f"{name}={value!r} is no whole number; give {what} of the optimizer step, over all data ranks"
        ) from None


OF_NO_STEP = ("architectures", "dtype", "transformers_version", "use_cache")
"""What configs say beside how a model computes in training."""


def config_values(config: Any) -> dict[str, str]:
    """The values of a config that ranks must have in common, in words; where it was read from is not one."""
    return {
        key: _in_words(value)
        for key, value in vars(config).items()
        if not key.startswith("_") and key not in OF_NO_STEP
    }


def _in_words(value: Any) -> str:
    """The same text in every process: a set's own order follows from a seed that each draws for itself."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_in_words(inner)}' for key, inner in value.items())}}}"
    return repr(value)
