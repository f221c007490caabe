"""Pictures: their size from the header, and their pixels as RGB."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is opened. Others that Pillow knows start interpreters (EPS) or read other files (FITS, WMF)."""

ORIENTATION = 0x0112
"""The EXIF tag."""


UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Orientation to the transposition that undoes it; 5 and above swap width and height."""


def image_size(file: BinaryIO, max_pixels: int) -> tuple[int, int]:
    """Width and height as `image` will have them, without decoding a pixel."""
    with _opened(file, max_pixels) as (picture, orientation):
        width, height = picture.size
        return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def image(file: BinaryIO, max_pixels: int) -> Any:
    """The picture as Pillow's RGB, upright, on white where it is transparent; the first frame of many."""
    from PIL.Image import Transpose

    with _opened(file, max_pixels) as (picture, orientation):
        picture.load()
        upright = _rgb(picture)
        return upright.transpose(Transpose[UPRIGHT[orientation]]) if orientation in UPRIGHT else upright


@contextmanager
def _opened(file: BinaryIO, max_pixels: int) -> Iterator[tuple[Any, int]]:
    """The picture, of which the header is read, and its orientation."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError("images need Pillow; pip install pillow") from None

    with warnings.catch_warnings():
        # Ours is the limit that counts.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            picture = Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            raise ValueError(f"is not an image in a supported format ({', '.join(FORMATS)})") from None
    with picture:
        width, height = picture.size
        if min(width, height) < 1 or width * height > max_pixels:
            raise ValueError(f"has {width} × {height} pixels; from 1 to {max_pixels} are read")
        # The base class reads the header only; a PNG would decode itself in search of a tag after its pixels.
        # A TIFF turns itself when loaded, and says so in its size.
        orientation = 1 if picture.format == "TIFF" else Image.Image.getexif(picture).get(ORIENTATION, 1)
        yield picture, orientation


def _rgb(picture: Any) -> Any:
    from PIL import Image

    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM")):
        # Pillow would cut 16 bits off at 255.
        picture = Image.fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise ValueError("has pixels of 32 bits, whose value range is unknown; save it with 8 or 16 bits")
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")
