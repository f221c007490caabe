"""YAML that is looked at before it is read: what a parser takes in silence is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CHECKED = "checked yaml"
"""The mode of a jsonargparse parser that reads its files and values so."""


def use_checked_yaml() -> str:
    """Make the mode known to jsonargparse, in which whatever it reads is checked: files and values alike."""
    import yaml  # jsonargparse brings it
    from jsonargparse import get_loader, set_loader

    read = get_loader("yaml")

    def load(text: str, path: str = "") -> Any:  # jsonargparse hands over what is called `path`
        return _load(read, text, str(path))

    set_loader(CHECKED, load, (yaml.YAMLError,))
    return CHECKED


def check_yaml(text: str, name: str) -> None:
    """Refuse a key that is given twice, and aliases, of which a few lines can fill the memory."""
    import yaml

    anchors = set[str]()
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent) and event.anchor in anchors:
            raise ValueError(
                f"{_place(name, event)} has the YAML alias *{event.anchor}; write the value instead"
            )
        if isinstance(event, yaml.NodeEvent) and event.anchor:
            anchors.add(event.anchor)
    waiting = [yaml.compose(text)]  # an alias of nothing, such as the glob *.jsonl, is refused by this
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            seen = set[str]()
            for key, value in node.value:
                if str(key.value) in seen:
                    raise ValueError(f"{_place(name, key)} has {key.value!r} twice; keep one")
                seen.add(str(key.value))
                waiting.append(value)


def _load(read: Callable[[str], Any], text: str, path: str) -> Any:
    import yaml

    try:
        check_yaml(text, path)
        found = read(text)
    except yaml.YAMLError as error:
        if not path:  # a value of the command line, which may be text that is no YAML
            raise
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if path and not isinstance(found, dict):
        raise ValueError(
            f"{path} has no settings: it is to have lines of `key: value`, and has {str(found)[:40]!r}"
        )
    return found


def _place(name: str, found: Any) -> str:
    """File and line of a YAML event or node, or the text of an option."""
    line = found.start_mark.line + 1
    return f"{name}:{line}" if name else f"line {line} of an option's value or file"
