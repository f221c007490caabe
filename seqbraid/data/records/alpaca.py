"""Alpaca: `instruction`, `input`, `output`, with `system`, `history` and media as LLaMA-Factory has them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .conversation import MEDIA_KEYS, Conversation, RawMessage, conversation_of, history_turns
from .known_keys import known_keys
from .plain_json import show

NEEDED = ("instruction", "output")
KEYS = (*NEEDED, "input", "system", "history", "tools", *MEDIA_KEYS)


def parse_alpaca(record: Mapping[str, Any], ignored: Collection[str] = ()) -> Conversation:
    """The conversation of a record: the user says the instruction and, on the next line, the input.

    >>> talk = parse_alpaca({"instruction": "Add.", "input": "1 and 2", "output": "3"})
    >>> [(turn.role, turn.parts) for turn in talk.turns]
    [('user', ('Add.\\n1 and 2',)), ('assistant', ('3',))]
    """
    said = known_keys(record, KEYS, ignored, "the record")
    return conversation_of(said, _messages(said))


def _messages(said: Mapping[str, Any]) -> Iterator[RawMessage]:
    yield from history_turns(said)
    for key in ("instruction", "input", "output"):
        if not isinstance(said.get(key, ""), str):
            raise ValueError(f"{key} is a string, not {show(said[key])}")
    asked = [said[key] for key in ("instruction", "input") if key in said]
    yield "instruction", "user", {"content": "\n".join(asked)}
    yield "output", "assistant", {"content": said.get("output", "")}
