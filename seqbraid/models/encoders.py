"""The media encoders of a stock model, fed with whole items.

Letters: R feature rows, D hidden size of the decoder, L levels of DeepStack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .media import MediaInput
from .parts import ModelParts


class Encoders:
    """The vision tower and, where there is one, the audio tower of a media model."""

    def __init__(self, parts: ModelParts) -> None:
        vision, audio = parts.tower("vision"), parts.tower("audio")
        assert vision is not None, "a media model has a vision tower"
        self.visual: Any = vision.module
        self.audio: Any = None if audio is None else audio.module
        self.width = int(parts.config.hidden_size)
        levels = getattr(self.visual.config, "deepstack_visual_indexes", None)
        self.num_levels = len(levels or ())

    def features(self, own: Sequence[MediaInput]) -> Tensor:
        """`[R, D·(1 + L)]`: embeddings and DeepStack levels of the items, one item behind the other.

        Every rank's call passes through every tower that learns, on a stand-in where it has no item for it,
        so that all ranks have a gradient for every parameter.
        """
        seen = [i for i, media in enumerate(own) if media.grid is not None]
        heard = [i for i, media in enumerate(own) if media.grid is None]
        parts: dict[int, Tensor] = {}
        nothing = self._nothing()
        with torch.set_grad_enabled(torch.is_grad_enabled() and _learns(self.visual)):
            if seen:
                parts |= zip(seen, self._see([own[i] for i in seen]), strict=True)
            elif torch.is_grad_enabled():
                nothing = nothing + 0.0 * self._see([self._blank()])[0].sum()
        if self.audio is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and _learns(self.audio)):
                if heard:
                    parts |= zip(heard, self._hear([own[i] for i in heard]), strict=True)
                elif torch.is_grad_enabled():
                    nothing = nothing + 0.0 * self._listen([self._silence()]).sum()
        return torch.cat([nothing, *(parts[i] for i in range(len(own)))])

    def _nothing(self) -> Tensor:
        weight = next(self.visual.parameters())
        return weight.new_zeros(0, self.width * (1 + self.num_levels))

    def _see(self, items: Sequence[MediaInput]) -> tuple[Tensor, ...]:
        """Images and videos: attention stays inside a frame, so an item is not changed by its neighbours."""
        pixels = torch.cat([media.payload for media in items]).to(self.visual.dtype)
        grids = torch.tensor([media.grid for media in items], device=pixels.device)
        outputs = self.visual(pixels, grid_thw=grids, return_dict=True)
        levels = getattr(outputs, "deepstack_features", None) or []
        features = torch.cat([outputs.pooler_output, *levels], dim=1)
        merged = self.visual.spatial_merge_size**2
        return features.split([len(media.payload) // merged for media in items])

    def _hear(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Clips, each as if it were alone.

        The tower cuts clips into chunks of `2·n_window` frames and pads them to the longest chunk of the
        call; what a convolution's bias makes of padding is seen by the frames beside it. A clip of at least
        one chunk is padded to a full chunk in any company; shorter ones go with clips of their own length
        only.
        """
        chunk = 2 * self.audio.n_window
        groups: dict[int, list[int]] = {}
        for i, media in enumerate(items):
            groups.setdefault(min(media.payload.shape[1], chunk), []).append(i)
        parts: dict[int, Tensor] = {}
        for members in groups.values():
            features = self._listen([items[i].payload for i in members])
            wide = torch.nn.functional.pad(features, (0, self.width * self.num_levels))
            counts = [sum(b - a for a, b in items[i].item.tokens) for i in members]
            parts |= zip(members, wide.split(counts), strict=True)
        return [parts[i] for i in range(len(items))]

    def _listen(self, clips: Sequence[Tensor]) -> Tensor:
        lengths = torch.tensor([clip.shape[1] for clip in clips], device=clips[0].device)
        mel = torch.cat(list(clips), dim=1).to(next(self.audio.parameters()).dtype)
        outputs = self.audio(mel, feature_lens=lengths, return_dict=True)
        features: Tensor = outputs.last_hidden_state
        return features

    def _blank(self) -> MediaInput:
        """The smallest picture there is."""
        config, weight = self.visual.config, next(self.visual.parameters())
        size = config.spatial_merge_size
        channels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return MediaInput(None, weight.new_zeros(size * size, channels), (1, size, size))  # type: ignore[arg-type]

    def _silence(self) -> Tensor:
        """The shortest clip that makes a feature."""
        return next(self.audio.parameters()).new_zeros(self.audio.num_mel_bins, 8)


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
