"""What a model says of a batch beside its loss: logits, log-probabilities, hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..comm.group import Group
from ..comm.tokens import gather_tokens
from ..mesh import Mesh
from ..ops.cross_entropy import VocabularyShard
from ..ops.kernels import Kernels
from .adapter import DecoderOutput
from .agreement import check_not_cut, check_temperature
from .backward_once import backward_once
from .batch import PackedBatch
from .head import call_with_head
from .local_tokens import HeadPart, LocalTokens, TokenLogprobs
from .own_loss import OwnLoss
from .parts import ModelParts
from .running import normal_tensors
from .stage import Pipeline, StageCall, Travelling
from .step_loss import StepLoss, step_loss
from .tensor import TensorPlan, vocabulary_rows
from .tensor_parts import own_part


class BraidedModel(Protocol):
    """What is needed of one here."""

    mesh: Mesh
    groups: dict[str, Group]
    kernels: Kernels
    loss_chunk: int | None
    pipeline: Pipeline | None
    tensor: TensorPlan | None

    def agree(self, *args: Any, **kwargs: Any) -> Any: ...

    def decode(self, *args: Any, **kwargs: Any) -> DecoderOutput: ...

    def gathered(self, *args: Any, **kwargs: Any) -> Any: ...

    def free(self) -> None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def parts(self) -> ModelParts: ...


def logits(model: BraidedModel, batch: PackedBatch) -> list[Tensor]:
    """See `BraidedModel.logits`."""
    model.agree("logits", [batch], 0)
    batch = batch.to(model.device)
    if (pipeline := model.pipeline) is not None:
        shapes = [(length, int(model.parts.config.vocab_size)) for length in batch.layout.lengths]
        return _of_last_stage(model, pipeline, batch, _logits, 0, shapes, pipeline.dtype)
    with torch.no_grad(), normal_tensors():
        found: list[Tensor] = model.gathered(_logits, batch)
    model.free()
    return found


def _of_last_stage(
    model: BraidedModel,
    pipeline: Pipeline,
    batch: PackedBatch,
    function: Callable[..., Sequence[Tensor]],
    seed: int | None,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
) -> list[Tensor]:
    """What the function gives on the last pipeline stage, tensors of these shapes, on all stages."""

    def of_stage(model: BraidedModel, batch: PackedBatch, call: StageCall) -> Travelling | Sequence[Tensor]:
        if call.stage.is_last:
            return function(model, batch, seed, call=call)
        return Travelling(model.decode(batch, False, seed, call=call).hidden_TD)

    with torch.no_grad(), normal_tensors():
        return pipeline.values(batch, partial(model.gathered, of_stage), shapes, dtype)


def token_logprobs(
    model: BraidedModel, batch: PackedBatch, temperature: float, entropy: bool, seed: int | None
) -> TokenLogprobs:
    """See `BraidedModel.token_logprobs`."""
    error = None
    try:
        if torch.is_grad_enabled():
            check_not_cut(model.mesh, "token_logprobs with a gradient, unlike forward_backward(…, loss=…),")
        check_temperature(temperature)
    except ValueError as problem:
        error = problem
    call = f"token_logprobs(temperature={temperature}, entropy={entropy})"
    model.agree(call, [batch], seed, error=error)
    batch = batch.to(model.device)
    logprobs = partial(_logprobs, temperature=float(temperature), entropy=entropy)
    if (pipeline := model.pipeline) is not None:
        shapes = [tuple(batch.targets.shape)] * (1 + entropy)
        found = _of_last_stage(model, pipeline, batch, logprobs, seed, shapes, pipeline.wide)
        return TokenLogprobs(batch, model.groups["sequence"], *found)
    with normal_tensors():
        values = torch.stack(model.gathered(logprobs, batch, seed))
    if torch.is_grad_enabled():
        values = backward_once(values, model.mesh.cpu_group)
    else:
        model.free()
    return TokenLogprobs(batch, model.groups["sequence"], *values.unbind())


@torch.no_grad()
def hidden_states(model: BraidedModel, batch: PackedBatch) -> Tensor:
    """See `BraidedModel.hidden_states`."""
    check_not_cut(model.mesh, "hidden_states")
    model.agree("hidden_states", [batch], 0)
    with normal_tensors():
        hidden_TD: Tensor = model.gathered(_hidden_states, batch.to(model.device), 0)
    model.free()
    return hidden_TD


def loss_of(model: BraidedModel, decoded: DecoderOutput, batch: PackedBatch, own: OwnLoss | None) -> StepLoss:
    """The sum of this rank's losses, by a function of the user's own if there is one."""
    mtp, group, tp = model.parts.mtp, model.groups["sequence"], model.groups["tp"]
    factor = 0.0 if mtp is None else mtp.module.options.loss_factor
    # Behind each other, so that the head is gathered, and its gradient made, once.
    depths = () if decoded.mtp is None else decoded.mtp.hidden_KTD
    streams = [gather_tokens(x, tp) for x in (decoded.hidden_TD, *depths)]

    def loss(hidden_XD: Tensor, head: nn.Linear) -> StepLoss:
        part = head_part(model, head)
        if own is None:
            return step_loss(hidden_XD, part, batch, factor)
        called = lambda hidden_TD: own(LocalTokens(batch, group, hidden_TD, part, tp))  # noqa: E731
        return step_loss(hidden_XD, part, batch, factor, called)

    head = model.parts.head if own is None else head_for_backward(model)
    return call_with_head(head, loss, streams[0] if len(streams) == 1 else torch.cat(streams))


def head_part(model: BraidedModel, head: nn.Linear) -> HeadPart:
    """This rank's part of a head whose weights are at hand."""
    weight, bias = own_part(head.weight), own_part(head.bias)
    return HeadPart(weight, bias, _vocabulary_shard(model), model.kernels, model.loss_chunk)


