"""Reading screenshots without an imaging library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CHANNELS = {2: 3, 6: 4}
"""Colour type to bytes per pixel: RGB and RGBA."""


def read_png(path: Path) -> NDArray[np.uint8]:
    """`[height, width, 3]` of a PNG with 8 bits per channel, as browsers write them."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n", f"{path} is no PNG"
    width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    assert depth == 8 and color in CHANNELS and not interlaced, (depth, color, interlaced)
    packed, place = b"", 8
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        if kind == b"IDAT":
            packed += data[place + 8 : place + 8 + size]
        place += size + 12
    channels = CHANNELS[color]
    lines = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(height, 1 + width * channels)
    pixels = np.zeros(
        (height + 1, width + 1, channels), dtype=np.int64
    )  # a line and a column of zeros before
    for y, line in enumerate(lines):
        _undo_filter(
            int(line[0]), line[1:].reshape(width, channels).astype(np.int64), pixels[y], pixels[y + 1]
        )
    return pixels[1:, 1:, :3].astype(np.uint8)


def _undo_filter(
    kind: int, line: NDArray[np.int64], above: NDArray[np.int64], out: NDArray[np.int64]
) -> None:
    """Write a line into `out[1:]`; PNG stores differences from the pixels at the left and above."""
    if kind == 0:
        out[1:] = line
    elif kind == 1:
        out[1:] = line.cumsum(axis=0) % 256
    elif kind == 2:
        out[1:] = (line + above[1:]) % 256
    else:
        guess = _average if kind == 3 else _paeth
        for x, values in enumerate(line.tolist()):
            left, up, corner = out[x].tolist(), above[x + 1].tolist(), above[x].tolist()
            parts = zip(values, left, up, corner, strict=True)
            out[x + 1] = [(value + guess(a, b, c)) % 256 for value, a, b, c in parts]


def _average(left: int, up: int, corner: int) -> int:
    return (left + up) // 2


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))
