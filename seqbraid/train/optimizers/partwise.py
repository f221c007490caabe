"""An optimizer on a mesh: torch's own, run on the part of each parameter that this rank has.

Each number of a parameter is on one rank of a replica, whatever meshes the parameters lie on; an optimizer
that works number by number needs nothing else, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...models.tensor_parts import own_part

MASTER = "master"
"""The entry of a parameter's state that is its float32 copy."""

MakeInner = Callable[[list[dict[str, Any]]], Sequence[torch.optim.Optimizer]]
"""From groups of plain parameters to optimizers that have them all, each group one of theirs."""


class PartwiseOptimizer(torch.optim.Optimizer):
    """Parameters and state lie on the mesh as they do; what steps sees plain float32 tensors of this rank.

    Where a parameter is narrower than float32, all are stepped as float32 copies, which are rounded once per
    step. The gradients of accumulated batches are then summed in float32 too: call `gather_gradients` after
    each backward.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        make_inner: MakeInner,
        entries: Sequence[frozenset[str]] = (),
    ) -> None:
        """
        Args:
            groups: as torch's optimizers take them.
            make_inner: makes what steps.
            entries: of each group, the names of what is kept for a parameter once it has been stepped.
        """
        self.entries = entries
        super().__init__([dict(group) for group in groups], {})
        trained = [p for group in self.param_groups for p in group["params"]]
        self.has_masters = any(p.dtype != torch.float32 for p in trained)
        self._sums: dict[Tensor, Tensor] = {}
        self._own = {p: _placeholder(p) for p in trained}
        """What the optimizer within has of each parameter; memory is lent to it for a step."""
        inner = [{**group, "params": [self._own[p] for p in group["params"]]} for group in self.param_groups]
        self.inner = make_inner(inner)
        self._inner_of = {
            own: one for one in self.inner for group in one.param_groups for own in group["params"]
        }
        of_own = {id(group["params"][0]): group for one in self.inner for group in one.param_groups}
        self._groups = [(group, of_own[id(self._own[group["params"][0]])]) for group in self.param_groups]
        for group, within in self._groups:
            group.update({key: value for key, value in within.items() if key != "params"})

    def gather_gradients(self) -> None:
        """Where there are float32 copies, add what the last backward gave to float32 sums, and let it go."""
        if not self.has_masters:
            return
        for p in self._own:
            if p.grad is not None:
                if p in self._sums:
                    own_part(self._sums[p]).add_(own_part(p.grad))
                else:
                    self._sums[p] = p.grad.float()
                p.grad = None

    def gradients(self) -> dict[Tensor, Tensor]:
        """What the next step would use, by parameter."""
        if self.has_masters:
            self.gather_gradients()
            return self._sums
        return {p: p.grad for p in self._own if p.grad is not None}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, gathered ones too."""
        super().zero_grad(set_to_none)
        self._sums.clear()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step from the gradients; those that were gathered are let go."""
        assert closure is None, "closures are not supported: they would bypass the float32 gradient sums"
        for group, within in self._groups:
            within.update({key: value for key, value in group.items() if key != "params"})
        gradients = self.gradients()
        for p, own in self._own.items():
            own.grad = None
            if p in gradients:
                self._lend(p, own, gradients[p])
        for one in self.inner:
            one.step()
        for p, own in self._own.items():
            if own.grad is not None:
                self._take_back(p, own)
        self._sums.clear()

    def _lend(self, p: Tensor, own: nn.Parameter, gradient: Tensor) -> None:
        state = self.state[p]
        if self.has_masters and MASTER not in state:
            state[MASTER] = p.detach().float()
        own.data = own_part(state[MASTER] if self.has_masters else p.detach())
        own.grad = own_part(gradient)
        kept = {key: own_part(x) if isinstance(x, Tensor) else x for key, x in state.items() if key != MASTER}
        if kept or own not in self._inner_of[own].state:  # some make their state when they are made
            self._inner_of[own].state[own] = kept

    def _take_back(self, p: Tensor, own: nn.Parameter) -> None:
        state, found = self.state[p], self._inner_of[own].state.pop(own, {})
        for key, value in found.items():
            before = state.get(key)
            if not (isinstance(before, Tensor) and own_part(before) is value):
                state[key] = _as_its_parameter(value, p)
        if self.has_masters:
            own_part(p).copy_(own.data)
        own.grad = None


def _placeholder(p: Tensor) -> nn.Parameter:
    """Of the shape of this rank's part, and without memory of its own."""
    return nn.Parameter(torch.zeros((), device=p.device).expand(own_part(p.detach()).shape))


def _as_its_parameter(value: Any, p: Tensor) -> Any:
    """A new entry of the state, on the mesh as its parameter is."""
    if not (isinstance(p, DTensor) and isinstance(value, Tensor) and value.dim()):
        return value
    return DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
