"""`BraidedModel`: a stock model on a mesh, run on packed rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..comm.consensus import agree
from ..comm.group import Group
from ..mesh import Mesh
from ..ops.kernels import KernelOptions
from ..ops.table import make_kernels
from ..sequence_parallel.context import StepContext
from . import values
from .adapter import DecoderOutput
from .agreement import Agreed, agree_on_step, check_not_cut, whole_numbers
from .backward_once import backward_once
from .batch import PackedBatch
from .call_checks import call_settings, check_call, stage_settings
from .local_tokens import TokenLogprobs
from .media_adapter import make_adapter
from .mtp_step import sums_of_depths
from .output import LocalLoss, StepOutput
from .own_loss import OwnLoss
from .parts import ModelParts
from .router import load_balancing_loss, router_sums
from .running import normal_tensors
from .stage import Pipeline, Stage, StageCall, Travelling, tied_copies
from .step_sums import StepSums
from .stock_again import full_state, generate_alone, save_stock
from .stopped import anew_if_it_stops
from .tensor_parts import whole_tensor
from .unchanged import Unchanged

ReduceGradients = Literal["each", "once"]

T = TypeVar("T")


class BraidedModel(nn.Module):
    """A stock model and the mesh it runs on.

    The stock model is not replaced: without a packed batch it behaves as before, `generate` included.
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
        self.reduce_gradients: ReduceGradients = "each"
        """When ranks exchange the gradients of micro-batches (`accumulating`)."""
        self.copies: dict[str, str] = {}
        """Parameters that another pipeline stage has too, counts in norms and saves: under which name."""
        self._structure = (model,)  # no module of this one
        self.pipeline: Pipeline | None = None
        """What runs micro-batches through the stages that the model is cut into; None where it is whole."""
        self.training = model.training
        self._until_release = ExitStack()
        self._adapter = make_adapter(model)
        self.tensor = self._adapter.check_mesh(mesh, gated_delta)
        """What tensor parallel ranks share; None for one."""
        self.kernels = make_kernels(kernels, self._adapter.stock_attention)
        self._unchanged = Unchanged(model)
        self.groups: dict[str, Group] = {}
        self._adapter.braid()

    def keep(self, stages: Sequence[Stage], structure: PreTrainedModel) -> None:
        """Leave the model some of its pipeline stages, and free the others; `release` gives it back so."""
        self._structure, before = (structure,), self.parts
        self._adapter.keep(stages)
        self.copies = tied_copies(structure, before, self.parts)
        self._unchanged = Unchanged(self.model)
        if self.tensor is not None:
            self.tensor = self.tensor.kept(self.parts)

    def join_groups(self) -> None:
        """Find the groups of this rank, which all ranks make together."""
        names = ["pp", "ring", "ulysses", "sequence", "row", "tp", "loss"] + ["ep"] * (self.mesh.ep > 1)
        self.groups = {name: Group.of(self.mesh.process_group(name)) for name in names}
        for experts in self._adapter.experts:
            experts.group = self.groups.get("ep", experts.group)

    @property
    def device(self) -> torch.device:
        """Where the model computes; batches come to it."""
        return next(self.model.parameters()).device

    @property
    def parts(self) -> ModelParts:
        """Where the stock model keeps what."""
        return self._adapter.parts

    @property
    def structure(self) -> PreTrainedModel:
        """The stock model with all of its layers; without weights, where it is cut into pipeline stages."""
        return self._structure[0]

    def __call__(
        self, batch: PackedBatch, label_tokens: int | None = None, seed: int | None = None
    ) -> StepOutput:
        """The loss of a packed batch, divided once by `label_tokens`: for your own training loop, where
        `forward_backward` does not fit. The ranks agree at each call.

        For gradient accumulation over several batches, `label_tokens` is the number of label tokens of the
        whole optimizer step over all data ranks, the same on every rank; by default that of this batch.
        Dropout is drawn from `seed`, a different one for every step, and is the same on every mesh.
        """
        check_not_cut(self.mesh, "model(batch), unlike forward_backward(model, batches),")
        # Before anything is sent: the parameters of a sharded model are gathered around `forward`.
        agreed = self.agree("forward", [batch], seed, label_tokens=label_tokens)
        count = agreed.label_tokens
        if label_tokens is not None and agreed.weight_sum is not None:
            raise ValueError(
                f"label_tokens={label_tokens} cannot divide the losses of labels with weights, whose sum "
                "does; leave it out, or use forward_backward for several batches"
            )
        divisor = agreed.divisor(None if label_tokens is None else operator.index(label_tokens))
        label_tokens = count if label_tokens is None else operator.index(label_tokens)
        if label_tokens < count:
            raise ValueError(
                f"label_tokens={label_tokens} is less than the {count} label tokens of this batch alone; "
                "pass the number of the whole optimizer step, over all data ranks"
            )
        local = self.local_loss(batch.to(self.device), label_tokens, divisor, seed)
        output = self.output(local.loss, local.sums[None], label_tokens, divisor, local.expert_counts)
        # Around what a sharded model gathers before its backward.
        return replace(output, loss=backward_once(output.loss, self.mesh.cpu_group))

    def local_loss(
        self,
        batch: PackedBatch,
        label_tokens: int,
        divisor: float,
        seed: int | None = None,
        loss: OwnLoss | None = None,
    ) -> LocalLoss:
        """This rank's share of the loss of a step that all ranks have agreed on."""
        with normal_tensors(), anew_if_it_stops(self):
            local: LocalLoss = super().__call__(batch, label_tokens, divisor, seed, loss)
        if not torch.is_grad_enabled():
            self.free()
        if loss is not None:
            loss.settle(self.mesh.cpu_group)
        return local

    def on_stage(self, call: StageCall, batch: PackedBatch, *numbers: Any) -> Any:
        """What goes to the next pipeline stage; on the last one, the `local_loss` with these arguments."""
        with anew_if_it_stops(self):
            return super().__call__(batch, *numbers, call)

    def forward(
        self,
        batch: PackedBatch,
        label_tokens: int,
        divisor: float,
        seed: int | None = None,
        loss: OwnLoss | None = None,
        call: StageCall | None = None,
    ) -> LocalLoss | Travelling:
        """See `local_loss`, which gathers the parameters of a sharded model around it."""
        decoded = self.decode(batch, self._adapter.uses_router_loss, seed, batch.mtp_depth > 0, call)
        before = None if call is None else call.router_2E
        if call is not None and not call.stage.is_last:
            routed, real = decoded.router_logits, batch.real[batch.plans.share]
            top_k = getattr(self._adapter.config, "num_experts_per_tok", 0)
            sums_2E = None if routed is None else router_sums(routed, real, top_k, before)
            # No view, of which FSDP warns, and no tensor that came in.
            embeds = None if decoded.embeds_1TD is None else decoded.embeds_1TD.clone()
            return Travelling(decoded.hidden_TD, sums_2E, decoded.expert_counts, embeds)
        sums = values.loss_of(self, decoded, batch, loss)
        # A rank without labels contributes an exact zero, and still takes part in the backward.
        share = sums.loss / (divisor or 1)
        aux = torch.zeros_like(sums.main)
        if decoded.router_logits is not None:
            # Per row, weighted by the row's labels: no mesh and no accumulation changes it.
            aux = batch.label_tokens / max(1, label_tokens) * self._router_loss(decoded, batch, before)
            share = share + self._adapter.config.router_aux_loss_coef * aux
            # Of all tokens of the tp ranks, as the other sums are.
            aux = self.groups["tp"].all_reduce(aux.detach())
        # In float64, where the count of correct tokens is exact.
        found = torch.stack([x.detach().double() for x in (sums.main, sums.correct, aux)])
        if sums.mtp_K3 is not None:
            found = torch.cat([found, sums_of_depths(sums, batch, self.groups["row"], self.groups["tp"])])
        return LocalLoss(share, found, decoded.expert_counts)

    def _router_loss(self, decoded: DecoderOutput, batch: PackedBatch, before_2E: Tensor | None) -> Tensor:
        """Of the decoder's routers, and of those of multi-token prediction beside them."""
        top_k, row = self._adapter.config.num_experts_per_tok, self.groups["row"]
        routed, real = decoded.router_logits or (), batch.real[batch.plans.share]
        aux = load_balancing_loss(routed, real, top_k, row, before_2E)
        if decoded.mtp is not None and (logits_RE := decoded.mtp.router_logits_RE) is not None:
            every = logits_RE.new_ones(len(logits_RE), dtype=torch.bool)
            aux = aux + load_balancing_loss((logits_RE,), every, top_k, row)
        return aux

    def output(
        self,
        loss: Tensor,
        sums_NX: Tensor,
        label_tokens: int,
        divisor: float,
        expert_counts: Tensor | None = None,
        metrics: Mapping[str, Tensor] | None = None,
    ) -> StepOutput:
        """What a step gives: the sums of its micro-batches on this rank, added over all ranks."""
        sums = StepSums(sums_NX, expert_counts, {} if metrics is None else metrics)
        is_cut, has_aux = self.pipeline is not None, self._adapter.uses_router_loss
        return sums.output(self.groups, loss, label_tokens, divisor, has_aux, is_cut)

    def logits(self, batch: PackedBatch) -> list[Tensor]:
        """One `[T, V]` tensor per sample, in the order given: for checks, it holds all logits at once."""
        return values.logits(self, batch)

    def token_logprobs(
        self, batch: PackedBatch, temperature: float = 1.0, entropy: bool = False, seed: int | None = None
    ) -> TokenLogprobs:
        """The log-probability of each target of this rank, differentiable: for your own training loop and,
        under `torch.no_grad()`, of a reference model. All ranks call it, and all run a backward or none.

        Args:
            batch: the result of `pack` for this model's mesh.
            temperature: what logits are divided by.
            entropy: whether the entropy of each distribution is wanted as well.
            seed: what dropout is drawn from, as in `model(batch)`.
        """
        return values.token_logprobs(self, batch, temperature, entropy, seed)

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """`[T, D]`: what the head is given at this rank's tokens, without a gradient: what another model is
        distilled from (`LocalTokens.kl`). All ranks call it.
        """
        return values.hidden_states(self, batch)

    def head_weight(self) -> Tensor:
        """`[V, D]`: the head's weight, whole on every rank, without a gradient. All ranks call it."""
        check_not_cut(self.mesh, "head_weight")
        agree(self.mesh.cpu_group, None, alike={"the call": "head_weight"})
        return whole_tensor(self.parts.head.weight)

    def gathered(self, function: Callable[..., T], *args: Any) -> T:
        """A function of this model and others, called with the model's parameters at hand."""
        with anew_if_it_stops(self):
            return function(self, *args)

    def agree(
        self,
        call: str,
        batches: Sequence[PackedBatch],
        seed: int | None = None,
        counts: Mapping[str, int] | None = None,
        flag: bool = False,
        *,
        error: Exception | None = None,
        **numbers: int | None,
    ) -> Agreed:
        """Make sure that all ranks make the same call with batches of the same step, before anything is sent.

        What one rank refuses, all ranks raise; an `error` is what this one refused before.
        """
        alike: dict[str, Any] = {}
        of_stage: dict[str, Any] = {}
        try:
            if error is not None:
                raise error
            known = whole_numbers(seed=seed, **numbers)
            check_call(self, self.mesh, self._adapter, self._unchanged, self.tensor, batches, known["seed"])
            settings = call_settings(
                self.mesh, self._adapter, self.gated_delta, self.reduce_gradients, self.loss_chunk
            )
            alike = {"the call": call, **known, **settings}
            of_stage = stage_settings(self._adapter)
        except Exception as problem:
            error = problem
        return agree_on_step(self.mesh, error, batches, alike, counts, flag, of_stage)

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one of several micro-batches, of which exactly one is the `last`.

        With `MemoryOptions(reduce_gradients="once")` ranks exchange gradients in the last one alone; before
        it every rank keeps what it has of the whole gradient. Otherwise this changes nothing.
        """
        sharded: Any = self if isinstance(self, FSDPModule) else None
        waits = sharded is not None and self.reduce_gradients == "once" and not last
        if waits:
            sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if waits:
                sharded.set_requires_gradient_sync(True)

    def free(self) -> None:
        """Let go of what stays gathered for a backward where none will come."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def config(self) -> Any:
        """The stock model's."""
        return self.model.config

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The stock model's `generate`, in one process; where ranks share the model it is refused."""
        return generate_alone(self, self.mesh, *args, **kwargs)

    def save_pretrained(self, directory: str | Path, tokenizer: Any = None, **kwargs: Any) -> None:
        """Write the stock checkpoint that `from_pretrained` loads; all ranks call it, the first writes.

        Args:
            directory: where to.
            tokenizer: or processor, written beside the model.
            kwargs: of the stock model's `save_pretrained`.
        """
        save_stock(self, isinstance(self, FSDPModule), directory, tokenizer, kwargs)

    def full_state(self, trained_alone: bool = False) -> dict[str, Any]:
        """The tensors of the stock model, in full and on the CPU, on the first rank; all ranks call it."""
        return full_state(self, trained_alone)

    def until_release(self, change: AbstractContextManager[Any]) -> None:
        """Make a change to the stock model that `release` undoes."""
        self._until_release.enter_context(change)

    def release(self) -> PreTrainedModel:
        """Undo the braid and give the stock model back."""
        self._until_release.close()
        self._adapter.unbraid()
        return self.model

    def decode(
        self,
        batch: PackedBatch,
        with_router: bool,
        seed: int | None,
        with_mtp: bool = False,
        call: StageCall | None = None,
    ) -> DecoderOutput:
        """The decoder's output for this rank's tokens, of a step that all ranks have agreed on."""
        ring, ulysses, sequence, row = (self.groups[n] for n in ("ring", "ulysses", "sequence", "row"))
        keys = None if batch.keys is None else batch.keys[batch.plans.share]
        context = StepContext(
            batch.plans, ring, ulysses, sequence, row, self.gated_delta, seed, keys, self.kernels
        )
        return self._adapter.decode(batch, context, with_router, with_mtp, call)
