"""Prompt and completion, in TRL's words: two strings, or two lists of messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .conversation import LOSS_KEYS, MEDIA_KEYS, Conversation, RawMessage, conversation_of, listed_turns
from .known_keys import known_keys
from .plain_json import check_plain, show

NEEDED = ("prompt", "completion")
KEYS = (*NEEDED, "system", "tools", *MEDIA_KEYS)


@dataclass(frozen=True)
class Completion:
    """Two texts that follow each other without a chat template; the loss covers the second."""

    prompt: str
    completion: str


def parse_prompt_completion(
    record: Mapping[str, Any], ignored: Collection[str] = ()
) -> Completion | Conversation:
    """The texts of a record, or its conversation, of which the completion's assistant turns have loss.

    >>> parse_prompt_completion({"prompt": "The sky is", "completion": " blue."})
    Completion(prompt='The sky is', completion=' blue.')
    """
    prompt, completion = (record.get(key) for key in NEEDED)
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ValueError(
            f"prompt is {show(prompt)}, completion is {show(completion)}; give two strings or two lists of "
            "messages"
        )
    if isinstance(prompt, list):
        said = known_keys(record, KEYS, ignored, "the record")
        return conversation_of(said, _messages(prompt, completion, ignored))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ValueError(f"prompt is a string or a list of messages, not {show(prompt)}")
    check_plain([*known_keys(record, NEEDED, ignored, "the record").values()])
    if not completion:
        raise ValueError("completion is empty, so there is nothing to train on; leave the record out")
    return Completion(prompt, completion)


def _messages(prompt: Any, completion: Any, ignored: Collection[str]) -> Iterator[RawMessage]:
    for where, role, message in listed_turns(prompt, "prompt", ignored):
        for key in LOSS_KEYS:
            if message.get(key):
                raise ValueError(
                    f"{where}.{key} is {show(message[key])}, but the loss does not cover a prompt; put the "
                    "turn into `completion`, or give the whole as `messages`"
                )
        kept = {key: value for key, value in message.items() if key not in LOSS_KEYS}
        yield where, role, {**kept, "loss": False}
    yield from listed_turns(completion, "completion", ignored)
