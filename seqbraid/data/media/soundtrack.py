"""The sound of videos, and of sounds in their containers (m4a, mka, webm).

The samples are those that the decoder gives, one after another: what an encoder put before the first and
after the last is cut where the file says so, a gap in the times is not filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .container import is_shown, opened_container


class TrackHeader(NamedTuple):
    """What a container says of its sound."""

    sampling_rate: int
    channels: int
    num_samples: int | None
    """None where it must be decoded to be counted."""


def track_header(file: BinaryIO) -> TrackHeader:
    """Rate, channels and, if the container is exact about it, the number of samples; nothing is decoded."""
    with _opened(file) as (container, stream):
        context = stream.codec_context
        return TrackHeader(context.sample_rate, context.channels, _promised_samples(container, stream))


def count_samples(file: BinaryIO, most: int) -> int:
    """Decode to count; from `most` on it is not counted further."""
    count = 0
    for block in track_blocks(file):
        count += len(block)
        if count >= most:
            break
    return count


def track_blocks(file: BinaryIO) -> Iterator[NDArray[np.float32]]:
    """The decoded sound, piece by piece: [n, channels]."""
    with _opened(file) as (container, stream):
        rate = stream.codec_context.sample_rate
        # Refuses another number of channels on the way.
        resampler = import_module("av").AudioResampler(format="fltp")
        for frame in container.decode(stream):
            if frame.sample_rate != rate:
                raise ValueError(f"has {rate} Hz by its header, but decodes to {frame.sample_rate} Hz")
            if frame.is_corrupt:
                raise ValueError(f"is damaged at {float(frame.time or 0):.2f} s of its audio")
            for piece in resampler.resample(frame):
                yield piece.to_ndarray().T


@contextmanager
def _opened(file: BinaryIO) -> Iterator[tuple[Any, Any]]:
    with opened_container(file, "sound") as container:
        if not container.streams.audio:
            raise ValueError("has no audio stream")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise ValueError(
                "has audio in a codec that cannot be decoded on this machine; convert it, to AAC for instance"
            )
        yield container, stream


def _promised_samples(container: Any, stream: Any) -> int | None:
    """The time at which the last packet ends, where times are samples and leave no room for doubt.

    That is so in MP4 and MOV with packets of one size that follow each other without a gap. What is before
    time 0 is the encoder's delay, which the decoder cuts; of the last packet less may be meant than it
    decodes to. Fragments and containers that count in milliseconds are left to the decoder.
    """
    if stream.time_base * stream.codec_context.sample_rate != 1:
        return None
    packets = [(p.pts, p.duration or 0, is_shown(p)) for p in container.demux(stream) if p.size > 0]
    shown = [(pts, duration) for pts, duration, shows in packets if shows]
    if any(pts is None for pts, _ in shown):
        return None
    size = stream.codec_context.frame_size
    if not size or not shown or not -size < shown[0][0] <= 0:
        return None
    ends = [pts + duration for pts, duration in shown]
    if ends[:-1] != [pts for pts, _ in shown[1:]] or any(d != size for _, d in shown[:-1]):
        return None
    if not 0 < shown[-1][1] <= size or ends[-1] < 1:
        return None
    if len(packets) < stream.frames:
        raise ValueError(f"has {stream.frames} audio packets by its header, but {len(packets)} are there")
    return int(ends[-1])
