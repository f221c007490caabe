"""Softmax attention of the stock models, taken over through transformers' attention interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..sequence_parallel.context import StepContext
from ..sequence_parallel.softmax import softmax_attention
from .mixers import config_windows, masks_fully

NAME = "seqbraid"
"""Our name in transformers' registry. Without a context it is plain SDPA, so `generate` goes on working."""

HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "is_causal",
    "output_hidden_states", "output_router_logits", "return_dict",
}  # fmt: skip
"""Keywords of the attention interface that do not change what is computed in training. Others are refused."""


class NoMask(Tensor):
    """Stands in for the mask of a braided step: 4-D, so stock code hands it through, and empty, so none is
    made. A family that computes with it has rules of its own, which a packed row would not follow.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let it be looked at, moved, sliced, asked whether it masks anything, and nothing else."""
        if func.__name__ == "all":  # of `mask == 1`: every token is attended to
            return torch.ones((), dtype=torch.bool, device=args[0].device)
        if torch.compiler.is_compiling():
            raise ValueError(
                "torch.compile cannot trace a parallelized model, whose layers exchange tokens; call the "
                "model as parallelize gave it"
            )
        if func.__name__ not in HARMLESS_TO_A_MASK:
            raise ValueError(
                f"the model uses its attention mask ({func.__name__}): its own masking rules would not "
                "hold in a packed row; only causal masks, and windows passed to attention as "
                "sliding_window=, are supported"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


HARMLESS_TO_A_MASK = {
    "__eq__", "__get__", "__getitem__", "__len__", "__repr__", "size", "dim", "numel", "to", "type", "detach",
    "clone", "contiguous", "is_floating_point", "is_complex", "element_size", "requires_grad_", "stride",
    "data_ptr",
}  # fmt: skip


def no_mask(device: torch.device) -> Tensor:
    """The mask that the decoder is given in a braided step."""
    return torch.empty(1, 1, 0, 0, device=device).as_subclass(NoMask)


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
        if isinstance(attention_mask, NoMask):
            raise ValueError(
                f"{type(module).__name__} was called without the context of the step: the model does not "
                "pass keyword arguments down to its attention, so packed samples would see each other"
            )
        stock: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return stock
    _refuse_unknown(module, query, attention_mask, dropout, sliding_window, kwargs, braid)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_TGD, v_TGD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out_THD = braid.mix(softmax_attention, q_THD, k_TGD, v_TGD, braid, scale, sliding_window, s_aux)
    braid.record(_layer_index(module))
    return _with_padding(out_THD, v_TGD, braid)[None], None


def _with_padding(out_THD: Tensor, v_TGD: Tensor, braid: StepContext) -> Tensor:
    """The attention of padding is its own value, as that of a sample's first token is.

    Nobody looks at it; but a zero may be where what follows has no gradient, and 0 · ∞ is not a number.
    """
    rows = braid.padding_rows(out_THD.device)
    if rows is None:
        return out_THD
    values_RHD = v_TGD[rows].repeat_interleave(out_THD.shape[1] // v_TGD.shape[1], dim=1)
    return out_THD.index_copy(0, rows, values_RHD)


def _refuse_unknown(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
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
    if attention_mask is not None and not isinstance(attention_mask, NoMask):
        raise ValueError(
            f"{name} passes its own mask to attention, of shape {tuple(attention_mask.shape)}, which "
            "would not hold in a packed row; only causal masks, and windows passed as sliding_window=, "
            "are supported"
        )
    if dropout:
        raise ValueError(
            f"{name} uses attention dropout {dropout}; set config.attention_dropout=0 or call .eval()"
        )
    if not (kwargs.get("is_causal", True) in (True, None) and getattr(module, "is_causal", True)):
        raise ValueError(f"{name} is not causal; only causal decoders are supported")
    for key, value in kwargs.items():
        if key not in HARMLESS and value is not None and value is not False:
            raise ValueError(
                f"{name} passes {key}={value!r} to attention, which is not supported; supported are "
                "sliding_window and s_aux (sinks)"
            )
    _refuse_unsaid_window(module, sliding_window)


def _refuse_unsaid_window(module: nn.Module, sliding_window: int | None) -> None:
    """A layer that masks by a window of the config must say so to attention, or be known to see all."""
    if sliding_window is not None:
        return
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    layer = _layer_index(module)
    if kinds is not None and kinds[layer] == "full_attention":
        return
    found = config_windows(config)
    if kinds is not None and kinds[layer] == "sliding_attention":
        what = "is a sliding-window layer"
    elif found and getattr(config, "use_sliding_window", True) and not masks_fully(module):
        what = f"has {', '.join(f'{key}={window}' for key, window in found.items())} in its config"
    else:
        return
    raise ValueError(
        f"layer {layer} ({type(module).__name__}) {what} but does not pass its window to attention, so it "
        "would be lost in a packed row; set the window to None if no sample is longer than it"
    )


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(f"{type(module).__name__} has no layer_idx, so its layer cannot be identified")
    return int(index)


AttentionInterface.register(NAME, braided_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
