"""The parts of a model as costs are counted by them: which matrices work for every token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..models.parts import LayerParts, ModelParts, unwrapped

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configs call the number of experts a router chooses among."""


def parts_of(model_or_config: Any) -> ModelParts:
    """Of a stock model, of one that `parallelize` or peft has wrapped, or of a config alone; parameters are
    looked at, never touched, so they may be on the meta device.
    """
    model = unwrapped(model_or_config)
    return ModelParts.of(model if isinstance(model, nn.Module) else _weightless(model))


def check_mixer(parts: ModelParts, layer: LayerParts) -> None:
    """Refuse a layer whose mixer we do not know."""
    if layer.mixer is None:
        raise ValueError(
            f"layer {layer.index} of {type(parts.model).__name__} has no one module that we know to mix "
            "tokens; its cost cannot be counted"
        )


def active_share(parts: ModelParts, parameter: nn.Parameter, name: str) -> float:
    """The share of a parameter that works for a token: that of the chosen experts, else all of it."""
    if id(parameter) not in parts.expert_parameters:
        return 1.0
    chosen = getattr(parts.config, "num_experts_per_tok", None)
    all_of_them = next((getattr(parts.config, k) for k in EXPERT_COUNTS if hasattr(parts.config, k)), None)
    if not chosen or not all_of_them:
        raise ValueError(
            f"{type(parts.model).__name__} has experts at {name!r}, but its config does not say how many "
            f"there are ({', '.join(EXPERT_COUNTS)}) and work for a token (num_experts_per_tok)"
        )
    return float(chosen / all_of_them)


def matrices(parts: ModelParts, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that are multiplied with every token: no embeddings, norms or biases."""
    for prefix, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim >= 2 and not name.endswith("bias"):
                path = f"{prefix}.{name}".lstrip(".")
                is_expert = id(parameter) in parts.expert_parameters
                if parameter.ndim > 2 and not is_expert and not _is_convolution(part):
                    raise ValueError(
                        f"{type(module).__name__} has a parameter {path!r} of shape {tuple(parameter.shape)} "
                        "that is no matrix, no convolution and not in experts; its cost cannot be counted"
                    )
                yield path, parameter


def learns(module: nn.Module | None) -> bool:
    """Whether any parameter of a module is trained."""
    return module is not None and any(p.requires_grad for p in module.parameters())


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)


def _weightless(config: Any) -> Any:
    """A model of this config without memory behind its weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    kinds: list[Any] = [AutoModelForCausalLM]
    if config is not config.get_text_config():
        kinds = [AutoModelForImageTextToText, AutoModelForMultimodalLM]
    for kind in kinds:
        if type(config) in kind._model_mapping:
            with torch.device("meta"):
                return kind.from_config(config)
    raise ValueError(f"no causal language model of transformers has the config {type(config).__name__}")
