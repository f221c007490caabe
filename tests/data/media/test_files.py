"""Pictures, sounds and videos are decoded as they are, upright, and measured without being decoded."""

from __future__ import annotations

import io
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqbraid.data.media import decode_video
from seqbraid.data.media.files import AudioInfo, MediaFiles, VideoInfo
from seqbraid.data.media.resample import resample, resampled_length
from seqbraid.data.records.conversation import MediaRef
from tests.helpers.media import NUM_FRAMES, SIZE, frame, picture, png_chunk, write_good, write_video

Image = pytest.importorskip("PIL.Image")
soundfile = pytest.importorskip("soundfile")
av = pytest.importorskip("av")


VIDEOS: dict[str, dict[str, Any]] = {
    "b.mp4": {"g": 12, "bf": 3},
    "open.mp4": {"g": 8, "bf": 2, "x264-params": "open-gop=1:scenecut=0"},
    "one.mkv": {"g": 250},
    "vp9.webm": {"codec": "libvpx-vp9", "g": 10},
    "b.avi": {"codec": "mpeg4", "g": 10},
    "b.ts": {"g": 12, "bf": 2},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    write_good(folder)
    for name, options in VIDEOS.items():
        write_video(folder / name, **options)
    return folder


def test_files_below_the_folder_are_found(root: Path) -> None:
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "inner.png").symlink_to("../../good.png")
    media = MediaFiles(root)
    assert media.resolve("good.png") == (root / "good.png").resolve()
    assert media.resolve("deep/er/./inner.png") == (root / "good.png").resolve()
    assert media.image_size(MediaRef("image", "deep/er/inner.png")) == SIZE
    (root / "deep" / "folder").symlink_to(root)
    assert MediaFiles(root / "deep" / "folder").image_size("good.png") == SIZE, (
        "the folder itself may be a link"
    )


def test_limits_are_those_given(root: Path) -> None:
    cases = [
        (MediaFiles(root, max_bytes=100), r"has \d+ bytes; at most 100"),
        (MediaFiles(root, max_pixels=64 * 48 - 1), "has 64 × 48 pixels"),
    ]
    for media, reason in cases:
        with pytest.raises(ValueError, match=f"image 'good.png' {reason}"):
            media.image_size("good.png")
        with pytest.raises(ValueError, match=reason):
            media.video_info("good.mp4")
    assert MediaFiles(root, max_pixels=64 * 48).image("good.png").size == SIZE
    for limit in ({"max_seconds": 0.9}, {"max_decoded": 50_000}):
        with pytest.raises(ValueError, match="lasts 1 s"):
            MediaFiles(root, **limit).audio_info("good.wav")
    with pytest.raises(ValueError, match="lasts 4 s; at most 3 s"):
        MediaFiles(root, max_seconds=3).video("good.mp4", [0])
    with pytest.raises(ValueError, match="at most 20000 are used"):
        MediaFiles(root, max_decoded=20_000).video("good.mp4", [0, 1, 2])


@pytest.mark.parametrize("tail", ["jpg", "png", "webp", "tif"])
def test_pictures_stand_upright_and_their_size_is_known_before(tmp_path: Path, tail: str) -> None:
    # Where row 0 and column 0 of the stored pixels are seen, as the EXIF standard has it.
    upright = {
        1: lambda p: p,
        2: lambda p: p[:, ::-1],
        3: lambda p: p[::-1, ::-1],
        4: lambda p: p[::-1],
        5: lambda p: p.transpose(1, 0, 2),
        6: lambda p: p.transpose(1, 0, 2)[:, ::-1],
        7: lambda p: p[::-1, ::-1].transpose(1, 0, 2),
        8: lambda p: p.transpose(1, 0, 2)[::-1],
    }
    media = MediaFiles(tmp_path)
    stored = np.kron(picture(4, 3), np.ones((16, 16, 1), np.uint8))
    for orientation, turn in upright.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = (
            {"quality": 95, "subsampling": 0}
            if tail == "jpg"
            else {"lossless": True}
            if tail == "webp"
            else {}
        )
        Image.fromarray(stored).save(tmp_path / f"{orientation}.{tail}", exif=exif, **options)
        seen = np.asarray(media.image(f"{orientation}.{tail}")).astype(int)
        wanted = turn(stored).astype(int)
        assert media.image_size(f"{orientation}.{tail}") == (seen.shape[1], seen.shape[0])
        assert seen.shape == wanted.shape and abs(seen - wanted).mean() < 4, orientation


