"""What is particular to each family of media models: its kinds of media, its keys, its positions.

Everything else is shared.
"""

from __future__ import annotations

from typing import Any

from ..media_tokens import media_config
from .family import MediaFamily
from .qwen3_5 import QWEN3_5
from .qwen3_omni import QWEN3_OMNI
from .qwen3_vl import QWEN3_VL

FAMILIES: tuple[MediaFamily, ...] = (QWEN3_VL, QWEN3_5, QWEN3_OMNI)


def family_of(config: Any) -> MediaFamily | None:
    """The family of a model's config, or of the thinker's in the whole Omni's; None for text models."""
    model_type = media_config(config).model_type
    return next((family for family in FAMILIES if model_type in family.model_types), None)


__all__ = ["FAMILIES", "MediaFamily", "family_of"]
