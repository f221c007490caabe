"""Qwen3-Omni's thinker: images, videos and audio, also audio in video; DeepStack for what is seen."""

from .family import VISION_KEYS, MediaFamily

QWEN3_OMNI = MediaFamily(
    ("qwen3_omni_moe_thinker",),
    ("image", "video", "audio"),
    (
        *VISION_KEYS,
        "input_features",
        "feature_attention_mask",
        "use_audio_in_video",
        "video_second_per_grid",
        "second_per_grid_ts",
    ),
)
