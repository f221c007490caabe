"""Paths that lead elsewhere, and media that are damaged or too large."""

from __future__ import annotations

import os
import random
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.media import png_chunk, write_good

from .case import Case, about, media_root


def paths(folder: Path) -> Iterator[Case]:
    outside = folder / "outside"
    outside.mkdir()
    write_good(outside)
    root = media_root(folder)
    (root / "leaves").symlink_to(outside)
    (root / "nested").mkdir()
    (root / "nested" / "up").symlink_to("../../outside")
    (root / "loop").symlink_to("loop")
    (root / "passwd.png").symlink_to("/etc/passwd")
    leaves = "leaves the media folder"
    for kind, name in (("image", "good.png"), ("audio", "good.wav"), ("video", "good.mp4")):
        tail = name.rsplit(".", 1)[1]
        (root / f"link.{tail}").symlink_to(outside / name)
        (root / f"gone.{tail}").symlink_to(outside / "nothing")
        escapes = {
            f"../outside/{name}": leaves,
            f"nested/../../outside/{name}": leaves,
            f"../media/{name}": leaves,
            f"nested/../{name}": leaves,
            "..": leaves,
            str(outside / name): leaves,
            str(root / f"missing-{name}"): "does not exist",
            str(root / ".." / "outside" / name): leaves,
            f"//{name}": leaves,
            "/etc/passwd": leaves,
            "/dev/zero": leaves,
            "/dev/stdin": leaves,
            "/proc/self/mem": leaves,
            f"leaves/{name}": "symbolic link",
            f"nested/up/{name}": "symbolic link",
            f"link.{tail}": "symbolic link",
            f"gone.{tail}": "does not exist|symbolic link",
            "passwd.png": "symbolic link",
            "loop": "cannot be read|loop",
            f"{name}\0.txt": "NUL",
            "\0": "NUL",
            f"file://{outside / name}": "is a URL",
            f"file:{outside / name}": "is a URL",
            f"FILE://{root / name}": "is a URL",
            f"http://127.0.0.1:9/{name}": "is a URL",
            f"https://localhost/{name}": "is a URL",
            f"HTTPS://localhost/{name}": "is a URL",
            f"ftp://localhost/{name}": "is a URL",
            f"concat:{name}": "does not exist",
            f"subfile,,start,0,end,9,,:{name}": "does not exist",
            f"pipe:0{name}": "does not exist",
            f"~/{name}": "does not exist",
            "~root": "does not exist",
            f"%2e%2e/outside/{name}": "does not exist",
            f"..%2foutside%2f{name}": "does not exist",
            f"..\\outside\\{name}": "does not exist",
            f"$HOME/{name}": "does not exist",
            f"{name}/more": "cannot be read|does not exist",
            "missing." + tail: "does not exist",
            "nested": "is a folder",
            ".": "is a folder",
            "a" * 5000: "cannot be read",
            "a/" * 5000 + name: "cannot be read|does not exist",
        }
        for source, expect in escapes.items():
            shown = source.replace(str(folder), "…")
            yield Case(about(kind, source), expect, f"{kind} at {shown[:60]!r}, {len(shown)} characters")


def files(root: Path, random_: random.Random) -> Iterator[Case]:
    suffixes = {"image": "png", "audio": "wav", "video": "mp4"}
    unread = {
        "image": "not an image",
        "audio": "cannot be decoded as audio",
        "video": "cannot be decoded as a video",
    }
    texts = {
        "words": b"This is not what the name says. " * 40,
        "html": b"<!doctype html><html><body>404 not found</body></html>",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
        "pdf": b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        "zeros": bytes(5000),
        "noise": random_.randbytes(5000),
        "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        "one byte": b"\x89",
    }
    for kind, tail in suffixes.items():
        for name, data in texts.items():
            (root / f"{name}.{tail}").write_bytes(data)
            yield Case(
                about(kind, f"{name}.{tail}"), f"{unread[kind]}|cannot be read", f"{kind} that is {name}"
            )
        (root / f"empty.{tail}").touch()
        yield Case(about(kind, f"empty.{tail}"), "is empty", f"{kind} of no bytes")
        os.mkfifo(root / f"pipe.{tail}")
        yield Case(about(kind, f"pipe.{tail}"), "a pipe, socket or device", f"{kind} that is a pipe")
        (root / f"folder.{tail}").mkdir()
        yield Case(about(kind, f"folder.{tail}"), "is a folder", f"{kind} that is a folder")
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(root)  # the path of a socket has at most 107 bytes
        try:
            listener.bind("socket.png")
        finally:
            os.chdir(here)
    yield Case(about("image", "socket.png"), "a pipe, socket or device", "image that is a socket")
    others = {"good.wav": "image", "good.mp4": "image", "good.png": "audio", "good.jpg": "video"}
    for source, kind in others.items():
        yield Case(about(kind, source), unread[kind], f"{source} as {kind}")
    yield Case(about("video", "good.wav"), "no video stream|cannot be decoded", "good.wav as video")
    yield from _truncated(root, random_)
    yield from _bombs(root)
    yield from _bad_audio(root)
    yield from _bad_video(root)


