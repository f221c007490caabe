"""The formats of records, in one table: which one a record has, and what is said of one that fits none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any, Literal, get_args

from . import alpaca, prompt_completion, tokens
from .conversation import RECORD_KEYS, TURN_KEYS, Conversation, parse_conversation
from .documents import Document, parse_document
from .known_keys import is_absent, refuse_preferences
from .plain_json import show
from .prompt_completion import Completion
from .tokens import Tokens

__all__ = ["FORMATS", "FormatName", "Parsed", "check_ignored", "parse_record"]

Parsed = Conversation | Document | Completion | Tokens
FormatName = Literal[
    "auto", "messages", "sharegpt", "query_response", "prompt_completion", "alpaca", "text", "tokens"
]


@dataclass(frozen=True)
class Format:
    """How a record is written."""

    needs: tuple[str, ...]
    """The keys by which a record of this format is known, all of which it has."""
    parse: Callable[[Mapping[str, Any], Collection[str]], Parsed]
    """Of a record and the keys that are not read."""
    also: tuple[str, ...] = ()
    """Other keys that only this format reads."""


FORMATS: dict[FormatName, Format] = {
    "messages": Format(("messages",), parse_conversation),
    "sharegpt": Format(("conversations",), parse_conversation),
    "query_response": Format(("response",), parse_conversation),
    "prompt_completion": Format(prompt_completion.NEEDED, prompt_completion.parse_prompt_completion),
    "alpaca": Format(alpaca.NEEDED, alpaca.parse_alpaca, ("input",)),
    "text": Format(("text",), parse_document),
    "tokens": Format(("input_ids",), tokens.parse_tokens, tokens.OPTIONAL),
}

MEANT = {
    "messages": ("dialog", "dialogue", "chat", "turns"),
    "response": ("answer", "assistant", "reply"),
    "completion": ("target", "continuation"),
    "text": ("content", "document", "body"),
    "input_ids": ("tokens", "token_ids", "ids"),
}
"""Keys that are none of ours, by what they are likely meant for."""

NOT_TO_IGNORE = {*RECORD_KEYS, *TURN_KEYS, "role", "content", "from", "value"}
"""Keys of conversations, which say what has labels. A key by which another format is known may be ignored: a
record with it is then not of that format.
"""


def parse_record(record: Any, ignored: Collection[str] = (), name: FormatName = "auto") -> Parsed:
    """Check a record and bring it to the form of its format: the one named, else the one it has the keys of.

    >>> parse_record({"text": "The sky is blue."})
    Document(text='The sky is blue.')
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"a record is a JSON object, not {show(record)}")
    refuse_preferences(record, ignored, "the record")
    found = _format_of(record, ignored, name)
    for key in FORMATS[found].also:
        if key in ignored and not is_absent(record.get(key)):
            raise ValueError(
                f"data.ignore_keys has {key}, which records of the format {found} use; remove it"
            )
    return FORMATS[found].parse(record, ignored)


def check_ignored(keys: Iterable[str], option: str = "data") -> frozenset[str]:
    """The keys that are to be ignored, none of which may be one that is read."""
    found = frozenset([keys] if isinstance(keys, str) else keys)
    if read := sorted(found & NOT_TO_IGNORE):
        raise ValueError(
            f"{option}.ignore_keys has {', '.join(read)}, which is used; remove it from the list"
        )
    return found


def check_format(name: str, option: str = "data.format") -> None:
    """Refuse a name that no format has."""
    if name not in get_args(FormatName):
        near = get_close_matches(str(name), get_args(FormatName), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{option}={name!r} is no format; valid are {', '.join(get_args(FormatName))}{hint}")


def _format_of(record: Mapping[str, Any], ignored: Collection[str], name: FormatName) -> FormatName:
    there = [key for key in record if key not in ignored and record[key] is not None]
    said = [key for key in there if not is_absent(record[key])]
    # What is empty is there, if nothing else is: it is then what is wrong with the record.
    for keys in (said, there):
        fits = [found for found, format_ in FORMATS.items() if set(format_.needs) <= set(keys)]
        if name in fits or (name == "auto" and len({FORMATS[found].parse for found in fits}) == 1):
            return fits[0] if name == "auto" else name
        if len(fits) > 1 and name == "auto":
            raise ValueError(
                f"the record has the keys of {' and of '.join(f'{one} ({_needs(one)})' for one in fits)}; "
                "name one format as data.format, and what is not to be read in data.ignore_keys"
            )
    raise ValueError(_no_format(there, name))


def _no_format(keys: list[Any], name: FormatName) -> str:
    found = ", ".join(show(key)[:60] for key in islice(keys, 8)) or "no key"
    found += f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    if name != "auto":
        return (
            f"the record is not of the format {name} ({_needs(name)}): it has {found}{_missing(name, keys)}"
        )
    nearest = max(FORMATS, key=lambda one: _nearness(one, keys))
    near = f"; the nearest format is {nearest} ({_needs(nearest)}){_missing(nearest, keys)}"
    every = ", ".join(f"{one} ({_needs(one)})" for one in FORMATS)
    near = near if _nearness(nearest, keys) else ""
    return f"the record fits no format: it has {found}{near}; formats are {every}"


def _nearness(name: FormatName, keys: list[Any]) -> float:
    """The part of a format's keys that is there; a key written otherwise counts in part."""
    needs = FORMATS[name].needs
    return sum(1.0 if key in keys else 0.45 if _alike(key, keys) else 0.0 for key in needs) / len(needs)


def _missing(name: FormatName, keys: list[Any]) -> str:
    lacks = [key for key in FORMATS[name].needs if key not in keys]
    said = [
        f"`{key}`" + "".join(f" (is {near!r} meant for it?)" for near in _alike(key, keys)) for key in lacks
    ]
    return f", of which {' and '.join(said)} {'is' if len(said) == 1 else 'are'} missing" if said else ""


def _alike(key: str, keys: list[Any]) -> list[str]:
    words = [one for one in keys if isinstance(one, str) and len(one) < 60]
    meant = [one for one in words if one.lower() in MEANT.get(key, ())]
    return get_close_matches(key, words, 1, 0.7) or meant[:1]


def _needs(name: FormatName) -> str:
    return ", ".join(f"`{key}`" for key in FORMATS[name].needs)
