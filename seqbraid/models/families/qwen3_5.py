"""Qwen3.5 with vision, dense and mixture of experts: gated-delta layers, images and videos, no DeepStack."""

from ..positions_vision import vision_sample_positions
from .family import VISION_KEYS, MediaFamily

QWEN3_5 = MediaFamily(("qwen3_5", "qwen3_5_moe"), ("image", "video"), VISION_KEYS, vision_sample_positions)
