"""The shape of a family's description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..media_tokens import Ints

VISION_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class MediaFamily(NamedTuple):
    """Media models that are trained alike."""

    model_types: tuple[str, ...]
    """What their configs call themselves."""
    kinds: tuple[str, ...]
    """Kinds of media, of `image`, `video` and `audio`."""
    keys: tuple[str, ...]
    """Media keys of a sample."""
    positions: Callable[[Mapping[str, Any], Ints, Any], Tensor]
    """Of a sample, its token ids and the config: `[3, T]` time, height and width."""

    def token_ids(self, config: Any) -> dict[str, int]:
        """The placeholder token of each kind."""
        return {kind: int(getattr(config, f"{kind}_token_id")) for kind in self.kinds}
