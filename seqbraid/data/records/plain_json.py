"""JSON that holds nothing but what JSON can say."""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from typing import Any

MAX_DEPTH = 64
"""How deep values may be nested: far more than a conversation needs, far less than a template can recurse."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


def show(value: Any) -> str:
    """A short form of any value, for messages."""
    try:
        return f"{_repr.repr(value)} ({type(value).__name__})"
    except ValueError:  # an integer too long to be written in decimal
        return f"a value of type {type(value).__name__}"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; `ValueError` for anything that is not one, or not one without doubt."""
    try:
        # Decoded here, since `json` would take bytes for UTF-16 or UTF-32 where they look like it.
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # some of its messages end in it, others do not
        raise ValueError(f"not JSON: {what} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def check_plain(value: Any) -> None:
    """Refuse what JSON or UTF-8 cannot hold, and what is nested deeper than `MAX_DEPTH`."""
    # Without recursion: the depth is one of the things to be checked.
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"the record is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, str):
            _check_text(item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise ValueError(f"the record holds {item}; numbers are finite")
        elif isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise ValueError(f"the record has the key {show(key)}; keys are strings")
                _check_text(key)
            waiting += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            waiting += [(inner, depth + 1) for inner in item]
        elif item is not None and not isinstance(item, int):
            raise ValueError(
                f"the record holds {show(item)}; values are strings, numbers, booleans, "
                "null, lists and objects"
            )


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the record holds the lone surrogate {text[error.start]!a}, which is not a character; repair "
            "the text's encoding"
        ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        times = Counter(key for key, _ in pairs)
        twice = next(key for key in value if times[key] > 1)
        raise ValueError(f"an object has the key {show(twice)} twice")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"not JSON: {name} is not a JSON number")
