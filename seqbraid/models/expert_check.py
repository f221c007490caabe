"""Whether the experts of a model can lie over ranks; what cannot is refused by name."""

from __future__ import annotations

from torch import nn

from .expert_kind import expert_kind
from .parts import ModelParts


def check_experts(parts: ModelParts, ep: int) -> None:
    """Refuse `ep` > 1 for a model without experts, with a number that it does not divide, or with experts
    that we do not know how to run.
    """
    name = type(parts.model).__name__
    modules = [module for layer in parts.every_layer for module in layer.experts]
    if not modules:
        raise ValueError(f"ep={ep} shares out experts, and {name} has none; use ep=1")
    if len({id(module) for module in modules}) < len(modules):
        raise ValueError(f"ep={ep}: layers of {name} share their experts; use ep=1")
    names = {id(module): found for found, module in parts.model.named_modules()}
    for module in modules:
        where = f"{names[id(module)]!r} ({type(module).__name__}) of {name}"
        count = next((len(p) for p in module.parameters(recurse=False) if p.ndim == 3), 0)
        if not count or expert_kind(module) is None:
            raise ValueError(
                f"ep={ep}: the experts at {where} are not of a kind that we know (tensors of all experts, "
                "called with hidden states, the experts of each token and their weights); use ep=1"
            )
        if count % ep:
            choices = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            reason = "is more than" if ep > count else "does not divide"
            raise ValueError(f"ep={ep} {reason} the {count} experts at {where}; use one of {choices}")


def refuse_adapted_experts(parts: ModelParts) -> None:
    """Adapters on experts' own tensors are put around their module, or into it, and change what it reads."""
    experts = {id(module) for layer in parts.every_layer for module in layer.experts}
    for name, module in parts.model.named_modules():
        inner = getattr(module, "base_layer", None)
        is_around = any(
            id(part) in experts for part in (inner.modules() if isinstance(inner, nn.Module) else ())
        )
        if is_around or (id(module) in experts and hasattr(module, "parametrizations")):
            raise ValueError(
                f"the experts at {name!r} of {type(parts.model).__name__} have adapters on their own "
                "tensors, which is not supported; give adapters to linear layers alone, as "
                "seqbraid.train.lora.add_lora does"
            )
