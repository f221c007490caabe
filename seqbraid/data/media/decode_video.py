"""Videos: their number of frames, and chosen frames as RGB."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .container import is_shown, opened_container

MAX_FPS = 1_000
SEEK_GAP = 60
"""Frames between two that are asked for, from which on key frames are sought instead of all decoded."""


@dataclass(frozen=True)
class VideoInfo:
    """What is known of a video from its container and first frame."""

    num_frames: int
    fps: float
    width: int
    height: int
    """Of the upright picture, as `video` gives it."""


def video_info(file: BinaryIO, max_pixels: int, max_seconds: float) -> VideoInfo:
    """Count the frames from the container and look at the first; the others are not decoded."""
    with _opened(file, max_pixels) as (container, stream):
        # Where the container keeps no count its packets are counted: the file is read, but not decoded.
        num_frames = _promised_frames(stream) or _count_packets(container, stream)
        rate = stream.average_rate or stream.guessed_rate
    if num_frames < 1:
        raise ValueError("has no frames")
    if rate is None or not 0 < rate <= MAX_FPS:
        raise ValueError(f"has {rate} frames a second; more than 0 and at most {MAX_FPS} are read")
    if num_frames / rate > max_seconds:
        raise ValueError(f"lasts {float(num_frames / rate):.0f} s; at most {max_seconds:g} s are read")
    # Whether it is to be turned, and its true size, only a frame can tell.
    first = next(_decoded(file, max_pixels), None)
    if first is None:
        raise ValueError(f"has {num_frames} frames by its header, of which none could be decoded")
    height, width = (first.width, first.height) if _quarter_turns(first) % 2 else (first.height, first.width)
    return VideoInfo(num_frames, float(rate), width, height)


def video(
    file: BinaryIO, indices: Sequence[int], max_pixels: int, max_seconds: float, max_decoded: int
) -> NDArray[np.uint8]:
    """Frames by their number, in the order asked for: uint8 [n, H, W, 3]."""
    info = video_info(file, max_pixels, max_seconds)
    outside = [index for index in indices if not 0 <= index < info.num_frames]
    if outside or not len(indices):
        raise ValueError(
            f"has frames 0 to {info.num_frames - 1}; asked for {outside[0] if outside else 'none'}"
        )
    shape = (len(indices), info.height, info.width, 3)
    if np.prod(shape, dtype=float) > max_decoded:
        raise ValueError(
            f"would need {shape} bytes for {len(indices)} frames; at most {max_decoded} are used"
        )
    places: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        places.setdefault(int(index), []).append(place)
    out = np.empty(shape, np.uint8)

    def put(number: int, frame: Any) -> None:
        picture = np.rot90(frame.to_ndarray(format="rgb24"), _quarter_turns(frame))
        if picture.shape != shape[1:]:
            raise ValueError(f"changes its size at frame {number}, from {shape[1:]} to {picture.shape}")
        out[places.pop(number)] = picture

    wanted = sorted(places)
    if max(np.diff([0, *wanted])) > SEEK_GAP:
        for number, frame in _sought(file, wanted, info.num_frames, max_pixels):
            put(number, frame)
    number = -1
    for number, frame in enumerate(_decoded(file, max_pixels) if places else ()):
        if number in places:
            put(number, frame)
        if not places:
            break
    if places:
        raise ValueError(
            f"has {info.num_frames} frames by its header, of which {number + 1} could be decoded"
        )
    return out


@contextmanager
def _opened(file: BinaryIO, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    with opened_container(file, "video", {"max_pixels": str(max_pixels)}) as container:
        yield container, _video_stream(container, max_pixels)


def _video_stream(container: Any, max_pixels: int) -> Any:
    if not container.streams.video:
        raise ValueError("has no video stream")
    stream = container.streams.video[0]
    context = stream.codec_context
    if context is None:
        raise ValueError(
            "has a codec that cannot be decoded on this machine; convert it, to H.264 for instance"
        )
    if context.width * context.height > max_pixels:
        raise ValueError(f"has {context.width} × {context.height} pixels; at most {max_pixels} are read")
    # Also for the decoder, since a stream may contradict its container.
    context.options = {"max_pixels": str(max_pixels)}
    return stream


def _decoded(file: BinaryIO, max_pixels: int) -> Iterator[Any]:
    with _opened(file, max_pixels) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if frame.is_corrupt:
                raise ValueError(f"is damaged at frame {number}")
            yield frame


def _sought(
    file: BinaryIO, wanted: Sequence[int], num_frames: int, max_pixels: int
) -> Iterator[tuple[int, Any]]:
    """Frames by ascending numbers, each decoded from the key frame before it, as far as that is possible.

    A frame is known by its time: the n-th frame shown has the n-th time of all packets. Where times are
    missing or the file cannot be sought, this ends early, and the frames left are found by counting.
    """
    try:
        with _opened(file, max_pixels) as (container, stream):
            marks = [(p.pts, p.dts, p.is_keyframe) for p in container.demux(stream) if is_shown(p)]
        if any(pts is None for pts, _, _ in marks) or len({pts for pts, _, _ in marks}) != num_frames:
            return
        number_at = {pts: number for number, pts in enumerate(sorted(pts for pts, _, _ in marks))}
        keys = sorted((number_at[pts], pts if dts is None else dts) for pts, dts, is_key in marks if is_key)
        with _opened(file, max_pixels) as (container, stream):
            position, frames = -1, container.decode(stream)
            for number in wanted:
                before = bisect_right(keys, number, key=itemgetter(0)) - 1
                if before >= 0 and keys[before][0] > position + 1:
                    container.seek(keys[before][1], stream=stream, backward=True)
                    frames = container.decode(stream)
                frame = next((f for f in frames if number_at.get(f.pts, -1) >= number), None)
                if frame is None or number_at[frame.pts] != number or frame.is_corrupt:
                    return
                position = number
                yield number, frame
    except ValueError:
        return  # whoever counts the frames meets the same damage, and says where


def _promised_frames(stream: Any) -> int:
    """The container's count of frames, without those that an edit list hides; 0 where it has none."""
    return (
        max(0, stream.frames - sum(entry.is_discard for entry in stream.index_entries))
        if stream.frames
        else 0
    )


def _count_packets(container: Any, stream: Any) -> int:
    return sum(map(is_shown, container.demux(stream)))


def _quarter_turns(frame: Any) -> int:
    """By how many quarters, against the clock, the frame is to be turned to stand upright."""
    return round(frame.rotation / 90) % 4
