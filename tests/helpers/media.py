"""Good media made on the spot, and a few that a library is needed to make wrong."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

SIZE = (64, 48)
NUM_FRAMES = 40


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file with its length and checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture(width: int = SIZE[0], height: int = SIZE[1], seed: int = 0) -> np.ndarray:
    """Noise [H, W, 3], which no format can make small."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def frame(number: int) -> np.ndarray:
    """A frame [H, W, 3] that tells its number by its brightness, and with a bright top left corner."""
    pixels = np.full((SIZE[1], SIZE[0], 3), 16 + 5 * number, np.uint8)
    pixels[:16, :16] = 255
    return pixels


def write_video(
    path: Path, num_frames: int = NUM_FRAMES, codec: str = "libx264", rate: int = 10, **options: Any
) -> None:
    """A video of `frame(0)`, `frame(1)`, …; options with `movflags` go to the container."""
    import av

    movflags = {"movflags": options.pop("movflags")} if "movflags" in options else {}
    with av.open(str(path), "w", options=movflags) as container:
        stream = container.add_stream(
            codec, rate=rate, options={key: str(value) for key, value in options.items()}
        )
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame(number), format="rgb24")))
        container.mux(stream.encode())


def write_sounding(
    path: Path, sound: np.ndarray, codec: str, rate: int = 16_000, num_frames: int = 10, **options: str
) -> None:
    """A sound [channels, n] beside a video of `frame(0)`, …, or alone where there are no frames."""
    import av

    layout = {1: "mono", 2: "stereo"}[len(sound)]
    with av.open(str(path), "w", options=options) as container:
        if num_frames:
            video = container.add_stream("libx264", rate=10)
            video.width, video.height, video.pix_fmt = *SIZE, "yuv420p"
        track = container.add_stream(codec, rate=rate)
        track.layout = layout
        for number in range(num_frames):
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame(number), format="rgb24")))
        if num_frames:
            container.mux(video.encode())
        context = track.codec_context
        whole = av.AudioFrame.from_ndarray(sound.astype(np.float32), format="fltp", layout=layout)
        whole.sample_rate, whole.pts = rate, 0
        cutter = av.AudioResampler(context.format, layout, rate, context.frame_size or 1024)
        for piece in [*cutter.resample(whole), *cutter.resample(None)]:
            container.mux(track.encode(piece))
        container.mux(track.encode())


def write_media(root: Path) -> None:
    """Write `good.*` and the files that are wrong inside."""
    import soundfile
    from PIL import Image

    write_good(root)
    Image.fromarray(np.zeros((4, 4), np.float32)).save(root / "float.tif")
    soundfile.write(root / "long.flac", np.zeros(5 * 3600 * 1000, np.int16), 1_000)
    write_video(root / "fast.mp4", movflags="faststart")
    write_video(root / "good.avi", codec="mpeg4", g=10)
    _wrong_avis(root)


def write_good(root: Path) -> None:
    """Write `good.*`: pictures, sounds and a video."""
    import soundfile
    from PIL import Image

    still = Image.fromarray(picture())
    for tail in ("png", "jpg", "webp", "gif", "bmp", "tif"):
        still.save(root / f"good.{tail}")
    sound = 0.5 * np.sin(np.arange(16_000) * 0.1)
    soundfile.write(root / "good.wav", sound, 16_000)
    soundfile.write(root / "good.flac", np.random.default_rng(0).uniform(-1, 1, 8_000), 16_000)
    write_video(root / "good.mp4", g=12, bf=2)


def _wrong_avis(root: Path) -> None:
    write_video(root / "huge.avi", 1, codec="rawvideo")  # only the container knows the size of raw frames
    huge = bytearray((root / "huge.avi").read_bytes())
    bitmap_header = huge.index(b"strf") + 8
    huge[bitmap_header + 4 : bitmap_header + 12] = struct.pack("<ii", 12_000, 12_000)
    (root / "huge.avi").write_bytes(huge)
    good = (root / "good.avi").read_bytes()
    stream_header = good.index(b"strh") + 8
    lies = bytearray(good)
    lies[stream_header + 32 : stream_header + 36] = struct.pack("<I", 10 * NUM_FRAMES)
    (root / "lies.avi").write_bytes(lies)
    start = good.index(b"movi") + 2000
    (root / "tail.avi").write_bytes(good[:start] + bytes(len(good) - start))
