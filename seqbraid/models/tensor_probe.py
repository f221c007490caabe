"""Whether a stock mixer or MLP gives in parts what it gives whole: tried on a copy with small random weights.

What a rank's part is follows from names and shapes. That the stock forward works with it is seen here: that
it counts heads by its weights, cuts fused channels where we do, and does nothing across heads or channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import recognise
from .lora import linear_below
from .tensor_parts import Region

WIDTH, TOKENS = 8, 3


class _Eager:
    """A config but for its attention, which is the plain one."""

    def __init__(self, config: Any) -> None:
        self._of = config
        self._attn_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def parts_make_the_whole(regions: Sequence[Region], head_size: int | None) -> bool | None:
    """Of the regions that the ranks have of one module; None where the copy cannot be run whole, as it wants
    other arguments than those that we know.
    """
    module: Any = regions[0].module
    random = torch.Generator().manual_seed(0)
    whole = _small(module, regions[0], random)
    hidden = recognise.random_numbers(random, 1, TOKENS, WIDTH)
    arguments: dict[str, Any] = {}
    if head_size is not None:
        angles = recognise.random_numbers(random, 2, 1, TOKENS, head_size)
        arguments = {"position_embeddings": tuple(angles.unbind()), "attention_mask": None}

    def run(copy: Any) -> Tensor:
        out = type(module).forward(copy, hidden, **arguments)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    with torch.no_grad():
        try:
            wanted = run(whole)
        except Exception:  # each family is called in its own way
            return None
    copies = [_part(whole, region, rank, len(regions)) for rank, region in enumerate(regions)]
    total: Callable[[], Tensor] = lambda: torch.stack([run(copy) for copy in copies]).sum(0)  # noqa: E731
    return recognise.agrees(total, wanted)


def _small(module: Any, region: Region, random: torch.Generator) -> Any:
    """A copy that makes as many channels, of fewer."""
    copy = recognise.shell(module)
    copy._modules, copy.training = dict(module._modules), False
    outs = {id(cut.module) for cut in region.cuts if cut.dim}
    for name, child in module.named_children():
        linear = linear_below(child)
        if isinstance(linear, nn.Linear):
            rows, columns = linear.weight.shape
            sizes = (columns, WIDTH) if id(linear) in outs else (WIDTH, rows)
            copy._modules[name] = recognise.small_linear(*sizes, random)
        elif list(child.parameters()):
            copy._modules[name] = recognise.shell(child)
            copy._modules[name]._parameters = _random(child, random)
    copy._parameters = _random(module, random)
    if hasattr(module, "config"):
        copy.config = _Eager(module.config)
    return copy


def _random(module: nn.Module, random: torch.Generator) -> dict[str, Any]:
    return {
        name: None
        if p is None
        else nn.Parameter(recognise.random_numbers(random, *p.shape), requires_grad=False)
        for name, p in module._parameters.items()
    }


def _part(whole: Any, region: Region, rank: int, size: int) -> Any:
    """The copy as a rank has it."""
    module: Any = region.module
    copy = recognise.shell(whole)
    copy._modules, copy._parameters = dict(whole._modules), dict(whole._parameters)
    names = {id(linear_below(child)): name for name, child in module.named_children()}
    for cut in region.cuts:
        layer: Any = whole._modules[names[id(cut.module)]]
        weight = layer.weight.chunk(size, cut.dim)[rank]
        bias = layer.bias / size if cut.dim else layer.bias.chunk(size)[rank]
        copy._modules[names[id(cut.module)]] = _linear(weight, bias)
    for chosen in region.chosen:
        if chosen.module is module:
            copy._parameters[chosen.name] = nn.Parameter(chosen.of(copy._parameters[chosen.name]), False)
        elif chosen.name == "weight":
            name = names[id(chosen.module)]
            layer = whole._modules[name]
            weight, bias = (_repeated(chosen.of(x), chosen.repeated) for x in (layer.weight, layer.bias))
            copy._modules[name] = _linear(weight, bias)
    vars(copy).update(region.attributes)
    return copy


def _repeated(rows: Tensor, heads: tuple[int, ...]) -> Tensor:
    return rows.unflatten(0, (max(heads) + 1, -1))[list(heads)].flatten(0, 1) if heads else rows


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
    return layer
