"""Sounds: their length from the header, and their samples as one channel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from .container import MissingPyAVError, UnreadableError
from .resample import resample, resampled_length
from .soundtrack import count_samples, track_blocks, track_header

RATES = (1_000, 384_000)
MAX_CHANNELS = 64
BLOCK = 2**18
UNKNOWN_FORMAT = 1
"""Libsndfile's error for a file that it has no reader for, such as a video."""


@dataclass(frozen=True)
class AudioInfo:
    """What a sound's header says."""

    num_samples: int
    """Of one channel, at the file's own rate."""
    sampling_rate: int
    channels: int

    def num_samples_at(self, sampling_rate: int) -> int:
        """How many samples `audio` gives at this rate."""
        return resampled_length(self.num_samples, self.sampling_rate, sampling_rate)


def audio_info(file: BinaryIO, max_seconds: float, max_decoded: int) -> AudioInfo:
    """Length, rate and channels; decoded only where the header does not tell how many samples there are."""
    with _opened(file, max_seconds, max_decoded) as (info, _):
        return info


def audio(file: BinaryIO, sampling_rate: int, max_seconds: float, max_decoded: int) -> NDArray[np.float32]:
    """The sound at a rate, as the mean of its channels: float32 [n]."""
    _check_rate(sampling_rate)
    with _opened(file, max_seconds, max_decoded) as (info, blocks):
        mono = np.empty(info.num_samples, np.float32)
        filled = 0
        # In blocks, so that many channels need no more memory than one.
        for block in blocks:
            if not np.isfinite(block).all():
                raise ValueError(
                    "has NaN or infinity among its audio samples; repair the file or leave it out"
                )
            block = block[: len(mono) - filled]
            mono[filled : filled + len(block)] = block.mean(axis=1)
            filled += len(block)
    if filled != len(mono):
        raise ValueError(f"has {len(mono)} samples by its header, of which {filled} could be decoded")
    return resample(mono, info.sampling_rate, sampling_rate)


@contextmanager
def _opened(
    file: BinaryIO, max_seconds: float, max_decoded: int
) -> Iterator[tuple[AudioInfo, Iterator[NDArray[np.float32]]]]:
    """What is known of a sound, and its samples in blocks [n, channels]: by soundfile, else by PyAV."""
    try:
        soundfile = import_module("soundfile")
    except (ImportError, OSError):  # OSError: libsndfile, which it binds, is missing
        soundfile, unknown = None, "audio needs soundfile; pip install 'seqbraid[audio]'"
    if soundfile is not None:
        try:
            with soundfile.SoundFile(file) as sound:
                info = AudioInfo(sound.frames, sound.samplerate, sound.channels)
                _check(info, max_seconds, max_decoded)
                yield info, sound.blocks(BLOCK, dtype="float32", always_2d=True)
                return
        except soundfile.LibsndfileError as error:
            unknown = f"cannot be decoded as audio: {error.error_string}"
            if error.code != UNKNOWN_FORMAT:
                raise ValueError(unknown) from error
    try:
        info = _track_info(file, max_seconds, max_decoded)
    except UnreadableError as error:
        if soundfile is not None and isinstance(error, MissingPyAVError):
            unknown += " The audio of a video needs PyAV; pip install 'seqbraid[video]'"
        raise ValueError(unknown) from error
    yield info, track_blocks(file)


def _track_info(file: BinaryIO, max_seconds: float, max_decoded: int) -> AudioInfo:
    header = track_header(file)
    _check(AudioInfo(header.num_samples or 1, *header[:2]), max_seconds, max_decoded)
    if header.num_samples is not None:
        return AudioInfo(header.num_samples, *header[:2])
    most = int(min(max_seconds * header.sampling_rate, max_decoded // 4)) + 1
    info = AudioInfo(count_samples(file, most), *header[:2])
    _check(info, max_seconds, max_decoded)
    return info


def _check(info: AudioInfo, max_seconds: float, max_decoded: int) -> None:
    _check_rate(info.sampling_rate)
    if not 1 <= info.channels <= MAX_CHANNELS:
        raise ValueError(f"has {info.channels} channels; from 1 to {MAX_CHANNELS} are read")
    if info.num_samples < 1:
        raise ValueError("has no audio samples")
    seconds = info.num_samples / info.sampling_rate
    if seconds > max_seconds or 4 * info.num_samples > max_decoded:
        raise ValueError(
            f"lasts {seconds:.0f} s ({info.num_samples} samples); at most {max_seconds:g} s and "
            f"{max_decoded // 4} samples are read"
        )


def _check_rate(rate: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise ValueError(f"the sampling rate {rate} Hz is outside {RATES[0]} to {RATES[1]} Hz")
