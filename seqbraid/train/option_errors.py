"""What jsonargparse says of an option that cannot be used, in words of a user's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

_KEY = r"(?:Parser key \"(?P<key>[\w.]+)\": )"
_CHOICES = re.compile(
    rf"{_KEY}Expected a typing\.Literal\[(?P<choices>.*?)\]\. Got value: (?P<value>.*)", re.DOTALL
)
_TYPES = {"float": "a number", "int": "a whole number", "bool": "true or false", "NoneType": "null"}
_TYPE = re.compile(r"Expected a <class '(\w+)'>")


def explain(message: str, valid: Sequence[str]) -> str:
    """An error of jsonargparse's with the choices, or the nearest valid name of one that is unknown."""
    message = " ".join(message.split())
    if found := _CHOICES.search(message):
        choices = ", ".join(re.findall(r"'([^']*)'", found["choices"]))
        return f"{found['key']}={found['value']} is unknown; use one of {choices}"
    types = [_TYPES.get(name, name) for name in _TYPE.findall(message)]
    if types and (found := re.search(rf"{_KEY}.*(?:Got|Given) value: (?P<value>.*)", message)):
        return f"{found['key']}={found['value']} cannot be used; give {' or '.join(types)}"
    unknown = re.search(r"unrecognized arguments: (.*)", message)
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    top = re.search(r"Option '([\w.]+)' is not accepted", message)
    if unknown:
        names = [part.lstrip("-").split("=")[0] for part in unknown[1].split() if part.startswith("-")]
    elif group:
        names = [f"{group[1]}.{group[2]}"]
    elif top:
        names = [top[1]]
    else:
        return re.sub(r'^Parser key "config": ', "", message)
    hints = [f"{name} is unknown{_nearest(name, valid)}" for name in names]
    return "; ".join(hints) or message


def _nearest(name: str, valid: Sequence[str]) -> str:
    if name.rsplit(".", 1)[-1] == "learning_rate":
        return "; did you mean train.lr?"
    close = difflib.get_close_matches(name, valid, 1, 0.5)
    if not close:  # the right name in the wrong group
        last = {key.rsplit(".", 1)[-1]: key for key in valid}
        found = difflib.get_close_matches(name.rsplit(".", 1)[-1], last, 1, 0.6)
        close = [last[part] for part in found]
    return f"; did you mean {close[0]}?" if close else f"; valid are {', '.join(valid)}"
