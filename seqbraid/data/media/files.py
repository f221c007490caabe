"""`MediaFiles`: the pictures, sounds and videos below one folder, and nothing outside it.

A dataset is input from strangers. What it names is opened only if it is an ordinary file below the folder, is
read through a file object (so that no library opens anything by name), and is measured by its header before
memory is taken for it. Whatever goes wrong is a `ValueError` that names the item as the record does.
"""

from __future__ import annotations

import base64
import io
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..records.parts import MediaKind, MediaRef
from . import decode_audio, decode_image, decode_video
from .decode_audio import AudioInfo
from .decode_video import VideoInfo
from .download import download

__all__ = ["AudioInfo", "MediaFiles", "VideoInfo"]

# Names such as a:b.png are files; schemes that need no slashes are listed.
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|(file|data|http|https|ftp):", re.IGNORECASE)


@dataclass(frozen=True)
class MediaFiles:
    """The media below one folder; every method takes a `MediaRef` or what its `source` would be."""

    root: Path
    """Sources are paths below it."""
    allow_urls: bool = False
    """Whether http and https may be read; the dataset can then ask any address that the machine reaches."""
    max_pixels: int = 2**27
    """Of a picture or of one frame."""
    max_seconds: float = 4 * 3600.0
    """Of a sound or video."""
    max_bytes: int = 2**32
    """Of a file."""
    max_decoded: int = 2**34
    """Bytes that one sound or the frames asked of one video may take in memory."""
    url_timeout: float = 30.0
    """Seconds for a whole download."""

    def resolve(self, source: str) -> Path:
        """The file that a source names, if it is an ordinary file below the folder."""
        with _named("file", source):
            return self._resolve(source)

    def image_size(self, ref: MediaRef | str) -> tuple[int, int]:
        """Width and height of the upright picture, from its header."""
        with self._open("image", ref) as file:
            return decode_image.image_size(file, self.max_pixels)

    def image(self, ref: MediaRef | str) -> Any:
        """The picture as a `PIL.Image` in RGB, upright."""
        with self._open("image", ref) as file:
            return decode_image.image(file, self.max_pixels)

    def audio_info(self, ref: MediaRef | str) -> AudioInfo:
        """Length, rate and channels of a sound, or of a video's; only if no header has it, it is decoded."""
        with self._open("audio", ref) as file:
            return decode_audio.audio_info(file, self.max_seconds, self.max_decoded)

    def audio(self, ref: MediaRef | str, sampling_rate: int) -> NDArray[np.float32]:
        """The sound as one channel at a rate: float32 [n], n = `audio_info(ref).num_samples_at(rate)`."""
        with self._open("audio", ref) as file:
            return decode_audio.audio(file, sampling_rate, self.max_seconds, self.max_decoded)

    def video_info(self, ref: MediaRef | str) -> VideoInfo:
        """Number of frames, rate and size of a video; at most one frame is decoded."""
        with self._open("video", ref) as file:
            return decode_video.video_info(file, self.max_pixels, self.max_seconds)

    def video(self, ref: MediaRef | str, frame_indices: Sequence[int]) -> NDArray[np.uint8]:
        """Frames of a video by their numbers, upright: uint8 [n, H, W, 3]."""
        with self._open("video", ref) as file:
            return decode_video.video(
                file, frame_indices, self.max_pixels, self.max_seconds, self.max_decoded
            )

    @contextmanager
    def _open(self, kind: MediaKind, ref: MediaRef | str) -> Iterator[BinaryIO]:
        source = ref if isinstance(ref, str) else ref.source
        with _named(kind, source):
            if source[:5].lower() == "data:":
                yield io.BytesIO(self._inline(source))
                return
            if self.allow_urls and _URL.match(source):
                yield io.BytesIO(download(source, self.max_bytes, self.url_timeout))
                return
            # Without O_NONBLOCK a pipe put there after it was looked at would wait for a writer for ever.
            descriptor = os.open(self._resolve(source), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                self._check(os.fstat(descriptor))
                yield file

    def _inline(self, source: str) -> bytes:
        """What is in a `data:` URI."""
        head, comma, data = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("is a data URI without base64; write data:image/png;base64,…")
        if 3 * len(data) // 4 > self.max_bytes:
            raise ValueError(f"has {3 * len(data) // 4} bytes; at most {self.max_bytes} are read")
        try:
            found = base64.b64decode("".join(data.split()), validate=True)
        except ValueError as error:
            raise ValueError(f"is a data URI whose base64 is broken: {error}") from None
        if not found:
            raise ValueError("is empty: the data URI has no bytes")
        return found

    def _resolve(self, source: str) -> Path:
        if not source or "\0" in source:
            raise ValueError("is not a path: it is empty or contains a NUL character")
        if _URL.match(source):
            raise ValueError("is a URL; download it, or allow http and https URLs with allow_urls")
        path = Path(source)
        root = self.root.resolve(strict=True)
        if path.is_absolute():  # told without a look at the disk, which would say what lies elsewhere
            above = [one for one in (root, Path(os.path.abspath(self.root))) if path.is_relative_to(one)]
            path = path.relative_to(above[0]) if above else Path("..")
        if ".." in path.parts:
            raise ValueError("leaves the media folder; give a path inside it, without `..`")
        try:
            found = (root / path).resolve(strict=True)
        except FileNotFoundError:
            raise ValueError("does not exist in the media folder") from None
        if not found.is_relative_to(root):
            raise ValueError("leaves the media folder by a symbolic link")
        self._check(found.stat())
        return found

    def _check(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise ValueError(f"is {what}, not a file")
        if not status.st_size:
            raise ValueError("is empty: the file has no bytes")
        if status.st_size > self.max_bytes:
            raise ValueError(f"has {status.st_size} bytes; at most {self.max_bytes} are read")


@contextmanager
def _named(kind: str, source: str) -> Iterator[None]:
    """Turn whatever is raised into a `ValueError` that names the item."""
    shown = ascii(source) if len(source) <= 200 else f"{source[:120]!a}…{source[-40:]!a}"
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{kind} {shown} {error}") from error
    except Exception as error:  # the libraries have no common one: OSError, SyntaxError, struct.error, …
        # What an OSError says of itself repeats the path, with the folder before it.
        reason = str((isinstance(error, OSError) and error.strerror) or error)
        raise ValueError(f"{kind} {shown} cannot be read: {type(error).__name__}: {reason[:300]}") from error
