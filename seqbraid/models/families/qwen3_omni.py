"""Qwen3-Omni's thinker: images, videos and audio, also audio in video; DeepStack for what is seen."""

from ..positions_omni import SECONDS_KEYS, omni_sample_positions
from .family import VISION_KEYS, MediaFamily

QWEN3_OMNI = MediaFamily(
    ("qwen3_omni_moe_thinker",),
    ("image", "video", "audio"),
    (
        *VISION_KEYS,
        *SECONDS_KEYS,
        "input_features",
        "feature_attention_mask",
        "audio_feature_lengths",
        "use_audio_in_video",
    ),
    omni_sample_positions,
)
