"""Malformed records and media, each with the reason for which it must be refused."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.media import png_chunk, write_good, write_media

ANSWER = {"role": "assistant", "content": "A cat."}
QUESTION = {"role": "user", "content": "What is it?"}


@dataclass(frozen=True)
class Case:
    """A line of a JSONL file and what the refusal must say."""

    record_line: bytes
    expect: str
    """A regular expression, searched for in the error's text."""
    name: str


def media_root(folder: Path) -> Path:
    """The folder below which the corpus's media are; what lies beside it must never be opened."""
    return folder / "media"


def make_corpus(folder: Path, seed: int = 0) -> list[Case]:
    """Write the media below `folder` and give the cases, whose names are unique."""
    random_ = random.Random(seed)
    root = media_root(folder)
    root.mkdir(parents=True)
    write_media(root)
    cases = [
        *_not_json(random_),
        *_wrong_types(),
        *_wrong_turns(),
        *_wrong_media(),
        *_paths(folder),
        *_files(root, random_),
    ]
    assert len({case.name for case in cases}) == len(cases), "two cases share a name"
    assert not any(b"\n" in case.record_line or not case.record_line.strip() for case in cases)
    return cases


def good_records() -> list[dict[str, Any]]:
    """Records of every style with every kind of media, all of which must be read."""
    return [
        {"messages": [QUESTION, ANSWER]},
        {"messages": [{"role": "user", "content": "<image>What?"}, ANSWER], "images": ["good.png"]},
        {
            "messages": [QUESTION, ANSWER],
            "images": ["good.jpg"],
            "audios": ["good.wav"],
            "videos": "good.mp4",
        },
        {
            "conversations": [{"from": "human", "value": "<audio>?"}, {"from": "gpt", "value": "x"}],
            "audios": "good.wav",
        },
        {"query": "<video>?", "response": "x", "videos": [{"path": "good.mp4", "fps": 2}]},
        {
            "messages": [
                {"role": "user", "content": [_part("image", "good.webp"), {"type": "text", "text": "?"}]},
                ANSWER,
            ]
        },
    ]


def _line(record: Any) -> bytes:
    return json.dumps(record).encode()


def _part(kind: str, source: Any, **options: Any) -> dict[str, Any]:
    return {"type": kind, kind: source, **options}