def test_an_orientation_after_the_pixels_changes_neither_size_nor_picture(tmp_path: Path) -> None:
    good = io.BytesIO()
    Image.fromarray(picture(6, 4)).save(good, "png")
    exif = Image.Exif()
    exif[0x0112] = 6
    end = good.getvalue().index(b"IEND") - 4
    chunk = png_chunk(b"eXIf", exif.tobytes()[6:])
    (tmp_path / "late.png").write_bytes(good.getvalue()[:end] + chunk + good.getvalue()[end:])
    media = MediaFiles(tmp_path)
    assert media.image_size("late.png") == media.image("late.png").size == (6, 4)


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    media = MediaFiles(tmp_path)

    def pixel(image: object, name: str, **options: object) -> list[int]:
        image.save(tmp_path / name, **options)  # type: ignore[attr-defined]
        decoded = media.image(name)
        assert decoded.mode == "RGB"
        return list(decoded.getpixel((0, 0)))

    half = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert pixel(half, "clear.png") == [255, 255, 255], "transparent is white, as transformers has it"
    assert pixel(Image.new("LA", (2, 2), (0, 255)), "la.png") == [0, 0, 0]
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([9, 9, 9, 200, 100, 50])
    assert pixel(palette, "p.png") == [200, 100, 50]
    assert pixel(palette, "pt.png", transparency=1) == [255, 255, 255]
    assert pixel(Image.new("L", (2, 2), 77), "l.png") == [77, 77, 77]
    assert pixel(Image.new("1", (2, 2), 1), "1.png") == [255, 255, 255]
    assert pixel(Image.new("CMYK", (2, 2), (0, 0, 0, 0)), "cmyk.tif") == [255, 255, 255]
    sixteen = Image.fromarray(np.full((2, 2), 0x8040, np.uint16))
    for name in ("16.png", "16.tif", "16.ppm"):
        assert pixel(sixteen, name) == [0x80] * 3, "the upper eight bits of sixteen"
    frames = [Image.new("P", (2, 2), number) for number in (0, 1)]
    for image in frames:
        image.putpalette([10, 20, 30, 200, 100, 50])
    assert pixel(frames[0], "two.gif", save_all=True, append_images=frames[1:]) == [10, 20, 30]


def test_sounds_keep_their_samples_and_are_mixed_to_one_channel(root: Path) -> None:
    both = np.stack([np.linspace(-0.5, 0.5, 9000), np.full(9000, 0.25)], 1).astype(np.float32)
    soundfile.write(root / "both.wav", both, 16_000, subtype="FLOAT")
    media = MediaFiles(root)
    assert media.audio_info("both.wav") == AudioInfo(9000, 16_000, 2)
    sound = media.audio("both.wav", 16_000)
    assert sound.dtype == np.float32
    np.testing.assert_allclose(sound, both.mean(1), atol=1e-7)
    with pytest.raises(ValueError, match="sampling rate 0 Hz"):
        media.audio("both.wav", 0)
    for tail in ("flac", "ogg", "mp3"):
        soundfile.write(root / f"both.{tail}", both, 16_000)
        info = media.audio_info(f"both.{tail}")
        for rate in (16_000, 24_000, 11_025):
            assert len(media.audio(f"both.{tail}", rate)) == info.num_samples_at(rate)


