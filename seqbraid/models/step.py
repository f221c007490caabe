"""The optimizer step: its micro-batches, prepared ahead, and the one function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .agreement import Agreed, Divisor, check_divisor
from .backward_once import DifferentiatedLoss
from .batch import BadBatch, PackedBatch
from .braided import BraidedModel
from .local_tokens import TokenLoss
from .output import LocalLoss, StepOutput
from .own_loss import OwnLoss
from .stage import StageCall, Travelling
from .step_loss import MTP_SUMS


@dataclass(frozen=True)
class Step:
    """One rank's micro-batches of an optimizer step: made ahead of it, without communication."""

    batches: Sequence[PackedBatch]
    """The micro-batches that `pack` made, with a `BadBatch` for each that it refused; the same number on
    every rank.
    """
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of this data rank's samples, such as tokens, to be summed over the data ranks."""


def agree_on(
    model: BraidedModel,
    step: Step | Sequence[PackedBatch],
    divisor: Divisor | None = None,
    seed: int | None = None,
    flag: bool = False,
    loss: TokenLoss | None = None,
) -> Agreed:
    """The one agreement of a step: its label tokens and counts over all data ranks, and whether some rank
    raised its flag. What `pack` or a check refused on one rank is raised on all.
    """
    step = _step(step)
    call = "forward_backward" if torch.is_grad_enabled() else "evaluation"
    error = None
    if loss is not None:  # which gathers a sharded head once more
        call += f" with loss={OwnLoss(loss).name}"
    try:
        if check_divisor(divisor) is not None:
            call += f" with divisor={divisor}"
    except ValueError as problem:
        error = problem
    return model.agree(call, step.batches, seed, step.counts, flag, error=error)


def forward_backward(
    model: BraidedModel,
    step: Step | Sequence[PackedBatch],
    loss: TokenLoss | None = None,
    divisor: Divisor | None = None,
    *,
    seed: int | None = None,
    agreed: Agreed | None = None,
    after: Callable[[int], None] | None = None,
) -> StepOutput:
    """Run forward and backward of the micro-batches of an optimizer step; gradients accumulate in `.grad`.

    Under `torch.no_grad()` there is no backward: an evaluation.

    Args:
        model: the result of `parallelize`.
        step: a `Step`, or a list of results of `pack`.
        loss: a `TokenLoss`: is given this rank's tokens (`LocalTokens`) and returns the sum of their losses,
            alone or with a dict of sums to log; by default cross entropy over the label tokens.
        divisor: what the sum over the whole step is divided by: a number, `"tokens"` (with a label),
            `"samples"` (with a label), `"pairs"` (of them), or the name of one of the step's counts. By
            default the label tokens, or the sum of their weights where the built-in loss is given some.
        seed: what dropout is drawn from, a different one for every step.
        agreed: the result of `agree_on` for this step, if it was called before.
        after: called with the number of each micro-batch, from 1, when its backward is done.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                      num_attention_heads=2, num_key_value_heads=1)
    >>> model = seqbraid.parallelize(AutoModelForCausalLM.from_config(config))
    >>> rows = [{"input_ids": [5, 6, 7]}], [{"input_ids": [8, 9]}, {"input_ids": [4]}]
    >>> out = forward_backward(model, [seqbraid.pack(row, config) for row in rows])
    >>> out.label_tokens, len(out.batch_losses)
    (3, 2)
    """
    step = _step(step)
    if agreed is None:
        agreed = agree_on(model, step, divisor, seed, loss=loss)
    by = agreed.divisor("tokens" if divisor is None and loss is not None else check_divisor(divisor))
    own = None if loss is None else OwnLoss(loss)
    run = _in_turn if model.pipeline is None else _through_stages
    done = run(model, step.batches, StepNumbers(agreed.label_tokens, by, seed, own), after)
    metrics = None if own is None else own.metrics
    out = model.output(done.total, done.sums_N3, agreed.label_tokens, by, done.expert_counts, metrics)
    return replace(out, loss=out.loss.as_subclass(DifferentiatedLoss))


class StepNumbers(NamedTuple):
    """What all micro-batches of a step have in common."""

    label_tokens: int
    divisor: float
    seed: int | None
    loss: OwnLoss | None


class Done(NamedTuple):
    """What the micro-batches of a step have come to on this rank."""

    total: Tensor
    sums_N3: Tensor
    expert_counts: Tensor | None


def _in_turn(
    model: BraidedModel,
    batches: Sequence[PackedBatch],
    numbers: StepNumbers,
    after: Callable[[int], None] | None,
) -> Done:
    """One micro-batch after the other, forward and backward."""
    total: Tensor | None = None
    sums: list[Tensor] = []
    counts: Tensor | None = None
    for number, batch in enumerate(batches, start=1):
        with model.accumulating(last=number == len(batches)):
            local = model.local_loss(batch.to(model.device), *numbers)
            if torch.is_grad_enabled():
                local.loss.backward()
        total = local.loss.detach() if total is None else total + local.loss.detach()
        sums.append(local.sums)
        counts = _added(counts, local.expert_counts)
        del local
        if after is not None:
            after(number)
    assert total is not None
    return Done(total, torch.stack(sums), counts)


def _through_stages(
    model: BraidedModel,
    batches: Sequence[PackedBatch],
    numbers: StepNumbers,
    after: Callable[[int], None] | None,
) -> Done:
    """The micro-batches of a model that is cut into stages. Ranks without the last one have sums of zero."""
    assert model.pipeline is not None
    counts: Tensor | None = None
    has_router = bool(getattr(model.parts.config, "output_router_logits", False))

    def call(batch: PackedBatch, stage: StageCall) -> LocalLoss | Travelling:
        nonlocal counts
        found = model.on_stage(stage, batch.to(model.device), *numbers)
        counts = _added(counts, found.expert_counts)
        return found

    depth = batches[0].mtp_depth
    found = model.pipeline.run(batches, call, after, with_router=has_router, with_mtp=depth > 0)
    if numbers.loss is not None:
        numbers.loss.spread_metrics(model.mesh.cpu_group, bool(found), model.device)
        numbers.loss.settle(model.mesh.cpu_group)
    total = torch.zeros((), dtype=model.pipeline.wide, device=model.device)
    sums = torch.zeros(len(batches), 3 + MTP_SUMS * depth, dtype=torch.float64, device=model.device)
    if found:
        total = torch.stack([local.loss.detach() for local in found]).sum()
        sums = torch.stack([local.sums for local in found])
    return Done(total, sums, counts)


def _added(counts: Tensor | None, more: Tensor | None) -> Tensor | None:
    if counts is None or more is None:
        return counts if more is None else more
    return counts + more


def _step(step: Step | Sequence[PackedBatch]) -> Step:
    """What is no step is refused like a sample that cannot be packed: on every rank, by the agreement."""
    if isinstance(step, PackedBatch | BadBatch) or not isinstance(step, Step | Iterable):
        return Step([_refused(f"a step is a list of results of seqbraid.pack, not {type(step).__name__}")])
    found = step if isinstance(step, Step) else Step(list(step))
    if not found.batches:
        return Step(
            [_refused("the step has no micro-batches; give at least one, the same number on every rank")]
        )
    return found


def _refused(reason: str) -> PackedBatch:
    return cast(PackedBatch, BadBatch(ValueError(reason)))
