"""Gated delta layers of the stock models (qwen3_next, qwen3_5, qwen3_5_moe) on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..sequence_parallel.context import StepContext
from ..sequence_parallel.gated_delta import gated_delta_mixing
from ..sequence_parallel.gated_delta_layer import GatedDeltaLayer
from .mixers import gated_delta_sizes

COMMON = (
    "conv1d", "A_log", "dt_bias", "norm", "out_proj", "activation", "layer_idx", "head_k_dim", "head_v_dim",
)  # fmt: skip
"""What every gated-delta module we know has, whatever its family calls its projections."""


class Projected(NamedTuple):
    """The hidden states after the input projections: `[T, channels]` each."""

    mixed_qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


def is_gated_delta(module: nn.Module) -> bool:
    """Whether a module is a gated-delta layer whose parts we know by name."""
    return all(hasattr(module, name) for name in COMMON) and _projection(module) is not None


def braid_gated_delta(module: nn.Module) -> None:
    """Let calls that carry a step context take the packed path; calls without one go to the stock forward."""
    module.forward = partial(_forward, module, module.forward)


def unbraid_gated_delta(module: nn.Module) -> None:
    """Undo `braid_gated_delta`."""
    del module.forward


def _forward(
    module: Any,
    stock: Callable[..., Tensor],
    hidden_states: Tensor,
    *args: Any,
    braid: StepContext | None = None,
    **kwargs: Any,
) -> Tensor:
    if braid is None:
        return stock(hidden_states, *args, **kwargs)
    if hidden_states.shape[:2] != (1, braid.num_local_tokens):
        raise ValueError(
            f"{type(module).__name__} got hidden states of shape {tuple(hidden_states.shape)}; the step's "
            f"layout has one row of {braid.num_local_tokens} tokens on this rank"
        )
    project = _projection(module)
    assert project is not None
    mixed_qkv, z, b, a = project(module, hidden_states.squeeze(0))
    sizes = gated_delta_sizes(module)  # of the weights at hand
    layer = GatedDeltaLayer(
        conv_weight_CW=module.conv1d.weight.squeeze(1),
        conv_bias_C=module.conv1d.bias,
        activation=module.activation,
        A_log_H=module.A_log,
        dt_bias_H=module.dt_bias,
        num_key_heads=sizes.num_keys,
        num_value_heads=sizes.num_values,
        key_dim=sizes.key_size,
        value_dim=sizes.value_size,
    )
    out_THV = braid.mix(gated_delta_mixing, mixed_qkv, b, a, layer, braid)
    normed = module.norm(out_THV.flatten(0, 1), z.reshape(-1, sizes.value_size))
    braid.record(int(module.layer_idx))
    out: Tensor = module.out_proj(normed.view(1, braid.num_local_tokens, -1))
    return out


def _projection(module: nn.Module) -> Callable[[Any, Tensor], Projected] | None:
    if all(hasattr(module, name) for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")):
        return _project_apart
    if all(hasattr(module, name) for name in ("in_proj_qkvz", "in_proj_ba")):
        return _project_fused
    return None


def _project_apart(module: Any, hidden_TD: Tensor) -> Projected:
    """qwen3_5: four projections."""
    return Projected(
        module.in_proj_qkv(hidden_TD),
        module.in_proj_z(hidden_TD),
        module.in_proj_b(hidden_TD),
        module.in_proj_a(hidden_TD),
    )


def _project_fused(module: Any, hidden_TD: Tensor) -> Projected:
    """qwen3_next: q, k, v, z interleaved per key head, and so are b, a."""
    sizes = gated_delta_sizes(module)
    heads, group = sizes.num_keys, sizes.num_values // sizes.num_keys
    values = group * sizes.value_size
    q, k, v, z = (
        module.in_proj_qkvz(hidden_TD)
        .unflatten(-1, (heads, -1))
        .split([sizes.key_size, sizes.key_size, values, values], dim=-1)
    )
    b, a = module.in_proj_ba(hidden_TD).unflatten(-1, (heads, -1)).split([group, group], dim=-1)
    return Projected(
        torch.cat([x.flatten(1) for x in (q, k, v)], -1), z.flatten(1), b.flatten(1), a.flatten(1)
    )
