"""The media towers of a stock model, fed with whole items.

Letters: R feature rows, D hidden size of the decoder, L levels of DeepStack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from .head import forward_replaced
from .media import MediaInput
from .parts import ModelParts


class Towers:
    """The vision tower and, where there is one, the audio tower of a media model."""

    def __init__(self, parts: ModelParts) -> None:
        vision, audio = parts.tower("vision"), parts.tower("audio")
        assert vision is not None, "a media model has a vision tower"
        self.visual: Any = vision.module
        self.audio: Any = None if audio is None else audio.module
        self.width = int(parts.config.hidden_size)
        levels = getattr(self.visual.config, "deepstack_visual_indexes", None)
        self.num_levels = len(levels or ())

    def features(self, own: Sequence[MediaInput], like: Tensor) -> Tensor:
        """`[R, D·(1 + L)]`: embeddings and DeepStack levels of the items, one item behind the other; `like`
        is of the type and device that the step computes in.

        Every rank's call passes once through every tower that learns or is sharded, on a stand-in where it
        has no item for it: so all ranks have a gradient for every parameter, and gather the same units.
        """
        width = self.width * (1 + self.num_levels)
        nothing, parts = like.new_zeros(0, width), dict[int, Tensor]()
        for tower, is_seen, encode, stand_in in (
            (self.visual, True, self._see, self._blank),
            (self.audio, False, self._hear, self._silence),
        ):
            if tower is None:
                continue
            mine = [i for i, media in enumerate(own) if (media.grid is not None) == is_seen]
            learns = torch.is_grad_enabled() and any(p.requires_grad for p in tower.parameters())
            with torch.set_grad_enabled(learns):
                if mine:
                    parts |= zip(mine, encode([own[i] for i in mine]), strict=True)
                elif learns or isinstance(tower, FSDPModule):
                    nothing = nothing + 0.0 * encode([stand_in(like)])[0].sum()
        return torch.cat([nothing, *(parts[i] for i in range(len(own)))])

    def _see(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Images and videos: attention stays inside a frame, so an item is not changed by its neighbours."""
        pixels = torch.cat([media.payload for media in items]).to(self.visual.dtype)
        grids = torch.tensor([media.grid for media in items], device=pixels.device)
        outputs = self.visual(pixels, grid_thw=grids, return_dict=True)
        levels = getattr(outputs, "deepstack_features", None) or []
        features = torch.cat([outputs.pooler_output, *levels], dim=1)
        merged = self.visual.spatial_merge_size**2
        return features.split([len(media.payload) // merged for media in items])

    def _hear(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Clips, each as if it were alone.

        The tower cuts clips into chunks of `2·n_window` frames and pads them to the longest chunk of the
        call; what a convolution's bias makes of padding is seen by the frames beside it. A clip of at least
        one chunk is padded to a full chunk in any company; shorter ones go with clips of their own length
        only. For whom shards the tower this is one call, however many lengths there are.
        """
        chunk = 2 * self.audio.n_window
        groups: dict[int, list[int]] = {}
        for i, media in enumerate(items):
            groups.setdefault(min(media.payload.shape[1], chunk), []).append(i)
        stock = self.audio.forward

        def by_length() -> list[Tensor]:
            return [self._listen([items[i].payload for i in members], stock) for members in groups.values()]

        with forward_replaced(self.audio, by_length):
            found = self.audio()
        parts: dict[int, Tensor] = {}
        for members, features in zip(groups.values(), found, strict=True):
            wide = torch.nn.functional.pad(features, (0, self.width * self.num_levels))
            counts = [len(wide)] if len(members) == 1 else [items[i].item.num_features for i in members]
            parts |= zip(members, wide.split(counts), strict=True)
        return [parts[i] for i in range(len(items))]

    def _listen(self, clips: Sequence[Tensor], tower: Callable[..., Any]) -> Tensor:
        lengths = torch.tensor([clip.shape[1] for clip in clips], device=clips[0].device)
        mel = torch.cat(list(clips), dim=1).to(next(self.audio.parameters()).dtype)
        outputs = tower(mel, feature_lens=lengths, return_dict=True)
        features: Tensor = outputs.last_hidden_state
        return features

    def _blank(self, like: Tensor) -> MediaInput:
        """The smallest picture there is."""
        config = self.visual.config
        size = config.spatial_merge_size
        channels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return MediaInput(None, like.new_zeros(size * size, channels), (1, size, size))  # type: ignore[arg-type]

    def _silence(self, like: Tensor) -> MediaInput:
        """The shortest clip that makes a feature."""
        return MediaInput(None, like.new_zeros(self.audio.num_mel_bins, 8), None)  # type: ignore[arg-type]
