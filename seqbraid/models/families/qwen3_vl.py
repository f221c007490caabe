"""Qwen3-VL, dense and mixture of experts: images and videos, DeepStack features beside the embeddings."""

from ..positions_vision import vision_sample_positions
from .family import VISION_KEYS, MediaFamily

QWEN3_VL = MediaFamily(("qwen3_vl", "qwen3_vl_moe"), ("image", "video"), VISION_KEYS, vision_sample_positions)
