"""Softmax attention of the stock models, taken over through transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..sequence_parallel.context import StepContext
from ..sequence_parallel.softmax import softmax_attention

NAME = "seqbraid"
"""Our name in transformers' registry. Without a context it is plain SDPA, so `generate` goes on working."""

HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "is_causal",
    "output_hidden_states", "output_router_logits", "return_dict",
}  # fmt: skip
"""Keywords of the attention interface that do not change what is computed in training. Others are refused."""


def no_mask(device: torch.device) -> Tensor:
    """Stands in for the mask of a braided step: 4-D, so stock code hands it through, and empty, so none is
    made.
    """
    return torch.empty(1, 1, 0, 0, device=device)


def braided_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    braid: StepContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within each packed sequence: `[1, H, T, D]` in, `[1, T, H, D]` out."""
    if braid is None:
        if attention_mask is not None and attention_mask.shape[-2:] == (0, 0):
            raise ValueError(
                f"{type(module).__name__} was called in a braided step without its context: the model does "
                "not hand keyword arguments down to its attention, so packed samples would see each other"
            )
        stock: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return stock
    _refuse_unknown(module, query, dropout, sliding_window, kwargs, braid)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = braid.mix(softmax_attention, q_THD, k_TGD, v_TGD, braid, scale, sliding_window, s_aux)
    braid.record(_layer_index(module))
    return out_THD[None], None


def _refuse_unknown(
    module: nn.Module,
    query: Tensor,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
    braid: StepContext,
) -> None:
    name = type(module).__name__
    if query.shape[0] != 1 or query.shape[2] != braid.num_local_tokens:
        raise ValueError(
            f"{name} got queries of shape {tuple(query.shape)}; the step's layout has one row of "
            f"{braid.num_local_tokens} tokens on this rank"
        )
    if dropout:
        raise ValueError(
            f"{name} asks for attention dropout {dropout}; set config.attention_dropout=0 or call .eval()"
        )
    if not (kwargs.get("is_causal", True) in (True, None) and getattr(module, "is_causal", True)):
        raise ValueError(f"{name} is not causal; only causal decoders are supported")
    for key, value in kwargs.items():
        if key not in HARMLESS and value is not None and value is not False:
            raise ValueError(
                f"{name} passes {key}={value!r} to attention, which changes it in a way that is not "
                "supported; known are sliding_window and s_aux (sinks)"
            )
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    layer = _layer_index(module)
    if kinds is not None and kinds[layer] == "sliding_attention" and sliding_window is None:
        raise ValueError(
            f"layer {layer} ({name}) is a sliding-window layer but does not say its window to attention"
        )


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(f"{type(module).__name__} has no layer_idx, so its layer cannot be told from others")
    return int(index)


AttentionInterface.register(NAME, braided_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