def head_for_backward(model: BraidedModel) -> nn.Linear:
    """The head, gathered again for its backward, which the built-in loss has no need of: that makes its
    gradients in the forward.
    """
    head: Any = model.parts.head
    if isinstance(head, FSDPModule):
        head.set_unshard_in_backward(True)
    return model.parts.head


def _logits(
    model: BraidedModel, batch: PackedBatch, seed: int | None = 0, call: StageCall | None = None
) -> list[Tensor]:
    shard, group = _vocabulary_shard(model), model.groups["tp"]

    def whole(hidden_TD: Tensor, head: nn.Linear) -> Tensor:
        own_TV = F.linear(hidden_TD, own_part(head.weight), own_part(head.bias))
        if shard is None:
            return own_TV
        parts = group.all_gather(F.pad(own_TV, (0, shard.widest - own_TV.shape[1])))
        return torch.cat(parts, dim=1)[:, : head.weight.shape[0]]

    logits_TV = call_with_head(model.parts.head, whole, _hidden_states(model, batch, seed, call))
    row = batch.layout.unshard(model.groups["sequence"].all_gather(logits_TV))
    return list(row.split(list(batch.layout.lengths)))


def _logprobs(
    model: BraidedModel,
    batch: PackedBatch,
    seed: int | None,
    temperature: float,
    entropy: bool,
    call: StageCall | None = None,
) -> tuple[Tensor, ...]:
    def logprobs(hidden_TD: Tensor, head: nn.Linear) -> tuple[Tensor, ...]:
        return head_part(model, head).logprobs(hidden_TD, batch.targets, temperature, entropy)

    hidden_TD = _hidden_states(model, batch, seed, call)
    return call_with_head(head_for_backward(model), logprobs, hidden_TD)


def _hidden_states(
    model: BraidedModel, batch: PackedBatch, seed: int | None, call: StageCall | None = None
) -> Tensor:
    """Of all tokens of this rank's sequence shard, those of the tp ranks beside it included."""
    return gather_tokens(model.decode(batch, False, seed, call=call).hidden_TD, model.groups["tp"])


def _vocabulary_shard(model: BraidedModel) -> VocabularyShard | None:
    """Which part of the head is on this rank; None where it is whole."""
    if model.tensor is None:
        return None
    group, vocabulary = model.groups["tp"], model.tensor.vocabulary
    widest = vocabulary_rows(vocabulary, group.size, 0).stop
    start = vocabulary_rows(vocabulary, group.size, group.rank).start
    return VocabularyShard(start, widest, group.maximum, group.all_reduce)
