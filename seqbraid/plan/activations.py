"""How many bytes of activations a decoder keeps for its backward: a model, from the shapes of its modules.

Letters: D hidden size, I width of an MLP, H and G query and key/value heads, K and V head sizes. Counted per
token, with `e` bytes per number of the compute dtype; what stock code keeps in float32 takes 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.activations import NewGELUActivation

from ..models.mixers import gated_delta_sizes
from ..models.parts import LayerParts, ModelParts
from .anatomy import check_mixer

FLOAT32 = 4

DOWN = ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "w2")
"""What the families call the last matrix of a dense MLP."""


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token that one layer keeps, in parts that memory options treat differently."""

    norms: int
    """Of width D, what they hand to the projections included."""
    mixer: int
    """What the mixer's own backward needs: queries, keys and values, or convolved channels; what it gives."""
    around: int
    """Norms and gates between the mixer and its projections."""
    mlp: int
    """Between the projections of dense MLPs, those of shared experts included."""
    experts: int
    """Of the chosen experts."""
    input: int
    """The hidden states that come in."""

    def whole(self, tiled: bool) -> int:
        """All that is kept without checkpoints; of MLPs in tiles only their input, a norm's output."""
        return self.norms + self.mixer + self.around + self.experts + (0 if tiled else self.mlp)

    def kept(self, checkpointing: str, tiled: bool) -> int:
        """What is kept from the forward to the backward of the layer."""
        if checkpointing == "none":
            return self.whole(tiled)
        return self.input + (self.mixer if checkpointing == "selective" else 0)


def layer_activations(parts: ModelParts, layer: LayerParts, e: int, fused: bool = False) -> LayerActivations:
    """The bytes per token of a layer; `fused` where norms, rotations and gates are one kernel each."""
    check_mixer(parts, layer)
    hidden = int(parts.config.hidden_size)
    # An RMS norm keeps its input in float32 and the normed one; a layer norm, or a kernel, only its input.
    norms, wide = 0, e if fused else FLOAT32 + e
    for module in layer.norms:
        weight = getattr(module, "weight", None)
        if weight is not None and tuple(weight.shape) == (hidden,):
            norms += hidden * (e if isinstance(module, nn.LayerNorm) else wide)
    # Two norms feed projections, which keep what they are given.
    norms += 2 * hidden * e
    is_delta = layer.kind == "gated_delta"
    inner, around = _gated_delta(layer.mixer, e, fused) if is_delta else _softmax(parts, layer, e, fused)
    return LayerActivations(norms, inner, around, *_mlps(parts, layer, e, fused), hidden * e)


def _softmax(parts: ModelParts, layer: LayerParts, e: int, fused: bool) -> tuple[int, int]:
    queries, keys, key_size, value_size = parts.heads(layer)
    mixer = layer.mixer
    q, k, v = queries * key_size, keys * key_size, keys * value_size
    out, around = queries * value_size, 0
    for name, width in (("q_norm", q), ("k_norm", k)):
        if isinstance(getattr(mixer, name, None), nn.Module):
            around += width * (e if fused else FLOAT32 + e)
    projection = getattr(mixer, "q_proj", None)
    if projection is not None and projection.weight.shape[0] == 2 * q:
        around += 2 * out * e  # an output gate: its sigmoid, and the gated output
    return (q + k + v + out) * e + queries * FLOAT32, around


def _gated_delta(mixer: Any, e: int, fused: bool) -> tuple[int, int]:
    sizes = gated_delta_sizes(mixer)
    values, heads = sizes.num_values * sizes.value_size, sizes.num_values
    channels = 2 * sizes.num_keys * sizes.key_size + values
    # The convolution keeps what comes in and its sum before the activation, the rule q, k and v; g and beta
    # and what they are made of; what comes out. Of the states few are kept.
    inner = 3 * channels * e + heads * (3 * FLOAT32 + 2 * e) + values * e
    # The gated norm: its input and its gate in float32, the gate's activation, the normed, the product, and
    # what goes into the projection. A kernel keeps its input and its gate.
    return inner, values * (3 * e if fused else 4 * FLOAT32 + 2 * e)


def _mlps(parts: ModelParts, layer: LayerParts, e: int, fused: bool) -> tuple[int, int]:
    """Of dense MLPs and of the chosen experts."""
    dense, experts, hidden = 0, 0, int(parts.config.hidden_size)
    for module in layer.experts:
        wide = next((p for p in module.parameters() if p.ndim == 3), None)
        if wide is None:
            raise ValueError(
                f"the experts of {type(parts.model).__name__} are not tensors of three dims, so what they "
                "keep cannot be counted"
            )
        width = _other(wide, hidden)  # of gate and up side by side
        # gpt-oss keeps both sides of its clamps.
        clamped = 3 * width // 2 if hasattr(module, "limit") else 0
        # Tokens gathered for an expert; gate and up, activation, product; what it gives.
        experts += int(parts.config.num_experts_per_tok) * (2 * hidden + 2 * width + clamped) * e
    for module in (*layer.dense, layer.module):  # some families keep the matrices in the layer itself
        names = (getattr(module, name, None) for name in DOWN)
        down: Any = next((m for m in names if isinstance(m, nn.Module)), None)
        if down is None:
            continue
        # Gate, up, activation (which a kernel does not keep) and product; or input and output of the
        # activation, which may be written out in elementwise steps.
        gated = any(hasattr(module, name) for name in ("gate_proj", "gate_up_proj", "w3"))
        steps = 3 if isinstance(getattr(module, "act", None), NewGELUActivation) else 0
        dense += _other(down.weight, hidden) * ((3 if fused else 4) if gated else 2 + steps) * e
    return dense, experts


def _other(weight: Any, hidden: int) -> int:
    """Of the widths of a matrix, or of an expert's, the one that is not D."""
    first, second = (int(size) for size in weight.shape[-2:])
    return second if first == hidden else first
