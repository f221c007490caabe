"""Plain text for continued pretraining: `{"text": "…"}`, one document a record."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .known_keys import known_keys
from .plain_json import check_plain, show

KEYS = ("text",)


@dataclass(frozen=True)
class Document:
    """A text, every token of which is a label."""

    text: str


def parse_document(record: Mapping[str, Any], ignored: Collection[str] = ()) -> Document:
    """The document of a record.

    >>> parse_document({"text": "The sky is blue."})
    Document(text='The sky is blue.')
    """
    text = (known_keys(record, KEYS, ignored, "the record") or record)["text"]
    check_plain(text)
    if not isinstance(text, str):
        raise ValueError(f"text is a string, not {show(text)}")
    if not text.strip():
        raise ValueError("text is empty, so there is nothing to train on; leave the record out")
    return Document(text)
