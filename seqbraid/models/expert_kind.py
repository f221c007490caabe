"""What the experts of a layer compute: found by running a copy of their module, never by its name.

Letters: E experts, T tokens, K experts of a token, P rows, D hidden size, I channels between the projections.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ..comm.dispatch import Dispatch, ExpertRows
from ..comm.group import Group
from ..ops.grouped_linear import grouped_linear
from ..ops.kernels import KernelOptions, Kernels
from ..ops.swiglu import SWIGLU, fused_swiglu
from ..ops.triton_status import RowsNeed
from . import recognise
from .tensor_parts import own_part

SIZES = (
    *("num_experts", "num_local_experts", "n_routed_experts"),
    *("hidden_dim", "hidden_size", "intermediate_dim", "intermediate_size"),
)
"""What the families call sizes that the forward of experts may ask for."""

LOOP = Kernels(KernelOptions(experts="torch", swiglu="torch"))
"""What a copy is run with, whatever is installed."""


class ExpertKind(NamedTuple):
    """down(gate(up(x))) of each token's experts, weighted and summed, as a module has it."""

    first: str
    """The parameter of the first projection, `[E, 2I, D]` where it makes gates too, else `[E, I, D]`."""
    biased: bool
    transposed: bool
    """Inputs before outputs in both projections."""
    silu_gated: bool
    """silu(gate) · up, of halves of what the first projection gives."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters; the first axis of each is that of the experts."""
        biases = (f"{self.first}_bias", "down_proj_bias") if self.biased else ()
        return (self.first, "down_proj", *biases)


def expert_kind(module: nn.Module) -> ExpertKind | None:
    """What the experts of a layer compute, if it is a kind that we know."""
    first = next((name for name in ("gate_up_proj", "up_proj") if name in module._parameters), None)
    own = {name for name, _ in module.named_parameters()}
    if first is None or any(p.shape[0] != len(module._parameters[first]) for p in module.parameters()):  # type: ignore[arg-type]
        return None
    biased = f"{first}_bias" in own
    for transposed in (False, True):
        kind = ExpertKind(first, biased, transposed, False)
        if set(kind.parameters) == own and _computes(module, kind):
            return kind._replace(silu_gated=_gates_by_silu(module, kind))
    return None


def run_experts(module: Any, kind: ExpertKind, x_PD: Tensor, rows: ExpertRows, kernels: Kernels) -> Tensor:
    """What this rank's experts make of their rows, before it is weighted."""
    weights = [own_part(module._parameters[name]) for name in kind.parameters]

    def projection(x: Tensor, number: int) -> Tensor:
        out = grouped_linear(
            x, weights[number], rows.ends_L, lambda: rows.sizes, kernels, transposed=kind.transposed
        )
        return out + weights[2 + number][rows.expert_P] if kind.biased else out

    up = projection(x_PD, 0)
    if kind.silu_gated and kernels.choose(SWIGLU, RowsNeed(up.device, up.dtype)) == "triton":
        gate, linear = up.chunk(2, dim=-1)
        gated = fused_swiglu(gate, linear, in_place=False)
    else:
        gated = module._apply_gate(up) if kind.first == "gate_up_proj" else module.act_fn(up)
    return projection(gated, 1)


def weighted_sum(y_SD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's share of what its experts gave, summed in the order of its picks."""
    tokens, picks = weights_TK.shape
    y_TKD = y_SD.view(tokens, picks, y_SD.shape[-1])
    return (y_TKD * weights_TK[..., None]).sum(1).to(dtype)


def _small(module: nn.Module, kind: ExpertKind) -> Any:
    """A copy with three experts of few channels."""
    copy, random = recognise.shell(module), torch.Generator().manual_seed(0)
    experts, width, inner = 3, 8, 6
    up = 2 * inner if kind.first == "gate_up_proj" else inner
    sizes: dict[str, tuple[int, ...]] = {
        kind.first: (experts, width, up) if kind.transposed else (experts, up, width),
        "down_proj": (experts, inner, width) if kind.transposed else (experts, width, inner),
        f"{kind.first}_bias": (experts, up),
        "down_proj_bias": (experts, width),
    }
    copy._parameters = {
        name: nn.Parameter(recognise.random_numbers(random, *sizes[name]), requires_grad=False)
        for name in kind.parameters
    }
    found = {"num": experts, "n_": experts, "hid": width, "int": inner}
    for name in SIZES:
        if name in vars(copy):
            vars(copy)[name] = next(size for start, size in found.items() if name.startswith(start))
    return copy


@torch.no_grad()
def _computes(module: nn.Module, kind: ExpertKind) -> bool:
    copy, random = _small(module, kind), torch.Generator().manual_seed(1)
    hidden_TD = 2 * recognise.random_numbers(random, 7, 8)
    weights_TK = recognise.random_numbers(random, 7, 2)
    # One expert has no token, and one token goes to the same expert as the one before it.
    for index in ([[0, 2], [2, 0]], [[1, 0], [1, 2], [0, 1]]):
        index_TK = torch.tensor(index, device="cpu").repeat(4, 1)[:7]
        dispatch = Dispatch.of(index_TK, 3, Group())
        try:
            y_PD = run_experts(copy, kind, dispatch.to_experts(hidden_TD), dispatch.rows, LOOP)
            ours = weighted_sum(dispatch.from_experts(y_PD), weights_TK, hidden_TD.dtype)
        except Exception:  # of other shapes, or without what the kind asks for
            return False
        stock = unwrap(type(module).forward)
        if not recognise.agrees(
            lambda f=stock, i=index_TK: f(copy, hidden_TD, i, weights_TK),  # type: ignore[misc]
            ours,
        ):
            return False
    return True


@torch.no_grad()
def _gates_by_silu(module: Any, kind: ExpertKind) -> bool:
    if kind.first != "gate_up_proj":
        return False
    up = recognise.random_numbers(torch.Generator().manual_seed(2), 5, 12)
    gate, linear = up.chunk(2, dim=-1)
    return recognise.agrees(lambda: module._apply_gate(up), silu(gate) * linear)
