"""The tools an assistant may call, and its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .plain_json import check_plain, parse_json, show


def parse_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools of a record, which are a list or, as some write them, the JSON text of one."""
    if tools is None or tools == "":
        return ()
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
            check_plain(tools)
        except ValueError as error:
            raise ValueError(f"tools is a string that is not JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools is a list of objects, not {show(tools)}")
    return tuple(tools)


def check_tool_calls(calls: Any, role: str, where: str) -> None:
    """Refuse calls that chat templates could not write."""
    if role != "assistant":
        raise ValueError(f"{where} stands on a {role} turn; only assistant turns call tools")
    if not isinstance(calls, list):
        raise ValueError(f"{where} is a list, not {show(calls)}")
    for number, call in enumerate(calls):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise ValueError(
                f'{where}[{number}] is {{"function": {{"name": …, "arguments": …}}}}, not {show(call)}'
            )
        if not isinstance(inner.get("arguments", {}), dict | str):
            raise ValueError(
                f"{where}[{number}]: arguments is an object or a JSON string, not {show(inner['arguments'])}"
            )
