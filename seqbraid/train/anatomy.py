"""The parts of a stock model that costs are counted by: towers, embeddings, decoder layers, head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..models.encoders import towers_of
from ..models.families import family_of
from ..models.gated_delta import is_gated_delta

HEAD_SIZES = ("qk_head_dim", "head_dim", "head_size")
"""What attention modules call the size of a query's head."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configs call the number of experts a router chooses among."""


@dataclass(frozen=True)
class Anatomy:
    """The modules of a model; parameters are looked at, never touched, so they may be on the meta device."""

    model: Any
    config: Any
    """The text decoder's."""
    layers: nn.ModuleList
    head: nn.Module
    visual: Any = None
    audio: Any = None

    @staticmethod
    def of(model_or_config: Any) -> Anatomy:
        """Of a stock model, of one that `parallelize` or peft has wrapped, or of a config alone."""
        model = _unwrapped(model_or_config)
        if not isinstance(model, nn.Module):
            model = _weightless(model)
        config = model.config.get_text_config()
        towers: Any = towers_of(model) if family_of(model.config) is not None else None
        return Anatomy(
            model,
            config,
            _decoder_layers(model, config.num_hidden_layers),
            model.get_output_embeddings(),
            getattr(towers, "visual", None),
            getattr(towers, "audio_tower", None),
        )

    def mixer(self, layer: int) -> tuple[str, Any]:
        """The module in which a layer's tokens meet, and its kind, `gated_delta` or `softmax`."""
        found: list[tuple[str, Any]] = []
        for module in self.layers[layer].modules():
            if is_gated_delta(module):
                found.append(("gated_delta", module))
            elif hasattr(module, "layer_idx") and any(hasattr(module, name) for name in HEAD_SIZES):
                found.append(("softmax", module))
        if len(found) != 1:
            raise ValueError(
                f"layer {layer} of {type(self.model).__name__} has {len(found)} modules that we know to mix "
                "tokens, not 1; its cost cannot be counted"
            )
        return found[0]

    def heads(self, mixer: Any) -> tuple[int, int, int, int]:
        """Query heads, key/value heads, and the sizes of a query (and key) and of a value of softmax
        attention."""
        queries = int(getattr(mixer, "num_heads", None) or self.config.num_attention_heads)
        keys = int(getattr(self.config, "num_key_value_heads", None) or queries)
        size = next(int(getattr(mixer, name)) for name in HEAD_SIZES if hasattr(mixer, name))
        return queries, keys, size, int(getattr(mixer, "v_head_dim", None) or size)

    def window(self, layer: int, mixer: Any) -> int | None:
        """How many keys a query of a sliding-window layer sees, itself included; None where it sees all."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is not None and kinds[layer] != "sliding_attention":
            return None
        found = None
        if hasattr(mixer, "sliding_window"):
            found = mixer.sliding_window
        elif getattr(self.config, "use_sliding_window", True):
            found = getattr(self.config, "sliding_window", None)
        return None if found is None else int(found)

    def active_share(self, name: str) -> float:
        """The share of a parameter that works for a token: that of the chosen experts, else all of it."""
        if "experts" not in name.split("."):
            return 1.0
        chosen = getattr(self.config, "num_experts_per_tok", None)
        all_of_them = next((getattr(self.config, k) for k in EXPERT_COUNTS if hasattr(self.config, k)), None)
        if not chosen or not all_of_them:
            raise ValueError(
                f"{type(self.model).__name__} has experts at {name!r}, but its config does not say how many "
                f"there are ({', '.join(EXPERT_COUNTS)}) and work for a token (num_experts_per_tok)"
            )
        return float(chosen / all_of_them)


def matrices(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that are multiplied with every token: no embeddings, norms or biases."""
    for prefix, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim >= 2 and not name.endswith("bias"):
                path = f"{prefix}.{name}".lstrip(".")
                if parameter.ndim > 2 and "experts" not in path.split(".") and not _is_convolution(part):
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


def _unwrapped(model: Any) -> Any:
    """The stock model below `BraidedModel` and peft's wrapper."""
    if isinstance(model, nn.Module) and hasattr(model, "decoder_layers") and hasattr(model, "mesh"):
        model = model.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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


def _decoder_layers(model: Any, count: int) -> nn.ModuleList:
    """The decoder's list of layers, known by its mixers: a tower may have as many layers."""
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and any(hasattr(part, "layer_idx") for part in module[0].modules())
        ):
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers")
