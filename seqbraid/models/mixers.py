"""What a mixer tells of itself: its heads and its window.

Heads are counted in its weights, which may be sharded: outside of a call they are the whole model's, in a
call those at hand.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import masking_utils
from transformers.pytorch_utils import Conv1D

from ..sequence_parallel.ulysses import SoftmaxHeads
from .decoder import layer_configs

HEAD_SIZES = ("qk_head_dim", "head_dim", "head_size")
"""What attention modules call the size of a query's head."""

OUT = ("o_proj", "out_proj", "dense", "c_proj")
"""What the families call the projection behind softmax attention: a row of inputs for each channel of a query
head's value."""

KEYS = ("k_proj", "Wk")
FUSED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
KEYS_AND_VALUES = ("kv_proj",)
"""What they call those in front of it: of keys, of queries, keys and values, of keys and values."""


WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size")
"""What configs call the tokens that a windowed layer sees."""


class SoftmaxSizes(NamedTuple):
    """The heads of softmax attention."""

    num_queries: int
    num_keys: int
    """Key and value heads."""
    key_size: int
    """Of a query and a key."""
    value_size: int


class GatedDeltaSizes(NamedTuple):
    """The heads of a gated-delta layer."""

    num_keys: int
    num_values: int
    key_size: int
    value_size: int


def softmax_sizes(mixer: Any, config: Any) -> SoftmaxSizes:
    """The heads of softmax attention; where its projections are not ones that we know, as the
    config has them.
    """
    configs = layer_configs(config)
    config = configs[mixer.layer_idx] if len(configs) > 1 else config
    key = next(int(getattr(mixer, name)) for name in HEAD_SIZES if hasattr(mixer, name))
    value = int(getattr(mixer, "v_head_dim", None) or key)
    out = _projection(mixer, OUT)
    if out is not None:
        queries = _widths(out)[0] // value
    else:
        queries = int(getattr(mixer, "num_heads", None) or config.num_attention_heads)
    if (keys := _projection(mixer, KEYS)) is not None:
        found = _widths(keys)[1] // key
    elif (fused := _projection(mixer, FUSED)) is not None:
        found = (_widths(fused)[1] - queries * key) // (key + value)
    elif (both := _projection(mixer, KEYS_AND_VALUES)) is not None:
        found = _widths(both)[1] // (key + value)
    elif (latent := _projection(mixer, ("kv_b_proj",))) is not None:
        found = _widths(latent)[1] // (int(mixer.qk_nope_head_dim) + value)
    else:
        found = int(getattr(config, "num_key_value_heads", None) or queries)
    return SoftmaxSizes(queries, found, key, value)


def local_heads(heads: SoftmaxSizes, size: int, rank: int) -> SoftmaxSizes:
    """The heads that a rank computes with: key heads go to every rank whose query heads use them.

    >>> local_heads(SoftmaxSizes(32, 8, 128, 128), 4, 1)
    SoftmaxSizes(num_queries=8, num_keys=2, key_size=128, value_size=128)
    >>> local_heads(SoftmaxSizes(12, 3, 64, 64), 2, 0)  # 4 of its heads use one, 2 another
    SoftmaxSizes(num_queries=6, num_keys=6, key_size=64, value_size=64)
    """
    plan = SoftmaxHeads(heads.num_queries, heads.num_keys, size)
    used, keys = plan.kv_of_query(rank), plan.kv_heads(rank)
    return heads._replace(
        num_queries=heads.num_queries // size,
        num_keys=keys.stop - keys.start if used is None else len(used),
    )


def gated_delta_sizes(mixer: Any) -> GatedDeltaSizes:
    """The heads of a gated-delta layer: a value head has a decay, the convolution a channel for each number
    of a token's queries, keys and values.
    """
    key, value = int(mixer.head_k_dim), int(mixer.head_v_dim)
    values = int(mixer.A_log.shape[0])
    channels = int(mixer.conv1d.weight.shape[0])
    return GatedDeltaSizes((channels - values * value) // (2 * key), values, key, value)


def layer_window(config: Any, index: int, mixer: Any) -> int | None:
    """How many keys a query of a layer sees, itself included; None where it sees all before it."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        return None
    if hasattr(mixer, "sliding_window"):
        found = mixer.sliding_window
    elif (kinds is None and masks_fully(mixer)) or not getattr(config, "use_sliding_window", True):
        found = None
    else:
        found = next((window for window in config_windows(config).values()), None)
    return None if found is None else int(found)


def config_windows(config: Any) -> dict[str, int]:
    """The windows that a config has, by what it calls them."""
    found = {key: getattr(config, key, None) for key in WINDOWS}
    return {key: window for key, window in found.items() if window}


def masks_fully(module: nn.Module) -> bool:
    """Whether a family's file has no other masks than causal ones, so that a window in its config, which
    checkpoints of some families have for other software, is never used.
    """
    family = sys.modules[type(module).__module__]
    makers = {n for n, f in vars(family).items() if getattr(f, "__module__", None) == masking_utils.__name__}
    return makers == {"create_causal_mask"}


def _projection(mixer: Any, names: tuple[str, ...]) -> Any:
    found = (getattr(mixer, name, None) for name in names)
    module = next((m for m in found if isinstance(m, nn.Module)), None)
    inner = getattr(module, "linear", None)  # some families have a module around it
    module = inner if isinstance(inner, nn.Linear) else module
    weight = getattr(module, "weight", None)
    return module if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _widths(module: Any) -> tuple[int, int]:
    """What goes in and what comes out."""
    rows, columns = (int(size) for size in module.weight.shape)
    stock = getattr(module, "base_layer", module)  # adapters of peft answer for the weight below
    return (rows, columns) if isinstance(stock, Conv1D) else (columns, rows)
