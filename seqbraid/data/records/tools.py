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


def parse_tool_calls(calls: Any, role: str, where: str) -> list[Mapping[str, Any]]:
    """The calls of a message, with arguments as objects; refused is what chat templates could not write."""
    if role != "assistant":
        raise ValueError(f"{where} stands on a {role} turn; only assistant turns call tools")
    if not isinstance(calls, list):
        raise ValueError(f"{where} is a list, not {show(calls)}")
    return [_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def calls_of_text(text: Any, where: str) -> list[Mapping[str, Any]]:
    """The calls that a `tool_call` or `function_call` turn spells: the JSON of one, or of a list."""
    if not isinstance(text, str):
        raise ValueError(f"{where} is a string with the JSON of a call, not {show(text)}")
    try:
        calls = parse_json(text)
        check_plain(calls)
    except ValueError as error:
        raise ValueError(
            f'{where} is the JSON of a call, {{"name": …, "arguments": …}}, or of a list of them: {error}'
        ) from None
    calls = calls if isinstance(calls, list) else [calls]
    named = [{"type": "function", "function": call} if _is_bare(call) else call for call in calls]
    return parse_tool_calls(named, "assistant", where)


def _is_bare(call: Any) -> bool:
    return isinstance(call, dict) and "function" not in call


def _call(call: Any, where: str) -> Mapping[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError(f'{where} is {{"function": {{"name": …, "arguments": …}}}}, not {show(call)}')
    given = inner.get("arguments", {})
    if isinstance(given, str):
        inner = {**inner, "arguments": _arguments(given, where)}
        return {**call, "function": inner} if "function" in call else inner
    if not isinstance(given, dict):
        raise ValueError(f"{where}: arguments is an object or a JSON string, not {show(given)}")
    return dict(call)


def _arguments(text: str, where: str) -> dict[str, Any]:
    """Arguments as OpenAI writes them, JSON in a string; an empty one is of a call without arguments."""
    try:
        found = parse_json(text) if text.strip() else {}
        check_plain(found)
    except ValueError as error:
        raise ValueError(f"{where}: arguments is a string that is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: arguments is the JSON of an object, not of {show(found)}")
    return found
