"""Files that cannot be read at random, as JSON lines: arrays of JSON, CSV, and what is compressed.

All is read as a stream, a block at a time, so that no file is in memory as a whole.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from .jsonl import MAX_LINE_BYTES
from .plain_json import parse_json

BLOCK = 2**20
LINES = (".jsonl", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}
COMPRESSED = (".gz", ".zst")
OF_NUMBERS = "+-.eE0123456789"
KINDS = (*LINES, ".json", *TABLES)


def suffixes(path: str) -> tuple[str, str]:
    """What a file is by its name, and how it is compressed: `.jsonl` and `.gz` of `a.jsonl.gz`."""
    name = Path(path)
    packed = name.suffix.lower()
    if packed not in COMPRESSED:
        return packed, ""
    return Path(name.stem).suffix.lower(), packed


def is_lines(path: str) -> bool:
    """Whether a `.json` file has one record a line, as many have; ValueError if it has neither that nor an
    array of records.
    """
    with open(path, "rb") as file:
        return _is_lines(_Text(file))


def json_lines(path: str) -> Iterator[bytes]:
    """The records of a file as JSON lines, in blocks of bytes."""
    kind, packed = suffixes(path)
    try:
        with _opened(path, packed) as stream:
            if kind in TABLES:
                yield from _rows(stream, TABLES[kind])
            elif kind == ".json":
                yield from _array(_Text(stream))
            else:
                while block := stream.read(BLOCK):
                    yield block
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _opened(path: str, packed: str) -> Any:
    if packed == ".gz":
        return gzip.open(path, "rb")
    return _zstd(path) if packed == ".zst" else open(path, "rb")


def _zstd(path: str) -> Any:
    try:
        return import_module("zstandard").open(path, "rb")
    except ImportError:
        pass
    try:  # comes with the extra `datasets`
        return import_module("pyarrow").input_stream(path, compression="zstd")
    except ImportError:
        raise ValueError("to read .zst, pip install 'seqbraid[zstd]', or unpack the file") from None


class _Text:
    """The text of a stream, of which only what is looked at is kept."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text = ""
        self.place = 0
        self.before = 0
        """Characters of the file before `text`."""
        self.ended = False

    def read(self) -> None:
        """Read on: as much again as is there, so that a long record is not looked through too often."""
        block = self._stream.read(max(BLOCK, len(self.text) - self.place))
        self.before += self.place
        try:
            self.text = self.text[self.place :] + self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 after character {self.before}: {error.reason}") from None
        self.place, self.ended = 0, not block

    def next(self) -> str:
        """The next character that is no white space, which stays; nothing at the end."""
        while True:
            rest = self.text[self.place : self.place + BLOCK].lstrip(" \t\r\n")
            if rest:
                self.place = self.text.index(rest[0], self.place)
                return rest[0]
            self.place = min(len(self.text), self.place + BLOCK)
            if self.place == len(self.text):
                if self.ended:
                    return ""
                self.read()

    def refusal(self, what: str) -> ValueError:
        return ValueError(f"not JSON: {what} at character {self.before + self.place}")


def _is_lines(text: _Text) -> bool:
    first = text.next()
    if first in ("[", ""):
        return False
    while "\n" not in text.text[text.place :] and not text.ended and len(text.text) < MAX_LINE_BYTES:
        text.read()
    try:
        parse_json(text.text[text.place :].split("\n", 1)[0])
    except ValueError:
        raise ValueError(
            "a .json file is an array of records ([{…}, {…}]) or has one record a line; this one begins "
            f"with {text.text[text.place : text.place + 40]!r}"
        ) from None
    return True


def _array(text: _Text) -> Iterator[bytes]:
    """The elements of an array, each on a line of its own; what is in them is judged when they are read."""
    if _is_lines(text):
        while text.text:
            yield text.text[text.place :].encode()
            text.place = len(text.text)
            text.read()
        return
    scan = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode
    if not text.next():
        return
    text.place += 1
    while (found := text.next()) != "]":
        end = _element_end(text, scan)
        # White space but for that in strings, which cannot hold it as it is.
        yield text.text[text.place : end].replace("\n", " ").replace("\r", " ").encode() + b"\n"
        text.place = end
        if (found := text.next()) == ",":
            text.place += 1
            if text.next() == "]":
                raise text.refusal("a record is missing after a comma")
        elif found != "]":
            raise text.refusal("a comma or the end of the array is missing")
    text.place += 1
    if text.next():
        raise text.refusal("more follows after the array")


def _element_end(text: _Text, scan: Any) -> int:
    while True:
        try:
            end: int = scan(text.text, text.place)[1]
            # A number may go on where the text stops: of "-0." what is before the point is one already.
            if text.ended or (end < len(text.text) and text.text[end] not in OF_NUMBERS):
                return end
        except json.JSONDecodeError as error:
            if text.ended:
                text.place = error.pos
                raise text.refusal(error.msg.removesuffix(" at")) from None
        except RecursionError:
            raise text.refusal("nested too deep") from None
        if len(text.text) - text.place > MAX_LINE_BYTES:
            raise text.refusal(f"no end of a record within {MAX_LINE_BYTES} characters")
        text.read()


def _rows(stream: BinaryIO, delimiter: str) -> Iterator[bytes]:
    """The rows of a table as objects, by the names in its first row; all values are strings."""
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        reader = csv.reader(
            io.TextIOWrapper(stream, "utf-8-sig", newline=""), strict=True, delimiter=delimiter
        )
        names = next(reader, [])
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(f"the first row names the columns, each by another name; it is {names[:8]}")
        for row in reader:
            if len(row) not in (0, len(names)):
                raise ValueError(
                    f"the row that ends on line {reader.line_num} has {len(row)} values, but there are "
                    f"{len(names)} columns; quote values that hold a {delimiter!r} or a line's end"
                )
            if row:
                yield json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False).encode() + b"\n"
    except csv.Error as error:
        raise ValueError(f"no CSV on line {reader.line_num}: {error}") from None
    finally:
        csv.field_size_limit(limit)
