"""Containers of video and sound, opened by PyAV so that nothing but the file at hand is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg"
"""The demuxers that may be used. Playlists (HLS, concat, DASH) would open what they name, anywhere."""


class UnreadableError(ValueError):
    """The file is no container of these formats, or is damaged."""


class MissingPyAVError(UnreadableError):
    """There is no library here that could tell."""


@contextmanager
def opened_container(file: BinaryIO, what: str, options: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The container that a file holds; what PyAV raises while it is open becomes an `UnreadableError`."""
    try:
        av = import_module("av")
    except ImportError:
        raise MissingPyAVError(f"{what}s need PyAV; pip install 'seqbraid[video]'") from None
    file.seek(0)
    all_options = {"format_whitelist": FORMATS, "protocol_whitelist": "none", **(options or {})}
    try:
        with av.open(
            file, options=all_options, metadata_errors="replace", io_open=_refuse_other_files
        ) as container:
            yield container
    except av.FFmpegError as error:
        raise UnreadableError(f"cannot be decoded as a {what} ({FORMATS}): {error.strerror}") from error


def is_shown(packet: Any) -> bool:
    """Whether a packet gives a frame: the last one is empty, and an edit list may hide others."""
    return packet.size > 0 and not packet.is_discard


def _refuse_other_files(url: str, flags: int, options: Any) -> Any:
    raise ValueError("refers to another file, which is not opened")