def _talk(content: Any, answer: Any = "A cat.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def _about(kind: str, source: Any, **options: Any) -> bytes:
    return _line(_talk([_part(kind, source, **options), {"type": "text", "text": "What is it?"}]))


def _not_json(random_: random.Random) -> Iterator[Case]:
    whole = json.dumps({**_talk("Wie heißt das? 猫 🐈"), "id": 7}, ensure_ascii=False).encode()
    for cut in sorted(random_.sample(range(1, len(whole)), 40)):
        yield Case(whole[:cut], "not JSON|not UTF-8", f"json cut at {cut}")
    good = _line(_talk("?"))
    broken = {
        "trailing comma": good[:-1] + b",}",
        "single quotes": good.replace(b'"', b"'"),
        "comment": good + b" // note",
        "two values": good + good,
        "bare word": b"{messages: []}",
        "control character": good.replace(b"?", b"\x01"),
        "raw tab in text": good.replace(b"?", b"a\tb"),
        "bad escape": good.replace(b"?", b"\\x41"),
        "byte order mark inside": b"{" + b"\xef\xbb\xbf" + good[1:],
        "python literal": b"{'messages': None}",
        "text": b"hello",
        "csv": b"question,answer",
        "only a bracket": b"[",
    }
    for name, line in broken.items():
        yield Case(line, "not JSON", f"json {name}")
    for constant in ("NaN", "Infinity", "-Infinity"):
        yield Case(
            good[:-1] + f', "weight": {constant}}}'.encode(), "is not a JSON number", f"json {constant}"
        )
    encodings = {
        "0xff": good.replace(b"?", b"\xff"),
        "cut sequence": good.replace(b"?", b"\xc3("),
        "coded surrogate": good.replace(b"?", b"\xed\xa0\x80"),
        "overlong": good.replace(b"?", b"\xc0\xaf"),
        "latin-1": good.replace(b"?", "é".encode("latin-1")),
        "beyond unicode": good.replace(b"?", b"\xf5\x80\x80\x80"),
        "utf-16 mark": b"\xff\xfe" + good,
    }
    for name, line in encodings.items():
        yield Case(line, "not UTF-8", f"utf8 {name}")
    yield Case(good.decode().encode("utf-16-le").replace(b"\n", b""), "not JSON", "utf-16")
    yield Case(b"[" * 200_000 + b"]" * 200_000, "nested too deep|deeper|JSON object", "deep lists")
    yield Case(b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested too deep|deeper", "deep objects")
    deep = b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}"
    yield Case(deep, "deeper than|is an object with", "deep messages")
    yield Case(
        _line(_talk("?"))[:-1] + b', "tools": ' + b"[" * 90 + b"]" * 90 + b"}", "deeper than", "deep tools"
    )
    yield Case(
        good[:-1] + b', "tools": "' + b"[" * 9000 + b'"}', "tools is a string", "deep tools in a string"
    )
    yield Case(good[:-1] + b', "messages": []}', "twice", "key twice")
    yield Case(good.replace(b'"role"', b'"role": "user", "role"', 1), "twice", "role twice")
    yield Case(b'{"messages": ' + b"1" * 5000 + b"}", "Exceeds the limit|not JSON", "number of 5000 digits")
    yield Case(good.replace(b"?", b"\\ud800"), "surrogate", "lone surrogate")
    yield Case(good.replace(b"?", b"\\udc80x"), "surrogate", "lone low surrogate")
    yield Case(good.replace(b'"role"', b'"\\udfff": 1, "role"', 1), "surrogate", "surrogate in a key")
    yield Case(good[:-1] + b', "tools": [{"a": 1e999}]}', "finite", "infinite number")


WRONG: dict[str, Any] = {
    "null": None,
    "int": 5,
    "float": 1.5,
    "bool": True,
    "object": {"a": 1},
    "list of int": [5],
    "list of null": [None],
    "list of list": [["text"]],
}


def _wrong_types() -> Iterator[Case]:
    for name, value in {**WRONG, "string": "x", "empty list": []}.items():
        if name != "object":
            yield Case(_line(value), "JSON object", f"record is {name}")
        for style in ("messages", "conversations"):
            expect = (
                "has none of them"
                if value is None
                else rf"{style}(\[0\])? is (a list|an object)|{style}\[0\]"
            )
            yield Case(_line({style: value}), expect, f"{style} is {name}")
    yield Case(b"{}", "has none of them", "record is empty")
    yield Case(b'{"text": "a book"}', "has none of them", "record has text only")
    for name, value in WRONG.items():
        content = name.startswith("list")
        yield Case(
            _line(_talk(value)),
            "string or a list" if not content else r"content\[0\] is an",
            f"user content {name}",
        )
        yield Case(
            _line(_talk("?", value)),
            "string or a list" if not content else r"content\[0\] is an",
            f"answer {name}",
        )
        yield Case(
            _line({"conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "x"}]}),
            "value is a string",
            f"value {name}",
        )
        yield Case(
            _line({"messages": [{"role": value, "content": "x"}]}),
            "role is .*valid are system",
            f"role {name}",
        )
        yield Case(
            _line({"conversations": [{"from": value, "value": "x"}]}), "from is .*valid are", f"from {name}"
        )
        yield Case(
            _line(_talk([{"type": value, "text": "x"}])), "type is .*valid are text", f"part type {name}"
        )
        yield Case(_line(_talk([{"type": "text", "text": value}])), "text is a string", f"part text {name}")
        if value is not None:
            yield Case(_line(_talk([_part("image", value)])), "is a path or URL", f"part image {name}")
            yield Case(
                _line({**_talk("?"), "images": value}), r"images.* is (a|a list of) path", f"images {name}"
            )
            yield Case(_line({**_talk("?"), "tools": value}), "tools is a list", f"tools {name}")
            yield Case(_line({**_talk("?"), "system": value}), "system is a string", f"system {name}")
            yield Case(_line({"query": "?", "response": value}), "response", f"response {name}")
            yield Case(_line({"query": "?", "response": "x", "history": value}), "history", f"history {name}")
            message = {**ANSWER, "reasoning_content": value}
            yield Case(_line({"messages": [QUESTION, message]}), "reasoning_content is", f"reasoning {name}")
            yield Case(
                _line({"messages": [QUESTION, {**ANSWER, "tool_calls": value}]}),
                "tool_calls",
                f"tool calls {name}",
            )
        if name not in ("null", "bool"):
            yield Case(
                _line({"messages": [QUESTION, {**ANSWER, "loss": value}]}),
                "loss is true or false",
                f"loss {name}",
            )


def _wrong_turns() -> Iterator[Case]:
    for role in ("asistant", "Assistant", "USER", "human", "gpt", "bot", "model", "", "tool_call", "user "):
        record = {"messages": [{"role": role, "content": "x"}, ANSWER]}
        yield Case(_line(record), "role is .*valid are system, developer, user", f"unknown role {role!r}")
    near = {"messages": [QUESTION, {"role": "asistant", "content": "x"}]}
    yield Case(_line(near), "did you mean 'assistant'", "near role")
    for role in ("humman", "chatgpt", "Human", "bing", "function_call"):
        record = {"conversations": [{"from": role, "value": "x"}, {"from": "gpt", "value": "x"}]}
        yield Case(_line(record), "from is .*valid are system, human", f"unknown from {role!r}")
    for name, answer in {
        "empty": "",
        "blank": " \n\t",
        "no part": [],
        "blank part": [{"type": "text", "text": " "}],
    }.items():
        yield Case(_line(_talk("?", answer)), "without text", f"{name} answer")
    system = {"role": "system", "content": "Be kind."}
    tool = {"role": "tool", "content": "5"}
    orders = {
        "system last": ([QUESTION, ANSWER, system], "system message must come first"),
        "system in the middle": ([QUESTION, system, ANSWER], "system message must come first"),
        "two systems": ([system, system, QUESTION, ANSWER], "system message must come first"),
        "tool first": ([tool, QUESTION, ANSWER], "tool result"),
        "tool after user": ([QUESTION, tool, ANSWER], "tool result"),
        "only a question": ([QUESTION], "nothing to train on"),
        "only a system": ([system], "nothing to train on"),
        "nothing learnt": ([QUESTION, {**ANSWER, "loss": False}], "nothing to train on"),
        "nothing learnt, 0": ([QUESTION, {**ANSWER, "loss": 0}], "nothing to train on"),
        "weight 0": ([QUESTION, {**ANSWER, "weight": 0}], "nothing to train on"),
        "user learnt": ([{**QUESTION, "loss": True}, ANSWER], "only assistant turns"),
        "system learnt": ([{**system, "loss": 1}, QUESTION, ANSWER], "only assistant turns"),
        "loss is a word": ([QUESTION, {**ANSWER, "loss": "no"}], "true or false"),
        "loss is two": ([QUESTION, {**ANSWER, "loss": 2}], "true or false"),
        "loss and weight": ([QUESTION, {**ANSWER, "loss": True, "weight": 1}], "both `loss` and `weight`"),
        "loss scale": ([QUESTION, {**ANSWER, "loss_scale": 0.5}], "loss_scale is not supported"),
        "user calls a tool": ([{**QUESTION, "tool_calls": [{}]}, ANSWER], "only the assistant calls"),
        "loss and train": ([QUESTION, {**ANSWER, "loss": 1, "train": True}], "both `loss` and `train`"),
        "train false": ([QUESTION, {**ANSWER, "train": False}], "nothing to train on"),
        "turn's unknown key": ([QUESTION, {**ANSWER, "los": False}], "'los'.*did you mean 'loss'"),
        "turn is rejected": ([QUESTION, {**ANSWER, "rejected": True}], "unknown key 'rejected'"),
        "call without name": ([QUESTION, {**ANSWER, "tool_calls": [{"function": {}}]}], "tool_calls"),
        "call with wrong arguments": (
            [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "arguments is",
        ),
    }
    for name, (messages, expect) in orders.items():
        yield Case(_line({"messages": messages}), expect, f"turns: {name}")
    for key, value in {
        "rejected_response": "y", "rejected": [ANSWER], "chosen": "y", "label": False,
        "rejected_images": ["a"],
    }.items():  # fmt: skip
        yield Case(_line({**_talk("?"), key: value}), f"'{key}', so it is preference", f"preference {key}")
        if key != "label":
            yield Case(_line({"prompt": "?", key: value}), "preference data", f"{key} alone")
    yield Case(_line({**_talk("?"), "imagse": ["a"]}), "'imagse'.*did you mean 'image", "unknown key imagse")
    yield Case(_line({**_talk("?"), "id": 0}), "'id'.*known are messages.*ignore_keys", "unknown key id")
    yield Case(_line({**_talk("?"), "x" * 10**6: 0}), "unknown key 'xxx", "unknown key of a million letters")
    yield Case(_line({**_talk("?"), "response": "y"}), "`messages` and `response`", "messages and response")
    yield Case(
        _line({**_talk("?"), "history": [["a", "b"]]}), "`messages` and `history`", "messages and history"
    )
    yield Case(
        _line({**_talk("?"), "image": "a", "images": ["a"]}), "both `images` and `image`", "image twice"
    )
    both = {**_talk("?"), "conversations": [{"from": "human", "value": "x"}]}
    yield Case(_line(both), "`messages` and `conversations`", "both styles")
    yield Case(
        _line({**_talk("?"), "messages": [system, QUESTION, ANSWER], "system": "x"}),
        "both `system`",
        "system twice",
    )
    yield Case(_line({"query": "?"}), "has none of them", "query only")
    yield Case(_line({"query": "?", "response": ""}), "without text", "empty response")
    yield Case(
        _line({"query": "?", "response": "x", "history": [["a"]]}), r"history\[0\] is", "history of one"
    )
    yield Case(_line({**_talk("?"), "tools": "{not json"}), "tools is a string", "tools not json")


def _wrong_media() -> Iterator[Case]:
    names = {
        "image": ("images", "good.png"),
        "video": ("videos", "good.mp4"),
        "audio": ("audios", "good.wav"),
    }
    for kind, (key, source) in names.items():
        for markers, items in ((1, 0), (3, 0), (1, 2), (2, 1), (2, 5), (4, 3)):
            record = {**_talk(f"<{kind}>" * markers + "?"), key: [source] * items}
            expect = f"{markers} <{kind}> markers and {items} items in `{key}`"
            yield Case(_line(record), expect, f"{markers} markers, {items} of {key}")
        part = {**_talk([{"type": kind}, {"type": "text", "text": "?"}])}
        yield Case(_line(part), f"1 <{kind}> markers and 0 items", f"{kind} part without source")
        system = {"messages": [{"role": "system", "content": [_part(kind, source)]}, QUESTION, ANSWER]}
        yield Case(_line(system), "system turn with media", f"{kind} for the system")
        answer = {"messages": [QUESTION, {"role": "assistant", "content": [_part(kind, source)]}]}
        yield Case(_line(answer), "without text", f"{kind} as the answer")
        nobody = {"messages": [ANSWER], key: [source]}
        yield Case(_line(nobody), "before the first user turn", f"{kind} without a user")
        yield Case(_about(kind, f"data:{kind}/x;base64,AAAA"), "inline", f"inline {kind}")
        yield Case(_line({**_talk("?"), key: [{"bytes": "AAAA"}]}), "inline", f"{kind} bytes")
        yield Case(
            _line({**_talk("?"), key: [{"path": source, "url": source}]}), "is a path", f"{kind} path and url"
        )
        yield Case(_line({**_talk("?"), key: [""]}), "is a path or URL", f"{kind} empty path")
        yield Case(_about(kind, source, detail=7), "unknown option", f"{kind} unknown option")
        url = {"type": f"{kind}_url", f"{kind}_url": {}}
        yield Case(_line(_talk([url])), "is a path or URL", f"{kind}_url without url")
        yield Case(_line(_talk([_part(kind, source, url=source)])), "keep one", f"{kind} with two sources")
    options = {"zero": 0, "negative": -1, "word": "2", "bool": True, "huge": 1e300, "list": [2]}
    for name, value in options.items():
        yield Case(_about("video", "good.mp4", fps=value), "fps is a positive number", f"fps {name}")
        yield Case(
            _about("image", "good.png", max_pixels=value), "max_pixels is a positive", f"max_pixels {name}"
        )
    yield Case(_about("image", "good.png", max_pixels=3.5), "whole number", "half a pixel")
    yield Case(
        _line(_talk([{"type": "input_audio", "input_audio": {"data": "AAAA"}}])),
        "inline audio",
        "input_audio",
    )
    yield Case(_line(_talk([_part("video", ["a.png", "b.png"])])), "video is one file", "video of frames")
    for type_ in ("img", "txt", "image_urls", "file", "tool_result", "Text", ""):
        yield Case(
            _line(_talk([{"type": type_, "text": "x"}])), "type is .*valid are text", f"part type {type_!r}"
        )


def _paths(folder: Path) -> Iterator[Case]:
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
            str(root / name): leaves,
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
            yield Case(_about(kind, source), expect, f"{kind} at {shown[:60]!r}, {len(shown)} characters")


def _files(root: Path, random_: random.Random) -> Iterator[Case]:
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
                _about(kind, f"{name}.{tail}"), f"{unread[kind]}|cannot be read", f"{kind} that is {name}"
            )
        (root / f"empty.{tail}").touch()
        yield Case(_about(kind, f"empty.{tail}"), "is empty", f"{kind} of no bytes")
        os.mkfifo(root / f"pipe.{tail}")
        yield Case(_about(kind, f"pipe.{tail}"), "a pipe, socket or device", f"{kind} that is a pipe")
        (root / f"folder.{tail}").mkdir()
        yield Case(_about(kind, f"folder.{tail}"), "is a folder", f"{kind} that is a folder")
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(root)  # the path of a socket has at most 107 bytes
        try:
            listener.bind("socket.png")
        finally:
            os.chdir(here)
    yield Case(_about("image", "socket.png"), "a pipe, socket or device", "image that is a socket")
    others = {"good.wav": "image", "good.mp4": "image", "good.png": "audio", "good.jpg": "video"}
    for source, kind in others.items():
        yield Case(_about(kind, source), unread[kind], f"{source} as {kind}")
    yield Case(_about("video", "good.wav"), "no video stream|cannot be decoded", "good.wav as video")
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
            yield Case(_about(kind, f"{stem}-{cut}.{tail}"), f"{kind} .*{stem}-{cut}", f"{name} cut at {cut}")


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
        yield Case(_about("image", f"bomb {name}.png"), "pixels|exceeds limit", f"png claims {name}")
    (root / "bomb.png").write_bytes(_png(15_000, 15_000, zlib.compress(bytes(15_000 * 15_000), 1)))
    yield Case(_about("image", "bomb.png"), "pixels|exceeds limit", "png that unpacks to 215 MiB")
    (root / "none.png").write_bytes(_png(0, 5, zlib.compress(b"")))
    yield Case(_about("image", "none.png"), "image 'none.png'", "png of width 0")
    (root / "short.png").write_bytes(_png(500, 500, zlib.compress(bytes(100))))
    yield Case(_about("image", "short.png"), "truncated|broken", "png with too few pixels")
    (root / "broken.png").write_bytes(_png(5, 5, b"\x78\x9cgarbage"))
    yield Case(_about("image", "broken.png"), "broken|truncated|cannot be read", "png with broken pixels")
    (root / "colour.png").write_bytes(_png(5, 5, zlib.compress(bytes(100)), depth=3, colour=9))
    yield Case(_about("image", "colour.png"), "image 'colour.png'", "png of no colour type")
    good = (root / "good.png").read_bytes()
    flipped = bytearray(good)
    flipped[20] ^= 0xFF
    (root / "flipped.png").write_bytes(flipped)
    yield Case(_about("image", "flipped.png"), "image 'flipped.png'", "png with a flipped bit")
    text = zlib.compress(bytes(2**24), 1)
    chunk = png_chunk(b"zTXt", b"note\0\0" + text)
    (root / "text bomb.png").write_bytes(good[:33] + chunk + good[33:])
    yield Case(_about("image", "text bomb.png"), "too large", "png with a text of 16 MiB")
    for tail, data in {
        "bmp": b"BM"
        + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "gif": b"GIF89a" + struct.pack("<HHBBB", 60_000, 60_000, 0, 0, 0) + b",",
        "ppm": b"P6 60000 60000 255\n",
    }.items():
        (root / f"bomb.{tail}").write_bytes(data + bytes(50))
        yield Case(
            _about("image", f"bomb.{tail}"), "pixels|exceeds limit|bomb.gif", f"{tail} claims 60000 squared"
        )
    yield Case(_about("image", "float.tif"), "32 bits", "tif of floats")


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
        yield Case(_about("audio", f"{name}.wav"), expect, f"wav with {name}")
    yield Case(_about("audio", "long.flac"), "lasts 18000 s", "flac of five hours")


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
            yield Case(
                _about("video", f"{name}.{tail}"), "cannot be decoded as a video", f"{name} in .{tail}"
            )
    yield Case(
        _about("video", "huge.avi"),
        "12000 × 12000 pixels|cannot be decoded",
        "avi claims 12000 squared",
    )
    yield Case(_about("video", "lies.avi"), "by its header", "avi promises more frames than it has")
    yield Case(
        _about("video", "tail.avi"), "by its header|cannot be decoded|damaged", "avi with zeros for frames"
    )
