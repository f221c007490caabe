"""What a model's mixers will ask of a row's plans, read from its config, so that plans are made ahead."""

from __future__ import annotations

from typing import Any

import torch

from ..sequence_parallel.gated_delta_bytes import HeadSizes
from ..sequence_parallel.plans import MixerNeeds, RowPlans, SoftmaxNeeds
from .decoder import layer_configs
from .mixers import SoftmaxSizes, local_heads

SOFTMAX = ("full_attention", "sliding_attention")
"""What configs call the layers of softmax attention."""

GATED_DELTA = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip


def prepare_plans(plans: RowPlans, config: Any) -> None:
    """Make the plans that a model of this config will ask for; `ValueError` where its row cannot be split.

    A config that says less than all leaves the rest to the layers that ask.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    try:
        plans.prepare(_of_rank(mixer_needs(text, kinds), plans.tp, plans.tp_rank))
    except ValueError:
        if kinds is not None:  # each layer's own kind is known, and so is that the step would refuse it
            raise


def _of_rank(needs: MixerNeeds, tp: int, rank: int) -> MixerNeeds:
    """What this one of the tensor parallel ranks asks, with its own heads."""
    softmax = []
    for heads, keys, window in needs.softmax:
        if heads % tp:
            raise ValueError(f"tp={tp} does not divide {heads} query heads")
        local = local_heads(SoftmaxSizes(heads, keys, 0, 0), tp, rank)
        softmax.append(SoftmaxNeeds(local.num_queries, local.num_keys, window))
    delta = needs.gated_delta
    if delta is not None:
        keys, values = delta.num_key_heads // tp, delta.num_value_heads // tp
        delta = delta._replace(num_key_heads=keys, num_value_heads=values)
    return needs._replace(softmax=tuple(softmax), gated_delta=delta)


def mixer_needs(text: Any, kinds: list[str] | None) -> MixerNeeds:
    """The needs of a text decoder, whose layers are of these kinds; full attention where none are named."""
    configs = layer_configs(text)
    if not all(isinstance(getattr(config, "num_attention_heads", None), int) for config in configs):
        return MixerNeeds()
    if len(configs) == 1:
        configs *= len(kinds or [None])
    layers = zip(kinds or ["full_attention"] * len(configs), configs, strict=True)
    softmax = [_softmax_needs(config, kind) for kind, config in layers if kind in SOFTMAX]
    is_hybrid = "linear_attention" in (kinds or ()) and all(hasattr(text, name) for name in GATED_DELTA)
    dtype = getattr(text, "dtype", None)
    return MixerNeeds(
        softmax=tuple(dict.fromkeys(softmax)),
        gated_delta=HeadSizes(*(getattr(text, name) for name in GATED_DELTA)) if is_hybrid else None,
        conv_width=getattr(text, "linear_conv_kernel_dim", 0) if is_hybrid else 0,
        itemsize=dtype.itemsize if isinstance(dtype, torch.dtype) else 4,
    )


def _softmax_needs(config: Any, kind: str) -> SoftmaxNeeds:
    heads = config.num_attention_heads
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    return SoftmaxNeeds(heads, getattr(config, "num_key_value_heads", None) or heads, window)
