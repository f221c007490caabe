"""Media files, and tiny models with their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from seqbraid.data.tiny import tiny_training_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES
from tests.helpers.conversations import CLIPS, FPS, FRAME, FRAMES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    soundfile, av = pytest.importorskip("soundfile"), pytest.importorskip("av")
    root = tmp_path_factory.mktemp("media")
    chance = np.random.default_rng(0)
    for name, size in {"wide.png": (50, 17), "tall.jpg": (20, 64), "dot.png": (3, 3)}.items():
        Image.fromarray(chance.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(root / name)
    for name, (length, rate) in CLIPS.items():
        soundfile.write(root / name, chance.normal(0, 0.1, length).astype(np.float32), rate)
    with av.open(str(root / "ball.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *FRAME, "yuv420p"
        for number in range(FRAMES):
            picture = np.full((*FRAME, 3), 10 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        file.mux(stream.encode())
    return root


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Any, Any]]:
    names = (*MEDIA_FAMILIES, "llama", "qwen3_5_text")
    return {name: tiny_training_model(name) for name in names}
