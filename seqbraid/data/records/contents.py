"""What a source consists of, file by file, so that it can be said which file is another than before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .jsonl import digest

MOST = 500
"""Files that are told apart; of a source of more, nothing is said of single ones."""
NAMED = 3

Contents = dict[str, str]
"""Fingerprints by name, in the order of the files."""


def contents(source: Any) -> Contents:
    """The fingerprint of each file, with how its records are read, and the weights of what is mixed."""
    found: Contents = {}
    for name, fingerprint in _files(source):
        found[name if name not in found else f"{name} ({len(found)})"] = fingerprint
        if len(found) > MOST:
            return {}
    weights = getattr(source, "weights", None)
    return found if weights is None else {**found, "": str(weights)}


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What is otherwise than before, in words; empty where nothing is known.

    >>> describe_changes({"a.jsonl": "1", "b.jsonl": "2"}, {"b.jsonl": "3", "c.jsonl": "4"})
    'b.jsonl changed; a.jsonl is missing; c.jsonl is new'
    """
    if not (before and now):
        return ""
    was, has = ({name: found for name, found in of.items() if name} for of in (before, now))
    said = []
    for names, what in (
        ([name for name in was if name in has and has[name] != was[name]], "changed"),
        ([name for name in was if name not in has], "{is} missing"),
        ([name for name in has if name not in was], "{is} new"),
    ):
        if names:
            more = f" and {len(names) - NAMED} more" if names[NAMED:] else ""
            verb = "are" if len(names) > 1 else "is"
            said.append(f"{', '.join(names[:NAMED])}{more} {what.replace('{is}', verb)}")
    if not said and list(was) != list(has):
        said.append("the files are in another order")
    if before.get("") != now.get(""):
        said.append(f"the weights are {now.get('', 'none')}, were {before.get('', 'none')}")
    return "; ".join(said)


def _files(source: Any) -> Iterator[tuple[str, str]]:
    inner, options = getattr(source, "source", None), getattr(source, "options", None)
    if hasattr(source, "sources"):
        for one in source.sources:
            yield from _files(one)
    elif inner is not None and options is not None:
        how = json.dumps([options.format, options.system, sorted(options.ignore_keys)])
        yield from ((name, digest([fingerprint, how])) for name, fingerprint in _files(inner))
    else:
        yield str(getattr(source, "name", "the data")), source.fingerprint
