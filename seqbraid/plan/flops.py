"""FLOPs that a training step needs, and the peak of well-known GPUs: their ratio is the MFU.

What is counted is the model's arithmetic and nothing else: products with matrices (two FLOPs per weight and
token), scores and their use in attention over the pairs that the mask lets through, the recurrence of
gated-delta layers, and for each of them the gradients of inputs and of weights that learn. Padding, the
recomputation of checkpoints, chunked forms that do more than the recurrence, norms and activations are not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.packing import CostModel
from ..models.media_tokens import audio_tokens
from ..models.mixers import gated_delta_sizes
from ..models.parts import ModelParts, TowerParts
from .anatomy import active_share, check_mixer, learns, matrices, parts_of

Grid = tuple[int, int, int]

PEAKS: dict[str, float] = {
    r"NVIDIA A(100|800)(-SXM4|-SXM|-PCIE|-PCIe)?-(40|80)GB|A100-.*-(40|80)GB": 312e12,
    r"NVIDIA A800 80GB PCIe|NVIDIA A100 80GB PCIe": 312e12,
    r"NVIDIA H[18]00 80GB HBM[23]e?": 989e12,
    r"NVIDIA H100 PCIe": 756e12,
    r"NVIDIA H(100|200) NVL": 835e12,
    r"NVIDIA H200": 989e12,
    r"NVIDIA GH200 (480|144G HBM3e|96G HBM3)(GB)?": 989e12,
    r"NVIDIA H20": 148e12,
    r"NVIDIA B200": 2250e12,
    r"NVIDIA GB200": 2500e12,
    r"NVIDIA L40S": 362e12,
    r"NVIDIA L40": 181e12,
    r"NVIDIA L4": 121e12,
    r"NVIDIA A40": 149.7e12,
    r"NVIDIA A10": 125e12,
    r"NVIDIA RTX A6000": 154.8e12,
    r"NVIDIA GeForce RTX 3090": 71e12,
    r"NVIDIA GeForce RTX 4090": 165.2e12,
    r"NVIDIA GeForce RTX 5090": 209.5e12,
    r"AMD Instinct MI300X( OAM)?": 1307e12,
}
"""The whole of `torch.cuda.get_device_name` to dense FLOP/s of 16-bit products summed in float32, as the
vendors' data sheets have it without sparsity. Slices of a GPU and laptop variants have other names."""


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Peak dense FLOP/s of a device; None where it is not known."""
    device = torch.device(device)
    return peak_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """Peak dense FLOP/s of a GPU by its name; None where it is not known, as in other than 16-bit dtypes.

    >>> peak_of("NVIDIA H100 PCIe", torch.bfloat16), peak_of("NVIDIA H100 PCIe", torch.float32)
    (756000000000000.0, None)
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)


@dataclass(frozen=True)
class MediaSizes:
    """What a step's towers see and hear."""

    grids: Sequence[Grid] = ()
    """Time, height and width in patches of each image and video."""
    mel_frames: Sequence[int] = ()
    """Frames of each clip."""


NO_MEDIA = MediaSizes()


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward, by what they grow with; counted once per model.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(vocab_size=10, hidden_size=4, intermediate_size=8, num_hidden_layers=1,
    ...                      num_attention_heads=1)
    >>> weights, pairs = 4 * 4 * 4 + 3 * 4 * 8, 1 + 2 + 3
    >>> ModelFlops.of(config).step([[3]]) == 3 * (2 * weights * 3 + 2 * 2 * 4 * pairs + 2 * 4 * 10 * 3)
    True
    """

    token: float
    """Matrices and recurrences of the decoder, for each token."""
    label: float
    """The head, for each token that has a label."""
    pair: Mapping[int | None, float]
    """Softmax attention, for each query and key that it sees, by window (None: all keys before)."""
    vision: VisionFlops | None = None
    audio: AudioFlops | None = None

    @staticmethod
    def of(model_or_config: Any) -> ModelFlops:
        """Count a model's; it may be wrapped, sharded, or on the meta device. Frozen parts cost less."""
        parts = parts_of(model_or_config)
        # The gradient goes down to the lowest part that learns, and no further.
        reached = any(learns(m) for m in (parts.embedding, *(tower.module for tower in parts.towers)))
        token, pair = 0.0, defaultdict[int | None, float](float)
        depths = () if parts.mtp is None else parts.mtp.of_depths
        for number, layer in enumerate((*parts.layers, *depths)):
            check_mixer(parts, layer)
            if parts.mtp is not None and number >= len(parts.layers):
                token += _product(parts.mtp.module.fc.weight, reached)
                reached = reached or learns(parts.mtp.module)
            reached = reached or learns(layer.module)
            for name, parameter in matrices(parts, layer.module):
                token += _product(parameter, reached) * active_share(parts, parameter, name)
            passes = 3 if reached else 1
            if layer.kind == "gated_delta":
                # Per head and token: k·S and q·S read the state, k ⊗ v writes it.
                sizes = gated_delta_sizes(layer.mixer)
                token += passes * 6 * sizes.num_values * sizes.key_size * sizes.value_size
            else:
                heads = parts.heads(layer)
                pair[layer.window] += passes * 2 * heads.num_queries * (heads.key_size + heads.value_size)
        # At the end of a sample each depth has a label less than the one before; that is left out.
        label = (1 + len(depths)) * sum(_product(p, reached) for _, p in matrices(parts, parts.head))
        vision, audio = parts.tower("vision"), parts.tower("audio")
        return ModelFlops(
            token,
            label,
            dict(pair),
            None if vision is None else VisionFlops.of(parts, vision),
            None if audio is None else AudioFlops.of(parts, audio),
        )

    @staticmethod
    def if_known(model_or_config: Any) -> ModelFlops | None:
        """None for a model that we cannot count: it has no utilisation, and trains all the same."""
        try:
            return ModelFlops.of(model_or_config)
        except ValueError:
            return None

    def cost_model(self) -> CostModel:
        """The same for rows that are compared: a window is taken to be as long as the sample or shorter."""
        linear = self.token + self.label + sum(flops * w for w, flops in self.pair.items() if w is not None)
        return CostModel(linear, self.pair.get(None, 0.0) / 2)

    def step(
        self, rows: Sequence[Sequence[int]], label_tokens: int | None = None, media: MediaSizes = NO_MEDIA
    ) -> float:
        """FLOPs of a step over rows of sequences, given by their lengths; every token has a label unless
        `label_tokens` says how many have."""
        lengths = [length for row in rows for length in row]
        tokens = sum(lengths)
        total = self.token * tokens + self.label * (tokens if label_tokens is None else label_tokens)
        total += sum(
            flops * sum(seen_keys(n, window) for n in lengths) for window, flops in self.pair.items()
        )
        if media.grids:
            total += _part(self.vision, "images or videos").step(media.grids)
        if media.mel_frames:
            total += _part(self.audio, "sound").step(media.mel_frames)
        return total


