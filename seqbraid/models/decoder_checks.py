"""What a decoder may not be: layers, positions, modules and embeddings with which a packed row would not give
what its samples give.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .head import refuse_adapter

MIXERS = {"full_attention", "sliding_attention", "linear_attention"}
"""Kinds of layers that we know to keep packed samples apart in."""

LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotary variants whose frequencies depend on the longest sample of a batch."""

RECURRENT = re.compile(
    r"Mamba|SSM|Ssm[A-Z]|R[Ww][Kk][Vv]|Recurrent|Retention|Hyena|Delta|Lightning|LinearAtt|Conv(?!ers)"
)
"""Names of modules that carry state from token to token in a way the attention interface does not show."""


def check_config(config: Any, name: str) -> None:
    """Refuse a text config of layers, masks or positions that packed samples would change."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - MIXERS:
        raise ValueError(
            f"{name} has layers of kind {', '.join(sorted(kinds - MIXERS))}; supported are "
            f"{', '.join(sorted(MIXERS))}"
        )
    if not getattr(config, "is_causal", True):
        raise ValueError(f"{name} is configured with is_causal=False; only causal decoders are supported")
    parameters = getattr(config, "rope_parameters", None) or {}
    found = {_rope_type(parameters), *(_rope_type(p) for p in parameters.values() if isinstance(p, dict))}
    if found & LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"{name} uses rope_type {', '.join(sorted(found & LENGTH_DEPENDENT_ROPE))}, whose "
            "frequencies depend on the longest sample of a batch, so a packed row would differ from "
            "its samples; use a fixed rope_type (default, linear, yarn, llama3)"
        )


def check_mixers(model: PreTrainedModel, decoder: nn.Module, gated_delta: Sequence[Any]) -> None:
    """Refuse modules that carry something from token to token past attention and the gated-delta layers."""
    of_model = type(model).__name__
    if not getattr(model, "_can_set_attn_implementation", lambda: True)():
        raise ValueError(
            f"{of_model} does not use transformers' attention interface, so its attention cannot be replaced"
        )
    for module in gated_delta:
        refuse_adapter(module.conv1d, f"the convolution of layer {module.layer_idx} of {of_model}")
    known = {id(part) for module in gated_delta for part in module.modules()}
    for name, module in decoder.named_modules():
        if id(module) in known or isinstance(module, Conv1D):  # transformers' Conv1D is a linear layer
            continue
        if name and RECURRENT.search(type(module).__name__):
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                raise ValueError(
                    f"{of_model} has a {type(module).__name__} at {name!r}: an image or audio "
                    "encoder that is not supported; docs/models.md lists what is"
                )
            raise ValueError(
                f"{of_model} has a {type(module).__name__} at {name!r} that carries state between "
                "tokens in an unknown way; supported are softmax attention and the gated-delta "
                "layers of qwen3_next and qwen3_5"
            )


def _rope_type(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type", "default"))


def check_embeddings(embeddings: Mapping[str, nn.Embedding], model: str) -> None:
    """Refuse options by which a row would change what its samples give, or the weights."""
    for name, module in embeddings.items():
        for option, why in (
            (
                "scale_grad_by_freq",
                "divides gradients by the frequency of ids in a batch, which packing changes",
            ),
            ("max_norm", "changes the weights in every forward"),
        ):
            if getattr(module, option):
                raise ValueError(
                    f"{name} of {model} has {option}={getattr(module, option)}, which {why}; "
                    f"set {name}.{option} to {'False' if option == 'scale_grad_by_freq' else 'None'}"
                )
