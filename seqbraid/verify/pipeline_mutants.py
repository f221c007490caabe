"""Defects of pipeline parallelism: a gradient counts twice or too little, a stage works for itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ..distributed import pipeline as pipeline_module
from ..distributed import tied as tied_module
from ..models import braided as braided_module
from ..plan import pipeline as plan_module
from .mutants import Mutant


def _tied_counted_twice() -> AbstractContextManager[Any]:
    """What the embedding and the head have found is added on both, and then once more."""
    right = tied_module.TiedCopy.finish

    def wrong(self: Any) -> None:
        right(self)
        tied_module.own_part(self.parameter.grad).mul_(2)

    return patch.object(tied_module.TiedCopy, "finish", wrong)


def _micro_batches_averaged() -> AbstractContextManager[Any]:
    """As torch's schedules do where they are not told otherwise."""
    right = pipeline_module.StagePipeline.forward

    def wrong(self: Any, stage: Any, number: int, received: Any) -> Any:
        found = right(self, stage, number, received)
        return found / len(self.work.batches) if stage.is_last else found

    return patch.object(pipeline_module.StagePipeline, "forward", wrong)


def _deepstack_cut_off() -> AbstractContextManager[Any]:
    """One layer on the first stage, whatever features are added behind it."""
    stack = ExitStack()
    stack.enter_context(patch.object(plan_module, "deepstack_layers", lambda parts: 0))
    costs = plan_module.stage_costs
    stack.enter_context(
        patch.object(plan_module, "stage_costs", lambda parts: (costs(parts)[0], float("1e30"), 0.0))
    )
    return stack


def _router_loss_per_stage() -> AbstractContextManager[Any]:
    """The layers before the last stage are taken for a model of their own."""
    right = braided_module.load_balancing_loss

    def wrong(logits: Any, real: Any, top_k: int, group: Any, before: Any = None) -> Tensor:
        return right(logits, real, top_k, group) + right((), real, top_k, group, before)

    return patch.object(braided_module, "load_balancing_loss", wrong)


PIPELINE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("tied gradient counted twice", _tied_counted_twice, "qwen3", pp=2),
    Mutant("micro-batch gradients averaged", _micro_batches_averaged, "qwen3", pp=2),
    Mutant("a DeepStack layer on the second stage", _deepstack_cut_off, "qwen3_vl", pp=2),
    Mutant("router loss per stage", _router_loss_per_stage, "qwen3_moe", pp=2),
)
"""Each with the family that must show it."""
