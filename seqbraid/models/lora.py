"""LoRA beside a linear layer as peft has it, `W·x + s·B·A·x`: what of it there is."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Lora(NamedTuple):
    """The one adapter of a layer."""

    layer: Any
    """Peft's, which stands in the place of the linear one."""
    linear: Any
    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    name: str

    @property
    def is_on(self) -> bool:
        """Whether it counts now: `disable_adapter` of peft takes it away for a while, as a reference does."""
        return not self.layer.disable_adapters

    @property
    def scale(self) -> float:
        """What peft multiplies by now."""
        return float(self.layer.scaling[self.name])


def lora_of(module: nn.Module, what: str = "a layer") -> Lora | None:
    """The adapter of a layer, if it has one; `ValueError` where it is of another kind."""
    layer: Any = module
    if not hasattr(layer, "base_layer"):
        return None
    names = list(getattr(layer, "lora_A", ()))
    is_plain = (
        len(names) == 1
        and list(layer.active_adapters) == names
        and not (
            layer.disable_adapters or layer.merged or layer.lora_variant or len(layer.lora_magnitude_vector)
        )
        and all(
            type(x[names[0]]) is nn.Linear and x[names[0]].bias is None for x in (layer.lora_A, layer.lora_B)
        )
    )
    if not is_plain:
        raise ValueError(
            f"{what} has an adapter ({type(layer).__name__} of {type(layer).__module__}) that is not one "
            "plain LoRA, switched on and not merged, so tp cannot share it; use tp=1"
        )
    (name,) = names
    return Lora(
        layer,
        layer.base_layer,
        layer.lora_A[name],
        layer.lora_B[name],
        layer.lora_dropout[name],
        name,
    )


def linear_below(module: nn.Module) -> Any:
    """The layer below an adapter; any other as it is."""
    return getattr(module, "base_layer", module)
