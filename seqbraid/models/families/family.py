"""The shape of a family's description."""

from __future__ import annotations

from typing import Any, NamedTuple

VISION_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class MediaFamily(NamedTuple):
    """Media models that are trained alike."""

    model_types: tuple[str, ...]
    """What their configs call themselves."""
    kinds: tuple[str, ...]
    """Kinds of media, of `image`, `video` and `audio`."""
    keys: tuple[str, ...]
    """Media keys of a sample."""

    def token_ids(self, config: Any) -> dict[str, int]:
        """The placeholder token of each kind."""
        return {kind: int(getattr(config, f"{kind}_token_id")) for kind in self.kinds}