@pytest.mark.parametrize(
    ("from_rate", "to_rate"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (22_051, 16_000)]
)
def test_a_sine_stays_the_sine_at_another_rate(from_rate: int, to_rate: int) -> None:
    nyquist = min(from_rate, to_rate) / 2
    for frequency in (50, 0.8 * nyquist):
        x = np.sin(2 * np.pi * frequency / from_rate * np.arange(from_rate)).astype(np.float32)
        y = resample(x, from_rate, to_rate)
        wanted = np.sin(2 * np.pi * frequency / to_rate * np.arange(to_rate))
        assert len(y) == resampled_length(len(x), from_rate, to_rate) == to_rate
        inner = slice(to_rate // 10, -to_rate // 10)
        assert abs(y - wanted)[inner].max() < 1e-4, frequency
    if to_rate < from_rate:
        above = np.sin(2 * np.pi * 1.2 * nyquist / from_rate * np.arange(from_rate)).astype(np.float32)
        assert abs(resample(above, from_rate, to_rate)[to_rate // 10 : -to_rate // 10]).max() < 1e-4, (
            "no aliases"
        )


@pytest.mark.parametrize("name", VIDEOS)
def test_frames_are_those_of_their_numbers(root: Path, name: str) -> None:
    media = MediaFiles(root)
    assert media.video_info(name) == VideoInfo(NUM_FRAMES, 10.0, *SIZE)
    for numbers in (range(NUM_FRAMES), [0], [39], [17, 3, 3, 38], [9], [0, 39]):
        frames = media.video(name, list(numbers))
        assert frames.shape == (len(numbers), SIZE[1], SIZE[0], 3) and frames.dtype == np.uint8
        brightness = frames[:, 24:, 24:].mean((1, 2, 3))
        assert abs(brightness - [16 + 5 * number for number in numbers]).max() < 2.5
    for wrong in ([NUM_FRAMES], [-1], []):
        with pytest.raises(ValueError, match=f"has frames 0 to {NUM_FRAMES - 1}"):
            media.video(name, wrong)


@pytest.mark.parametrize("name", ["b.mp4", "open.mp4", "vp9.webm", "b.avi"])
def test_far_frames_are_sought_and_not_counted(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    every = MediaFiles(root).video(name, range(NUM_FRAMES))
    counted = decode_video._decoded
    # The first frame is always decoded for its size; whoever asks for the second counts.
    monkeypatch.setattr(decode_video, "_decoded", lambda *args: islice(counted(*args), 1))
    monkeypatch.setattr(decode_video, "SEEK_GAP", 1)
    for numbers in ([3, 5], [39], [38, 12], [13, 11], [8, 9, 10, 31], [0, 2], [7], list(range(0, 40, 3))):
        assert np.array_equal(MediaFiles(root).video(name, numbers), every[numbers]), numbers


def test_a_video_stands_upright(root: Path) -> None:
    # The matrix of the track header, in 16.16 fixed point: x' = a·x + c·y, y' = b·x + d·y, with y downwards.
    data = (root / "good.mp4").read_bytes()
    place = data.index(struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30), data.index(b"tkhd"))
    for turns, (a, b, c, d) in {1: (0, 1, -1, 0), 2: (-1, 0, 0, -1), 3: (0, -1, 1, 0)}.items():
        one = 1 << 16
        matrix = struct.pack(">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
        (root / "turned.mp4").write_bytes(data[:place] + matrix + data[place + len(matrix) :])
        info = MediaFiles(root).video_info("turned.mp4")
        seen = MediaFiles(root).video("turned.mp4", [0])[0]
        wanted = np.rot90(
            frame(0), -turns
        )  # with the clock, which is where (1, 0) → (0, 1) turns when y is down
        assert (info.height, info.width) == seen.shape[:2] == wanted.shape[:2]
        assert abs(seen.astype(int) - wanted).mean() < 8, turns


class Server(BaseHTTPRequestHandler):
    """Serves one file, one without end, and redirections out of http."""

    root: Path

    def do_GET(self) -> None:
        if self.path == "/good.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write((self.root / "good.png").read_bytes())
        elif self.path == "/cut.png":
            self.send_response(200)
            self.send_header("Content-Length", "99999")
            self.end_headers()
            self.wfile.write((self.root / "good.png").read_bytes())
        elif self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header(
                "Location",
                {"file": f"file://{self.root}/good.png", "ftp": "ftp://localhost/x"}[self.path[4:]],
            )
            self.end_headers()
        else:
            self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(root: Path) -> Iterator[str]:
    Server.root = root
    with HTTPServer(("127.0.0.1", 0), Server) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_urls_are_read_where_they_are_allowed_and_only_http(root: Path, server: str) -> None:
    media = MediaFiles(root, allow_urls=True, url_timeout=10)
    assert media.image(f"{server}/good.png").size == SIZE
    assert media.image_size("good.png") == SIZE, "paths are read as before"
    with pytest.raises(ValueError, match="more than 100 bytes"):
        MediaFiles(root, allow_urls=True, max_bytes=100).image(f"{server}/good.png")
    refused = {
        f"{server}/none.png": "404",
        f"{server}/cut.png": "before its announced length|Incomplete",
        f"{server}/to/file": "image",
        f"{server}/to/ftp": "image",
        f"file://{root}/good.png": "not an http or https URL",
        "ftp://localhost/good.png": "not an http or https URL",
        "http://127.0.0.1:1/x": "refused",
        "http://[": "image",
        "../good.png": "leaves the media folder",
    }
    for source, reason in refused.items():
        with pytest.raises(ValueError, match=reason):
            media.image(source)
    with pytest.raises(ValueError, match="is a URL"):
        MediaFiles(root).image(f"{server}/good.png")


def test_a_missing_library_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"pip install 'seqbraid\[audio\]'"):
        MediaFiles(root).audio_info("good.wav")
    with pytest.raises(ValueError, match=r"pip install 'seqbraid\[video\]'"):
        MediaFiles(root).video_info("good.mp4")


def test_damage_is_refused_unless_it_lies_before_the_key_frame_sought(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with av.open(str(root / "b.mp4")) as container:
        position, size = [(packet.pos, packet.size) for packet in container.demux(video=0)][4]
    data = bytearray((root / "b.mp4").read_bytes())
    data[position + 5 : position + size] = bytes(size - 5)
    (root / "damaged.mp4").write_bytes(data)
    media = MediaFiles(root)
    with pytest.raises(ValueError, match=r"video 'damaged.mp4' (is damaged|cannot be decoded|has 40 frames)"):
        media.video("damaged.mp4", range(NUM_FRAMES))
    monkeypatch.setattr(decode_video, "SEEK_GAP", 12)
    assert np.array_equal(media.video("damaged.mp4", [30, 39]), media.video("b.mp4", [30, 39]))