def _truncated(root: Path, random_: random.Random) -> Iterator[Case]:
    # A file that lacks only its last bytes may be whole as far as a decoder can tell.
    for name, kind, cuts in (
        ("good.png", "image", 25),
        ("good.jpg", "image", 25),
        ("good.webp", "image", 10),
        ("good.gif", "image", 8),
        ("good.bmp", "image", 8),
        ("good.tif", "image", 8),
        ("good.mp4", "video", 15),
        ("fast.mp4", "video", 10),
        ("good.flac", "audio", 8),
    ):
        data = (root / name).read_bytes()
        stem, tail = name.split(".")
        for cut in sorted(random_.sample(range(1, len(data) * 8 // 10), cuts)):
            (root / f"{stem}-{cut}.{tail}").write_bytes(data[:cut])
            yield Case(about(kind, f"{stem}-{cut}.{tail}"), f"{kind} .*{stem}-{cut}", f"{name} cut at {cut}")


def _png(width: int, height: int, pixels: bytes, depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _bombs(root: Path) -> Iterator[Case]:
    claims = {
        "60000 squared": (60_000, 60_000),
        "wide": (2**31 - 1, 1),
        "tall": (1, 2**31 - 1),
        "just too large": (2**14, 2**13 + 1),
        "overflow": (2**16, 2**16),
    }
    for name, size in claims.items():
        (root / f"bomb {name}.png").write_bytes(_png(*size, zlib.compress(bytes(100))))
        yield Case(about("image", f"bomb {name}.png"), "pixels|exceeds limit", f"png claims {name}")
    (root / "bomb.png").write_bytes(_png(15_000, 15_000, zlib.compress(bytes(15_000 * 15_000), 1)))
    yield Case(about("image", "bomb.png"), "pixels|exceeds limit", "png that unpacks to 215 MiB")
    (root / "none.png").write_bytes(_png(0, 5, zlib.compress(b"")))
    yield Case(about("image", "none.png"), "image 'none.png'", "png of width 0")
    (root / "short.png").write_bytes(_png(500, 500, zlib.compress(bytes(100))))
    yield Case(about("image", "short.png"), "truncated|broken", "png with too few pixels")
    (root / "broken.png").write_bytes(_png(5, 5, b"\x78\x9cgarbage"))
    yield Case(about("image", "broken.png"), "broken|truncated|cannot be read", "png with broken pixels")
    (root / "colour.png").write_bytes(_png(5, 5, zlib.compress(bytes(100)), depth=3, colour=9))
    yield Case(about("image", "colour.png"), "image 'colour.png'", "png of no colour type")
    good = (root / "good.png").read_bytes()
    flipped = bytearray(good)
    flipped[20] ^= 0xFF
    (root / "flipped.png").write_bytes(flipped)
    yield Case(about("image", "flipped.png"), "image 'flipped.png'", "png with a flipped bit")
    text = zlib.compress(bytes(2**24), 1)
    chunk = png_chunk(b"zTXt", b"note\0\0" + text)
    (root / "text bomb.png").write_bytes(good[:33] + chunk + good[33:])
    yield Case(about("image", "text bomb.png"), "too large", "png with a text of 16 MiB")
    for tail, data in {
        "bmp": b"BM"
        + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "gif": b"GIF89a" + struct.pack("<HHBBB", 60_000, 60_000, 0, 0, 0) + b",",
        "ppm": b"P6 60000 60000 255\n",
    }.items():
        (root / f"bomb.{tail}").write_bytes(data + bytes(50))
        yield Case(
            about("image", f"bomb.{tail}"), "pixels|exceeds limit|bomb.gif", f"{tail} claims 60000 squared"
        )
    yield Case(about("image", "float.tif"), "32 bits", "tif of floats")


def _wav(rate: int, channels: int, data: bytes, format_: int = 1, bits: int = 16) -> bytes:
    size = channels * bits // 8
    header = struct.pack("<HHIIHH", format_, channels, rate, rate * size & 0xFFFFFFFF, size & 0xFFFF, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + header + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _bad_audio(root: Path) -> Iterator[Case]:
    def floats(*values: float) -> bytes:
        quiet = [0.0] * 800  # so that it is not too short to be heard
        return struct.pack(f"<{800 + len(values)}f", *quiet, *values)

    nan, inf = float("nan"), float("inf")
    cases = {
        "nan": (_wav(16_000, 1, floats(0, nan, 0), 3, 32), "NaN or infinity"),
        "all nan": (_wav(16_000, 1, floats(*[nan] * 500)[-2000:], 3, 32), "NaN or infinity"),
        "infinity": (_wav(16_000, 1, floats(0, inf, 0), 3, 32), "NaN or infinity"),
        "minus infinity": (_wav(8_000, 1, floats(0, -inf), 3, 32), "NaN or infinity"),
        "nan in one of two": (_wav(16_000, 2, floats(0, 0, 0, nan), 3, 32), "NaN or infinity"),
        "infinities that cancel": (_wav(16_000, 2, floats(inf, -inf), 3, 32), "NaN or infinity"),
        "no samples": (_wav(16_000, 1, b""), "no audio samples|cannot be decoded"),
        "rate 0": (_wav(0, 1, bytes(100)), "sampling rate|cannot be decoded"),
        "rate 1": (_wav(1, 1, bytes(100)), "sampling rate 1 Hz"),
        "rate 999": (_wav(999, 1, bytes(100)), "sampling rate 999 Hz"),
        "rate 1e9": (_wav(1_000_000_000, 1, bytes(100)), "sampling rate 1000000000 Hz"),
        "rate 2^31": (_wav(2**31, 1, bytes(100)), "sampling rate|cannot be decoded"),
        "no channels": (_wav(16_000, 0, bytes(100)), "channels|cannot be decoded"),
        "500 channels": (_wav(16_000, 500, bytes(2000)), "channels"),
        "200 bits": (_wav(16_000, 1, bytes(100), 1, 200), "cannot be decoded"),
        "unknown coding": (_wav(16_000, 1, bytes(100), 0x7777), "cannot be decoded"),
        "header only": (_wav(16_000, 1, b"")[:30], "cannot be decoded|no audio samples"),
    }
    for name, (data, expect) in cases.items():
        (root / f"{name}.wav").write_bytes(data)
        yield Case(about("audio", f"{name}.wav"), expect, f"wav with {name}")
    yield Case(about("audio", "long.flac"), "lasts 18000 s", "flac of five hours")


def _bad_video(root: Path) -> Iterator[Case]:
    # The video beside the folder is a good one: a playlist that is followed is not refused.
    beyond = "../outside/good.mp4"
    lists = {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{beyond}\n#EXT-X-ENDLIST\n",
        "hls of a good file": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\ngood.mp4\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile {beyond}\n",
        "concat of a good file": "ffconcat version 1.0\nfile good.mp4\n",
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
        "dash": f'<?xml version="1.0"?><MPD><Period><BaseURL>{beyond}</BaseURL></Period></MPD>',
    }
    for name, text in lists.items():
        for tail in ("mp4", "m3u8"):
            (root / f"{name}.{tail}").write_text(text)
            yield Case(about("video", f"{name}.{tail}"), "cannot be decoded as a video", f"{name} in .{tail}")
    yield Case(
        about("video", "huge.avi"),
        "12000 × 12000 pixels|cannot be decoded",
        "avi claims 12000 squared",
    )
    yield Case(about("video", "lies.avi"), "by its header", "avi promises more frames than it has")
    yield Case(
        about("video", "tail.avi"), "by its header|cannot be decoded|damaged", "avi with zeros for frames"
    )
