"""The sound of videos: as many samples as their headers say, and the ones that were written."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media import decode_audio
from seqbraid.data.media.files import AudioInfo, MediaFiles
from seqbraid.data.media.soundtrack import track_header
from seqbraid.data.pack import pack
from seqbraid.data.tiny import tiny_training_model
from seqbraid.models.media_tokens import audio_tokens
from tests.helpers.media import write_sounding, write_video

pytest.importorskip("soundfile")
pytest.importorskip("av")

RATE = 16_000
LENGTH = RATE + 123
"""A second and a bit, that no size of a codec's frames divides."""


def tones(length: int = LENGTH, rate: int = RATE) -> np.ndarray:
    """Two channels of different loudness, steps of 2⁻¹⁵ so that 16 bits hold them: [2, n]."""
    wave = np.sin(np.arange(length) * 2 * np.pi * 440 / rate)
    return np.round(np.stack([0.5 * wave, 0.25 * wave]) * 2**15).astype(np.float32) / 2**15


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounding")
    write_sounding(folder / "aac.mp4", tones(), "aac")
    write_sounding(folder / "front.mp4", tones(), "aac", movflags="faststart")
    write_sounding(folder / "pieces.mp4", tones(), "aac", movflags="frag_keyframe+empty_moov")
    write_sounding(folder / "aac.m4a", tones(), "aac", num_frames=0)
    write_sounding(folder / "pcm.mov", tones(), "pcm_s16le")
    write_sounding(folder / "pcm.mkv", tones(), "pcm_s16le")
    write_sounding(folder / "flac.mkv", tones(), "flac")
    write_sounding(folder / "opus.mkv", tones(3 * LENGTH, 48_000), "libopus", rate=48_000)
    write_sounding(folder / "aac.ts", tones(), "aac")
    write_video(folder / "silent.mp4", 10)
    return folder


@pytest.mark.parametrize("name", ["pcm.mov", "pcm.mkv", "flac.mkv"])
def test_lossless_sound_is_the_one_written(root: Path, name: str) -> None:
    media = MediaFiles(root)
    assert media.audio_info(name) == AudioInfo(LENGTH, RATE, 2)
    assert np.array_equal(media.audio(name, RATE), tones().mean(axis=0))


@pytest.mark.parametrize("name", ["aac.mp4", "front.mp4", "aac.m4a", "opus.mkv"])
def test_what_an_encoder_adds_at_the_ends_is_cut(root: Path, name: str) -> None:
    media = MediaFiles(root)
    info, sound = media.audio_info(name), media.audio(name, RATE)
    length, rate = (3 * LENGTH, 48_000) if "opus" in name else (LENGTH, RATE)
    assert info == AudioInfo(length, rate, 2)
    wanted = tones().mean(axis=0)
    assert len(sound) == info.num_samples_at(RATE) == len(wanted)
    # In time: a shift by the encoder's delay (1024 or 312 samples) would leave nothing of this.
    assert np.corrcoef(sound[500:-500], wanted[500:-500])[0, 1] > 0.99


@pytest.mark.parametrize("name", ["pieces.mp4", "aac.ts"])
def test_where_the_container_is_vague_what_is_said_is_what_is_decoded(root: Path, name: str) -> None:
    media = MediaFiles(root)
    info, sound = media.audio_info(name), media.audio(name, RATE)
    assert len(sound) == info.num_samples and LENGTH <= len(sound) < LENGTH + 3 * 1024


@pytest.mark.parametrize("delay", [1500, 2112])
def test_an_encoder_delay_may_end_within_a_packet(root: Path, delay: int) -> None:
    data = bytearray((root / "aac.mp4").read_bytes())
    place = data.index(struct.pack(">i", 1024), data.rindex(b"elst"))  # the second track's edit list
    data[place : place + 4] = struct.pack(">i", delay)
    (root / "delayed.mp4").write_bytes(data)
    media = MediaFiles(root)
    wanted = media.audio("aac.mp4", RATE)[delay - 1024 :]
    assert media.audio_info("delayed.mp4").num_samples == len(wanted)
    assert np.array_equal(media.audio("delayed.mp4", RATE), wanted)


def test_nothing_is_decoded_where_the_header_knows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("was decoded")

    monkeypatch.setattr(decode_audio, "count_samples", refuse)
    for name in ("aac.mp4", "front.mp4", "aac.m4a"):
        with (root / name).open("rb") as file:
            assert track_header(file).num_samples == LENGTH
        assert MediaFiles(root).audio_info(name).num_samples == LENGTH


def test_what_is_wrong_with_a_sound_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"audio 'silent.mp4' has no audio stream"):
        MediaFiles(root).audio_info("silent.mp4")
    for name in ("aac.mp4", "flac.mkv"):
        with pytest.raises(ValueError, match=f"audio '{name}' lasts 1 s .* at most 0.5 s"):
            MediaFiles(root, max_seconds=0.5).audio_info(name)
        with pytest.raises(ValueError, match=f"audio '{name}' lasts 1 s .* 10000 samples are read"):
            MediaFiles(root, max_decoded=40_000).audio_info(name)
    whole = (root / "front.mp4").read_bytes()
    (root / "cut.mp4").write_bytes(whole[: len(whole) * 3 // 4])
    for call in (MediaFiles(root).audio_info, lambda name: MediaFiles(root).audio(name, RATE)):
        with pytest.raises(ValueError, match=r"audio 'cut.mp4' (has \d+ audio packets|cannot be decoded)"):
            call("cut.mp4")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert MediaFiles(root).audio_info("aac.mp4").num_samples == LENGTH
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"pip install 'seqbraid\[video\]'"):
        MediaFiles(root).audio_info("aac.mp4")


def test_omni_hears_the_sound_of_a_video(root: Path) -> None:
    model, processor = tiny_training_model("qwen3_omni")
    pixels = {"video_min_pixels": 8 * 8, "video_max_pixels": 32 * 32}
    encoder = SampleEncoder(processor, model.config, MediaFiles(root), use_audio_in_video=True, **pixels)
    question = [{"type": "video", "video": "flac.mkv"}, {"type": "text", "text": "What happens?"}]
    record = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Beep."}]}
    sample = encoder.encode(record)
    assert encoder.length(record) == len(sample["input_ids"])
    wanted = processor.feature_extractor(
        tones().mean(axis=0),
        sampling_rate=RATE,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="pt",
    )
    assert sample["use_audio_in_video"] and sample["input_features"].equal(wanted["input_features"])
    heard = sample["input_ids"] == model.config.audio_token_id
    assert int(heard.sum()) == audio_tokens(int(wanted["attention_mask"].sum()), model.config) > 0
    pack([sample], model.config)
    question[0]["video"] = "silent.mp4"
    with pytest.raises(ValueError, match="has no audio stream"):
        encoder.length(record)
