"""Experts of a layer: each token to its experts, wherever these are; padding to none.

Letters: T slots of this rank, R of them with a token, K experts of a token, E experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.dispatch import Dispatch
from ..comm.group import Group
from ..ops.kernels import DEFAULT
from ..sequence_parallel.context import StepContext
from .expert_kind import ExpertKind, expert_kind, run_experts, weighted_sum
from .running import running_step

TORCHS = ("eager", "grouped_mm", "batched_mm")
"""What transformers calls the ways to run experts that need torch alone."""


def are_experts(module: nn.Module) -> bool:
    """The experts of a layer as one module, called with hidden states and, per token, whom it goes to."""
    tensors = {name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3}
    by_parts = "down_proj" in tensors and ("gate_up_proj" in tensors or "up_proj" in tensors)
    return by_parts or (bool(tensors) and type(module).__name__.endswith("Experts"))


def braid_experts(module: nn.Module, number: int) -> BraidedExperts:
    """Take over a layer's experts; `unbind` undoes it."""
    braided = BraidedExperts(module, number, expert_kind(module))
    module.forward = braided
    return braided


class BraidedExperts:
    """Stands in for the forward of a layer's experts.

    Those that we understand are run by us, on a group of ranks that may be this one alone; others the stock
    way, without the padding. Calls outside of a step go to the stock forward while one rank has all experts.
    """

    def __init__(self, module: nn.Module, number: int, kind: ExpertKind | None) -> None:
        self.module = module
        self.number = number
        """Which of the model's modules of experts this is."""
        self.kind = kind
        self.stock: Callable[..., Tensor] = module.forward
        self.num_experts = next(len(p) for p in module.parameters(recurse=False) if p.ndim == 3)
        """On all ranks together."""
        self.group = Group()
        """The ranks over which the experts lie; `BraidedModel.join_groups` says so."""
        asked = getattr(getattr(module, "config", None), "_experts_implementation", None)
        self.has_kernel = asked not in (None, *TORCHS)
        """Whether the model was told to run its experts by a kernel that we do not have."""

    def __call__(self, hidden_TD: Tensor, *routing: Any, **routing_by_name: Any) -> Tensor:
        step, alone = running_step(), self.group.size == 1
        given = (*routing, *routing_by_name.values())
        # Experts that get tokens sorted by expert are called the stock way: there a slot is not a token.
        plain = all(_is_per_token(x, len(hidden_TD)) for x in (hidden_TD, *given))
        if alone and (step is None or not plain):
            return self.stock(hidden_TD, *routing, **routing_by_name)
        indices = [x for x in given if isinstance(x, Tensor) and not x.is_floating_point()]
        is_known = self.kind is not None and plain and len(given) == 2 and len(indices) == 1
        if step is not None and alone and (self.has_kernel or not is_known):
            return _stock_rows(self.stock, step, hidden_TD, routing, routing_by_name)
        if not is_known:
            raise ValueError(
                f"{type(self.module).__name__} was not called with hidden states, the experts of each token "
                f"and their weights, so they cannot lie over ep={self.group.size} ranks; use ep=1"
            )
        weights_TK = next(x for x in given if x is not indices[0])
        return self._of_slots(step, hidden_TD, indices[0], weights_TK)

    def _of_slots(
        self, step: StepContext | None, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        rows_R = None if step is None else step.real_rows(hidden_TD.device)
        if rows_R is None:
            return self._of_tokens(step, hidden_TD, index_TK, weights_TK)
        out_RD = self._of_tokens(step, hidden_TD[rows_R], index_TK[rows_R], weights_TK[rows_R])
        return _to_slots(out_RD, rows_R, len(hidden_TD))

    def _of_tokens(
        self, step: StepContext | None, hidden_RD: Tensor, index_RK: Tensor, weights_RK: Tensor
    ) -> Tensor:
        assert self.kind is not None
        dispatch = Dispatch.of(index_RK, self.num_experts, self.group)
        if step is not None:
            step.expert_counts[self.number] = dispatch.counts_E
        kernels = DEFAULT if step is None else step.kernels
        x_PD = dispatch.to_experts(hidden_RD)
        y_PD = run_experts(self.module, self.kind, x_PD, dispatch.rows, kernels)
        return weighted_sum(dispatch.from_experts(y_PD), weights_RK, hidden_RD.dtype)


def count_of_all(
    experts: Sequence[BraidedExperts], step: StepContext, device: torch.device, of_stage: bool = False
) -> Tensor | None:
    """How often this rank's tokens went to each expert of each layer, and, behind that, to another rank's:
    `[N, E + 1]` in float64; None where no layer says so. `of_stage`: of all layers, zeros for those that do
    not say so, as those of other stages.
    """
    counted = [(x, step.expert_counts[x.number]) for x in experts if x.number in step.expert_counts]
    if not counted and not (of_stage and experts):
        return None
    widest = max(x.num_experts for x in experts) if of_stage else max(len(counts) for _, counts in counted)
    rows = len(experts) if of_stage else len(counted)
    found = torch.zeros(rows, 1 + widest, dtype=torch.float64, device=device)
    places = [x.number for x, _ in counted] if of_stage else range(len(counted))
    for place, (of_layer, counts_E) in zip(places, counted, strict=True):
        row = found[place]
        own = of_layer.num_experts // of_layer.group.size
        first = own * of_layer.group.rank
        row[: len(counts_E)] = counts_E
        row[-1] = counts_E.sum() - counts_E[first : first + own].sum()
    return found


def _stock_rows(
    stock: Callable[..., Tensor],
    step: StepContext,
    hidden_TD: Tensor,
    routing: tuple[Tensor, ...],
    routing_by_name: dict[str, Tensor],
) -> Tensor:
    rows_R = step.real_rows(hidden_TD.device)
    if rows_R is None:
        return stock(hidden_TD, *routing, **routing_by_name)
    if not len(rows_R):  # a rank of padding alone: one slot, so that every parameter takes part
        rows_R = rows_R.new_zeros(1)
    out_RD = stock(
        hidden_TD[rows_R],
        *(x[rows_R] for x in routing),
        **{name: x[rows_R] for name, x in routing_by_name.items()},
    )
    return _to_slots(out_RD, rows_R, len(hidden_TD))


def _to_slots(out_RD: Tensor, rows_R: Tensor, num_slots: int) -> Tensor:
    return out_RD.new_zeros(num_slots, out_RD.shape[1]).index_copy(0, rows_R, out_RD)


def _is_per_token(x: Any, num_tokens: int) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and len(x) == num_tokens
