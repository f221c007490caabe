"""The decoder of a stock language model and its layers; where there are none, what kind of model it is."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

SUPPORTED = (
    "supported are text decoders of transformers that keep their layers in one list and use its attention "
    "interface (docs/models.md lists them)"
)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """What transformers calls the base model: all but the head."""
    decoder = model.base_model
    if decoder is not model:
        return decoder
    name = type(model).__name__
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no language-model head; load the checkpoint with its ForCausalLM class, for example "
            "by AutoModelForCausalLM.from_pretrained"
        )
    raise ValueError(
        f"{name} (model_type {model.config.model_type!r}) has its decoder where transformers' base_model "
        f"does not find it, like the language model of a multimodal model; {SUPPORTED}"
    )


def find_layers(model: PreTrainedModel, decoder: nn.Module, config: Any) -> nn.ModuleList:
    """The decoder's list of layers, whatever the family calls it."""
    count = getattr(config, "num_hidden_layers", None)
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} (model_type {model.config.model_type!r}) {_kind(decoder, config, count)}; "
        f"{SUPPORTED}"
    )


def layer_configs(config: Any) -> list[Any]:
    """What a config says of each layer: one config for all, or one per layer where it lets them differ; then
    reading what differs from the config of all is an error.
    """
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def _kind(decoder: nn.Module, config: Any, count: int | None) -> str:
    """What kind of model keeps no list of its layers, in words."""
    if type(decoder).__name__.endswith("DecoderWrapper"):
        return "is the decoder of an encoder-decoder pair"
    if hasattr(decoder, "encoder"):
        return "is built as an encoder"
    parts = [name for name in getattr(config, "sub_configs", {}) if hasattr(config, name)]
    if parts:
        return f"is made of several models ({', '.join(parts)})"
    if not hasattr(config, "num_attention_heads"):
        return "has no attention heads: it carries state from token to token in another way"
    lists = {name: module for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)}
    below = next((name for name, module in lists.items() if len(module) == count), None)
    if below is not None:
        return f"keeps its layers in a part of its decoder ({below!r})"
    sizes = ", ".join(f"{len(module)} in {name!r}" for name, module in list(lists.items())[:2])
    return f"has num_hidden_layers={count} in its config but no list of that many layers (there are {sizes})"
