"""Which keys of a record and of its turns are read; any other that says something is refused by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from .plain_json import show

RATED = ("chosen", "rejected")
"""How keys of preference data begin: `rejected_response`, `chosen`, `rejected_messages`, …"""
LABELS = ("label", "kto_tag")
"""Say of a record in KTO's form whether it is a good one."""


def is_absent(value: Any) -> bool:
    """Whether a value says nothing: Arrow tables fill in null, writers of JSON lines `""`, `[]` or `{}`."""
    if isinstance(value, Mapping):
        return all(inner is None for inner in value.values())
    return value is None or (isinstance(value, str | list | tuple) and not value)


def known_keys(
    item: Mapping[Any, Any], known: Collection[str], ignored: Collection[str], where: str
) -> dict[str, Any]:
    """What an object says under the keys that are read; `where` names it in the refusal of any other."""
    found = {}
    for key, value in item.items():
        if key in known:
            if not is_absent(value):
                found[key] = value
        elif key not in ignored and not is_absent(value):
            raise ValueError(_unknown(key, value, known, where))
    return found


def refuse_preferences(item: Mapping[Any, Any], ignored: Collection[str], where: str) -> None:
    """Refuse preference data, whose answers must not all be trained on."""
    for key, value in item.items():
        rates = isinstance(key, str) and (key in LABELS or key.startswith(RATED))
        if rates and key not in ignored and not is_absent(value):
            raise ValueError(
                f"{where} has the key {key[:60]!r}, so it is preference data (DPO, KTO), which `seqbraid "
                "train` does not support: supervised training would train on rejected answers too. "
                "examples/losses/dpo.py trains on it; or keep the chosen answers only, or, if all answers "
                "may be trained on, list the key in data.ignore_keys"
            )


MEANT = {"prompt": "query", "instruction": "query", "question": "query", "functions": "tools"}
"""What a key that is not known is likely meant for."""


def _unknown(key: Any, value: Any, known: Collection[str], where: str) -> str:
    near = get_close_matches(key, known, 1) if isinstance(key, str) else []
    if isinstance(key, str) and MEANT.get(key) in known:
        near = [MEANT[key]]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"{where} has the unknown key {show(key)[:80]}, which is {show(value)}{hint}; known are "
        f"{', '.join(known)}; list ids and metadata that may be ignored in data.ignore_keys"
    )
