"""What a stock module computes, found by running a copy of it on small numbers: never by its name.

A copy has the class and the attributes of the module, and small random weights on the CPU. What does not
compute exactly what we know, or cannot be run this way, is not recognised, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.plain_rows import Norm, Rotation, plain_rows
from ..ops.rows import WIDEST
from ..ops.swiglu import plain_swiglu

ROTARY = "apply_rotary_pos_emb"
"""What the families call their rotation of queries and keys, a function of their file."""


class NormKind(NamedTuple):
    """RMSNorm, as a module has it."""

    eps: float
    centre: float
    gated: bool


class RotaryKind(NamedTuple):
    """Half against half: of all columns of a head, of the first of them."""

    full: bool
    partial: bool


def norm_kind(module: nn.Module) -> NormKind | None:
    """How a module norms rows, if it is an RMSNorm of a kind that we know."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    alone = list(dict(module.named_parameters())) == ["weight"] and not any(True for _ in module.children())
    if not alone or not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if len(weight) > WIDEST:
        return None
    random = torch.Generator().manual_seed(0)
    copy = shell(module)
    own = random_numbers(random, len(weight))
    copy._parameters = {"weight": nn.Parameter(own, requires_grad=False)}
    # Large rows, and some where eps counts.
    scale = torch.tensor([1.0, 30.0, eps**0.5, 0.1 * eps**0.5], dtype=torch.float32, device="cpu")[:, None]
    x = random_numbers(random, 4, len(weight)) * scale
    gate = random_numbers(random, 4, len(weight))
    for kind in (NormKind(eps, centre, gated) for gated in (False, True) for centre in (0.0, 1.0)):
        given = (gate[:, None],) if kind.gated else ()
        wanted = plain_rows(x[:, None], Norm(own, eps, kind.centre), None, *given)[:, 0]
        if agrees(lambda k=kind: copy(x, gate) if k.gated else copy(x), wanted):  # type: ignore[misc]
            return kind
    return None


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module is down(silu(gate(x)) · up(x)), whatever its linear layers are."""
    names = ("gate_proj", "up_proj", "down_proj")
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in names):
        return False
    others = {name for name, _ in module.named_children()} - {*names}
    if others - {"act_fn"} or dict(module.named_parameters(recurse=False)):
        return False
    copy, random = shell(module), torch.Generator().manual_seed(0)
    layers = {
        name: small_linear(*sizes, random)
        for name, sizes in zip(names, ((5, 6), (5, 6), (6, 5)), strict=True)
    }
    copy._modules = {**module._modules, **layers}
    x = 3 * random_numbers(random, 1, 4, 5)
    with torch.no_grad():
        wanted = layers["down_proj"](plain_swiglu(layers["gate_proj"](x), layers["up_proj"](x)))
    return agrees(lambda: copy(x), wanted)


def rotary_kind(function: Callable[..., Any]) -> RotaryKind:
    """What a family's rotation of queries and keys turns, if it is half against half."""
    random = torch.Generator().manual_seed(0)
    q, k = (random_numbers(random, 1, heads, 3, 16) for heads in (2, 1))

    def turns(width: int) -> bool:
        # Nothing takes the two halves of an angle to be the same.
        cos, sin = random_numbers(random, 2, 1, 3, width)
        wanted = [plain_rows(x[0].transpose(0, 1), None, Rotation(cos[0], sin[0])) for x in (q, k)]
        return agrees(
            lambda: _rows_of(function(q, k, cos, sin)), torch.cat([x.flatten(1) for x in wanted], 1)
        )

    return RotaryKind(turns(16), turns(8))


def _rows_of(pair: tuple[Tensor, Tensor]) -> Tensor:
    q, k = pair
    return torch.cat([x[0].transpose(0, 1).flatten(1) for x in (q, k)], 1)


def rotary_of(module: nn.Module) -> Callable[..., Any] | None:
    """The rotation that a module's forward calls by its file's name for it; None where there is none."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return None
    found = forward.__globals__.get(ROTARY)
    return found if callable(found) else None


def with_names(module: nn.Module, names: dict[str, Any]) -> Any:
    """The forward of a module's class, in which some names of its file mean something else."""
    stock = type(module).forward
    own = FunctionType(
        stock.__code__, {**stock.__globals__, **names}, stock.__name__, stock.__defaults__, stock.__closure__
    )
    own.__kwdefaults__ = stock.__kwdefaults__
    return MethodType(own, module)


class EagerConfig:
    """A config but for its attention, which is the plain one."""

    def __init__(self, config: Any) -> None:
        self._of = config
        self._attn_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def random_numbers(random: torch.Generator, *shape: int) -> Tensor:
    """In float32 on the CPU, whatever the defaults are."""
    return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")


def shell(module: nn.Module) -> Any:
    """A module with the class and the attributes of another, hooks and a replaced forward left out."""
    copy = object.__new__(type(module))
    copy.__dict__.update({key: value for key, value in vars(module).items() if key != "forward"})
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        copy.__dict__[hooks] = type(vars(module)[hooks])()
    copy.__dict__["_buffers"] = dict(module._buffers)
    return copy


def small_linear(inputs: int, outputs: int, random: torch.Generator) -> nn.Linear:
    """Random, in float32, on the CPU."""
    with torch.device("cpu"):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float32)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).copy_(random_numbers(random, *parameter.shape))
    return layer


@torch.no_grad()
def agrees(run: Callable[[], Any], wanted: Tensor) -> bool:
    """Whether a run gives what is wanted, to the rounding of float32; one that fails does not."""
    try:
        found = run()
    except Exception:  # a module that is another thing than it looks like fails in its own way
        return False
    if not isinstance(found, Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    # By rows: small rows are not hidden by large ones.
    off = (found - wanted).flatten(0, -2).norm(dim=-1) <= 1e-5 * wanted.flatten(0, -2).norm(dim=-1)
    return bool(off.all())
