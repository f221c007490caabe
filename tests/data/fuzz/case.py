"""A case of the corpus, and how its record is written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def line(record: Any) -> bytes:
    return json.dumps(record).encode()


def part(kind: str, source: Any, **options: Any) -> dict[str, Any]:
    return {"type": kind, kind: source, **options}


def talk(content: Any, answer: Any = "A cat.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def about(kind: str, source: Any, **options: Any) -> bytes:
    return line(talk([part(kind, source, **options), {"type": "text", "text": "What is it?"}]))
