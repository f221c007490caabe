"""What a turn says: texts, media, and markers that stand for media listed beside the messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, get_args

from .plain_json import show

MediaKind = Literal["image", "video", "audio"]

LIST_OF_KIND: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "audios"}

OPTIONS: dict[MediaKind, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels", "resized_height", "resized_width"),
    "video": (
        *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
        *("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"),
    ),
    "audio": (),
}
"""How an item may be asked to be read, in the words of Qwen's tools."""

LARGEST_OPTION = 2**40

PART_TYPES: dict[str, MediaKind] = {
    f"{kind}{tail}": kind for kind in get_args(MediaKind) for tail in ("", "_url")
}

_MARKER = re.compile("<(image|video|audio)>")


@dataclass(frozen=True)
class MediaRef:
    """A picture, video or sound that a turn refers to, not opened yet."""

    kind: MediaKind
    source: str
    """As the record has it: a path below the media folder, a URL, or a `data:` URI with the file in it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How to read it, as the record asks: `max_pixels`, `fps`, …; see `OPTIONS`."""


@dataclass(frozen=True)
class Marker:
    """The place of an item that stands in a list beside the messages."""

    kind: MediaKind
    options: Mapping[str, Any] = field(default_factory=dict)


Part = str | MediaRef | Marker


def parse_content(
    content: Any, kinds_listed: Set[MediaKind], where: str, may_be_absent: bool = False
) -> list[Part]:
    """The parts of a message's content, which is a text or a list of parts.

    A text is searched for markers of every kind. The text of a *part* is searched only for the kinds in
    `kinds_listed`, those whose list the record has: so a literal `<video>` can be said, as in HTML.
    """
    if content is None and may_be_absent:
        return []
    if isinstance(content, str):
        return _split(content, LIST_OF_KIND.keys())
    if not isinstance(content, list):
        raise ValueError(f"{where} is a string or a list of parts, not {show(content)}")
    parts: list[Part] = []
    for number, part in enumerate(content):
        parts += _parse_part(part, kinds_listed, f"{where}[{number}]")
    return parts


def listed_media(items: Any, kind: MediaKind, where: str) -> list[MediaRef]:
    """The items of `images`, `videos` or `audios`."""
    if items is None:
        return []
    if isinstance(items, str | dict):
        items = [items]
    if not isinstance(items, list):
        raise ValueError(f"{where} is a list of paths, not {show(items)}")
    return [_listed_item(item, kind, f"{where}[{number}]") for number, item in enumerate(items)]


def _listed_item(item: Any, kind: MediaKind, where: str) -> MediaRef:
    if isinstance(item, dict):
        item = _without_null(item)
        if "bytes" in item:
            raise ValueError(
                f"{where} holds the {kind} inline (`bytes`); write it to a file and give its path"
            )
        sources = [key for key in ("path", "url", kind) if key in item]
        if len(sources) != 1:
            raise ValueError(f'{where} is a path, {{"path": …}} or {{"url": …}}, not {show(item)}')
        return MediaRef(kind, _source(item[sources[0]], kind, where), _options(item, kind, {*sources}, where))
    return MediaRef(kind, _source(item, kind, where))


def _parse_part(part: Any, kinds_listed: Set[MediaKind], where: str) -> list[Part]:
    if not isinstance(part, dict):
        raise ValueError(f'{where} is an object such as {{"type": "text", "text": …}}, not {show(part)}')
    part = _without_null(part)
    type_ = part.get("type")
    if type_ == "text":
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}.text is a string, not {show(part.get('text'))}")
        return _split(part["text"], kinds_listed)
    if type_ == "input_audio":
        return [_inline_audio(part.get("input_audio"), where)]
    if not isinstance(type_, str) or type_ not in PART_TYPES:
        near = get_close_matches(type_, ["text", *PART_TYPES], 1) if isinstance(type_, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}.type is {show(type_)}; valid are text, {', '.join(PART_TYPES)}{hint}")
    kind = PART_TYPES[type_]
    # `url` and `path` are how Hugging Face's chat templates write it.
    sources = [key for key in dict.fromkeys((type_, kind, "url", "path")) if key in part]
    if len(sources) > 1:
        raise ValueError(f"{where} has {' and '.join(f'`{key}`' for key in sources)}; keep one")
    options = _options(part, kind, {"type", "text", *sources}, where)
    if not sources:
        return [Marker(kind, options)]
    source = part[sources[0]]
    if isinstance(source, dict):
        source = source.get("url")
    return [MediaRef(kind, _source(source, kind, f"{where}.{sources[0]}"), options)]


def _split(text: str, kinds: Set[MediaKind]) -> list[Part]:
    """Cut a text at its markers of these kinds."""
    parts: list[Part] = []
    start = 0
    for found in _MARKER.finditer(text):
        if found[1] in kinds:
            parts += [text[start : found.start()], Marker(found[1])]  # type: ignore[arg-type]
            start = found.end()
    return [part for part in [*parts, text[start:]] if part != ""]


def _source(source: Any, kind: MediaKind, where: str) -> str:
    if isinstance(source, list) and kind == "video":
        raise ValueError(f"{where} is a list; a video is one file here, so join the frames into one")
    if not isinstance(source, str) or not source:
        raise ValueError(f"{where} is a path or URL, not {show(source)}")
    return source


def _inline_audio(audio: Any, where: str) -> MediaRef:
    """A sound as OpenAI has it, as a data URI."""
    if not isinstance(audio, dict) or not isinstance(audio.get("data"), str):
        raise ValueError(f'{where}.input_audio is {{"data": base64, "format": …}}, not {show(audio)}')
    return MediaRef("audio", f"data:audio/{audio.get('format', '')};base64,{audio['data']}")


def _options(item: Mapping[str, Any], kind: MediaKind, known: Set[str], where: str) -> dict[str, Any]:
    options = {key: value for key, value in item.items() if key not in known}
    for key, value in options.items():
        if key not in OPTIONS[kind]:
            valid = f"valid are {', '.join(OPTIONS[kind])}" if OPTIONS[kind] else f"{kind} takes none"
            raise ValueError(f"{where} has the unknown option {show(key)}; {valid}")
        lowest = 0 if key.startswith("video_") else 1e-6
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not lowest <= value <= LARGEST_OPTION
        ):
            raise ValueError(f"{where}.{key} is a positive number, not {show(value)}")
        if key != "fps" and not key.startswith("video_") and value != int(value):
            raise ValueError(f"{where}.{key} is a whole number, not {show(value)}")
    return options


def _without_null(item: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that are null, with which Arrow tables fill structs."""
    return {key: value for key, value in item.items() if value is not None}