def seen_keys(length: int, window: int | None = None) -> int:
    """Query-key pairs of a causal sequence, of which a query sees at most the last `window` keys.

    >>> [seen_keys(4), seen_keys(4, 2), seen_keys(4, 9)]
    [10, 7, 10]
    """
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


@dataclass(frozen=True)
class VisionFlops:
    """A vision tower: patches attend within their frame, and merge before they leave."""

    patch: float
    merged: float
    """For each group of patches that becomes one token."""
    pair: float
    merge: int
    """Patches that become one token."""

    @staticmethod
    def of(parts: ModelParts, found: TowerParts) -> VisionFlops:
        """Count a tower's; where only its mergers learn, no gradient goes below them."""
        tower = found.module
        in_mergers = {id(p) for merger in found.mergers for p in merger.parameters()}
        below = any(p.requires_grad for p in tower.parameters() if id(p) not in in_mergers)
        patch = merged = 0.0
        for name, parameter in matrices(parts, tower):
            if id(parameter) in in_mergers:
                merged += _product(parameter, learns(tower))
            else:
                # Pixels need no gradient.
                patch += _product(parameter, below and not name.startswith("patch_embed."))
        pair = (3 if below else 1) * 4.0 * tower.config.hidden_size * tower.config.depth
        return VisionFlops(patch, merged, pair, int(tower.config.spatial_merge_size) ** 2)

    def step(self, grids: Sequence[Grid]) -> float:
        """FLOPs of images and videos."""
        patches = sum(time * height * width for time, height, width in grids)
        pairs = sum(time * (height * width) ** 2 for time, height, width in grids)
        return self.patch * patches + self.merged * (patches // self.merge) + self.pair * pairs


@dataclass(frozen=True)
class AudioFlops:
    """An audio tower: convolutions that each halve time and mel bins, then attention within windows."""

    token: float
    pixel: tuple[float, ...]
    """Each convolution, for each place of its output."""
    pair: float
    config: Any
    """The whole model's."""

    @staticmethod
    def of(parts: ModelParts, found: TowerParts) -> AudioFlops:
        """Count a tower's; one that does not learn is run without a graph."""
        tower = found.module
        train = learns(tower)
        token = 0.0
        pixel: list[float] = []
        for name, parameter in matrices(parts, tower):
            if isinstance(tower.get_submodule(name.rpartition(".")[0]), nn.Conv2d):
                pixel.append(_product(parameter, train and bool(pixel)))  # sound needs no gradient
            else:
                token += _product(parameter, train)
        pair = (3 if train else 1) * 4.0 * tower.config.d_model * tower.config.encoder_layers
        return AudioFlops(token, tuple(pixel), pair, parts.model.config)

    def step(self, mel_frames: Sequence[int]) -> float:
        """FLOPs of clips."""
        audio = getattr(self.config, "thinker_config", self.config).audio_config
        chunk = 2 * audio.n_window
        window = audio_tokens(chunk, self.config) * (audio.n_window_infer // chunk)
        total = 0.0
        for frames in mel_frames:
            tokens = audio_tokens(frames, self.config)
            whole, rest = divmod(tokens, window)
            total += self.token * tokens + self.pair * (whole * window**2 + rest**2)
            pieces, bins = [chunk] * (frames // chunk) + [frames % chunk], audio.num_mel_bins
            for flops in self.pixel:
                pieces, bins = [-(-piece // 2) for piece in pieces], -(-bins // 2)
                total += flops * bins * sum(pieces)
        return total


def _product(weight: Tensor, flows: bool) -> float:
    """FLOPs of a matrix and one vector: the product, the gradient of the vector where it `flows` on, and of
    the matrix where it learns."""
    return 2.0 * weight.numel() * (1 + flows + weight.requires_grad)


def _part(part: Any, what: str) -> Any:
    if part is None:
        raise ValueError(f"the step has {what}, but the model has no tower for them")
    return part
