"""Malformed lines, records and turns."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from .case import ANSWER, QUESTION, Case, about, line, part, talk

WRONG: dict[str, Any] = {
    "null": None,
    "int": 5,
    "float": 1.5,
    "bool": True,
    "object": {"a": 1},
    "list of int": [5],
    "list of null": [None],
    "list of list": [["text"]],
}


def not_json(random_: random.Random) -> Iterator[Case]:
    whole = json.dumps({**talk("Wie heißt das? 猫 🐈"), "id": 7}, ensure_ascii=False).encode()
    for cut in sorted(random_.sample(range(1, len(whole)), 40)):
        yield Case(whole[:cut], "not JSON|not UTF-8", f"json cut at {cut}")
    good = line(talk("?"))
    broken = {
        "trailing comma": good[:-1] + b",}",
        "single quotes": good.replace(b'"', b"'"),
        "comment": good + b" // note",
        "two values": good + good,
        "bare word": b"{messages: []}",
        "control character": good.replace(b"?", b"\x01"),
        "raw tab in text": good.replace(b"?", b"a\tb"),
        "bad escape": good.replace(b"?", b"\\x41"),
        "byte order mark inside": b"{" + b"\xef\xbb\xbf" + good[1:],
        "python literal": b"{'messages': None}",
        "text": b"hello",
        "csv": b"question,answer",
        "only a bracket": b"[",
    }
    for name, text in broken.items():
        yield Case(text, "not JSON", f"json {name}")
    for constant in ("NaN", "Infinity", "-Infinity"):
        yield Case(
            good[:-1] + f', "weight": {constant}}}'.encode(), "is not a JSON number", f"json {constant}"
        )
    encodings = {
        "0xff": good.replace(b"?", b"\xff"),
        "cut sequence": good.replace(b"?", b"\xc3("),
        "coded surrogate": good.replace(b"?", b"\xed\xa0\x80"),
        "overlong": good.replace(b"?", b"\xc0\xaf"),
        "latin-1": good.replace(b"?", "é".encode("latin-1")),
        "beyond unicode": good.replace(b"?", b"\xf5\x80\x80\x80"),
        "utf-16 mark": b"\xff\xfe" + good,
    }
    for name, text in encodings.items():
        yield Case(text, "not UTF-8", f"utf8 {name}")
    yield Case(good.decode().encode("utf-16-le").replace(b"\n", b""), "not JSON", "utf-16")
    yield Case(b"[" * 200_000 + b"]" * 200_000, "nested too deep|deeper|JSON object", "deep lists")
    yield Case(b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested too deep|deeper", "deep objects")
    deep = b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}"
    yield Case(deep, "deeper than|is an object with", "deep messages")
    yield Case(
        line(talk("?"))[:-1] + b', "tools": ' + b"[" * 90 + b"]" * 90 + b"}", "deeper than", "deep tools"
    )
    yield Case(
        good[:-1] + b', "tools": "' + b"[" * 9000 + b'"}', "tools is a string", "deep tools in a string"
    )
    yield Case(good[:-1] + b', "messages": []}', "twice", "key twice")
    yield Case(good.replace(b'"role"', b'"role": "user", "role"', 1), "twice", "role twice")
    yield Case(b'{"messages": ' + b"1" * 5000 + b"}", "Exceeds the limit|not JSON", "number of 5000 digits")
    yield Case(good.replace(b"?", b"\\ud800"), "surrogate", "lone surrogate")
    yield Case(good.replace(b"?", b"\\udc80x"), "surrogate", "lone low surrogate")
    yield Case(good.replace(b'"role"', b'"\\udfff": 1, "role"', 1), "surrogate", "surrogate in a key")
    yield Case(good[:-1] + b', "tools": [{"a": 1e999}]}', "finite", "infinite number")


def wrong_types() -> Iterator[Case]:
    for name, value in {**WRONG, "string": "x", "empty list": []}.items():
        if name != "object":
            yield Case(line(value), "JSON object", f"record is {name}")
        for style in ("messages", "conversations"):
            expect = (
                "fits no format" if value is None else rf"{style}(\[0\])? is (a list|an object)|{style}\[0\]"
            )
            yield Case(line({style: value}), expect, f"{style} is {name}")
    yield Case(b"{}", "fits no format: it has no key", "record is empty")
    for name, value in WRONG.items():
        content = name.startswith("list")
        yield Case(
            line(talk(value)),
            "string or a list" if not content else r"content\[0\] is an",
            f"user content {name}",
        )
        yield Case(
            line(talk("?", value)),
            "string or a list" if not content else r"content\[0\] is an",
            f"answer {name}",
        )
        yield Case(
            line({"conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "x"}]}),
            "value is a string",
            f"value {name}",
        )
        yield Case(
            line({"messages": [{"role": value, "content": "x"}]}),
            "role is .*valid are system",
            f"role {name}",
        )
        yield Case(
            line({"conversations": [{"from": value, "value": "x"}]}), "from is .*valid are", f"from {name}"
        )
        yield Case(
            line(talk([{"type": value, "text": "x"}])), "type is .*valid are text", f"part type {name}"
        )
        yield Case(line(talk([{"type": "text", "text": value}])), "text is a string", f"part text {name}")
        if value is not None:
            yield Case(line(talk([part("image", value)])), "is a path or URL", f"part image {name}")
            yield Case(
                line({**talk("?"), "images": value}), r"images.* is (a|a list of) path", f"images {name}"
            )
            yield Case(line({**talk("?"), "tools": value}), "tools is a list", f"tools {name}")
            yield Case(line({**talk("?"), "system": value}), "system is a string", f"system {name}")
            yield Case(line({"query": "?", "response": value}), "response", f"response {name}")
            yield Case(line({"query": "?", "response": "x", "history": value}), "history", f"history {name}")
            message = {**ANSWER, "reasoning_content": value}
            yield Case(line({"messages": [QUESTION, message]}), "reasoning_content is", f"reasoning {name}")
            yield Case(
                line({"messages": [QUESTION, {**ANSWER, "tool_calls": value}]}),
                "tool_calls",
                f"tool calls {name}",
            )
        if name not in ("null", "bool"):
            yield Case(
                line({"messages": [QUESTION, {**ANSWER, "loss": value}]}),
                "loss is (true or false|.* give 0 or 1)",
                f"loss {name}",
            )


def wrong_turns() -> Iterator[Case]:
    for role in ("asistant", "Assistant", "USER", "human", "gpt", "bot", "model", "", "toolcall", "user "):
        record = {"messages": [{"role": role, "content": "x"}, ANSWER]}
        yield Case(line(record), "role is .*valid are system, developer, user", f"unknown role {role!r}")
    said = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "x"}]
    yield Case(line({"messages": said}), "rename `messages` to `conv", "ShareGPT's messages")
    yield Case(line({"conversations": [QUESTION, ANSWER]}), "to `messages`", "OpenAI's conversations")
    near = {"messages": [QUESTION, {"role": "asistant", "content": "x"}]}
    yield Case(line(near), "did you mean 'assistant'", "near role")
    for role in ("humman", "chatgpt", "Human", "bing", "function call"):
        record = {"conversations": [{"from": role, "value": "x"}, {"from": "gpt", "value": "x"}]}
        yield Case(line(record), "from is .*valid are system, human", f"unknown from {role!r}")
    for name, answer in {
        "empty": "",
        "blank": " \n\t",
        "no part": [],
        "blank part": [{"type": "text", "text": " "}],
    }.items():
        yield Case(line(talk("?", answer)), "without text", f"{name} answer")
    system = {"role": "system", "content": "Be kind."}
    tool = {"role": "tool", "content": "5"}
    orders = {
        "system last": ([QUESTION, ANSWER, system], "system message must come first"),
        "system in the middle": ([QUESTION, system, ANSWER], "system message must come first"),
        "two systems": ([system, system, QUESTION, ANSWER], "system message must come first"),
        "tool first": ([tool, QUESTION, ANSWER], "tool result"),
        "tool after user": ([QUESTION, tool, ANSWER], "tool result"),
        "only a question": ([QUESTION], "nothing to train on"),
        "only a system": ([system], "nothing to train on"),
        "nothing learnt": ([QUESTION, {**ANSWER, "loss": False}], "nothing to train on"),
        "nothing learnt, 0": ([QUESTION, {**ANSWER, "loss": 0}], "nothing to train on"),
        "weight 0": ([QUESTION, {**ANSWER, "weight": 0}], "nothing to train on"),
        "user learnt": ([{**QUESTION, "loss": True}, ANSWER], "only assistant turns"),
        "system learnt": ([{**system, "loss": 1}, QUESTION, ANSWER], "only assistant turns"),
        "loss is a word": ([QUESTION, {**ANSWER, "loss": "no"}], "true or false"),
        "loss is two": ([QUESTION, {**ANSWER, "loss": 2}], "give 0 or 1"),
        "loss and weight": ([QUESTION, {**ANSWER, "loss": True, "weight": 1}], "both `loss` and `weight`"),
        "loss scale": ([QUESTION, {**ANSWER, "loss_scale": 0.5}], "loss_scale is not supported"),
        "user calls a tool": ([{**QUESTION, "tool_calls": [{}]}, ANSWER], "only assistant turns call tools"),
        "loss and train": ([QUESTION, {**ANSWER, "loss": 1, "train": True}], "both `loss` and `train`"),
        "train false": ([QUESTION, {**ANSWER, "train": False}], "nothing to train on"),
        "turn's unknown key": ([QUESTION, {**ANSWER, "los": False}], "'los'.*did you mean 'loss'"),
        "turn is rejected": ([QUESTION, {**ANSWER, "rejected": True}], "unknown key 'rejected'"),
        "call without name": ([QUESTION, {**ANSWER, "tool_calls": [{"function": {}}]}], "tool_calls"),
        "call with wrong arguments": (
            [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "arguments is",
        ),
    }
    for name, (messages, expect) in orders.items():
        yield Case(line({"messages": messages}), expect, f"turns: {name}")
    for key, value in {
        "rejected_response": "y", "rejected": [ANSWER], "chosen": "y", "label": False,
        "rejected_images": ["a"],
    }.items():  # fmt: skip
        yield Case(line({**talk("?"), key: value}), f"'{key}', so it is preference", f"preference {key}")
        if key != "label":
            yield Case(line({"prompt": "?", key: value}), "preference data", f"{key} alone")
    yield Case(line({**talk("?"), "imagse": ["a"]}), "'imagse'.*did you mean 'image", "unknown key imagse")
    yield Case(line({**talk("?"), "id": 0}), "'id'.*known are messages.*ignore_keys", "unknown key id")
    yield Case(line({**talk("?"), "x" * 10**6: 0}), "unknown key 'xxx", "unknown key of a million letters")
    yield Case(line({**talk("?"), "response": "y"}), "`messages` and `response`", "messages and response")
    yield Case(
        line({**talk("?"), "history": [["a", "b"]]}), "`messages` and `history`", "messages and history"
    )
    yield Case(line({**talk("?"), "image": "a", "images": ["a"]}), "both `images` and `image`", "image twice")
    both = {**talk("?"), "conversations": [{"from": "human", "value": "x"}]}
    yield Case(line(both), "`messages` and `conversations`", "both styles")
    yield Case(
        line({**talk("?"), "messages": [system, QUESTION, ANSWER], "system": "x"}),
        "both `system`",
        "system twice",
    )
    yield Case(line({"query": "?"}), "fits no format: it has 'query'", "query only")
    yield Case(line({"query": "?", "response": ""}), "without text", "empty response")
    yield Case(
        line({"query": "?", "response": "x", "history": [["a"]]}), r"history\[0\] is", "history of one"
    )
    yield Case(line({**talk("?"), "tools": "{not json"}), "tools is a string", "tools not json")


def wrong_media() -> Iterator[Case]:
    names = {
        "image": ("images", "good.png"),
        "video": ("videos", "good.mp4"),
        "audio": ("audios", "good.wav"),
    }
    for kind, (key, source) in names.items():
        for markers, items in ((1, 0), (3, 0), (1, 2), (2, 1), (2, 5), (4, 3)):
            record = {**talk(f"<{kind}>" * markers + "?"), key: [source] * items}
            expect = f"{markers} <{kind}> markers and {items} items in `{key}`"
            yield Case(line(record), expect, f"{markers} markers, {items} of {key}")
        sourceless = {**talk([{"type": kind}, {"type": "text", "text": "?"}])}
        yield Case(line(sourceless), f"1 <{kind}> markers and 0 items", f"{kind} part without source")
        system = {"messages": [{"role": "system", "content": [part(kind, source)]}, QUESTION, ANSWER]}
        yield Case(line(system), "system turn with media", f"{kind} for the system")
        answer = {"messages": [QUESTION, {"role": "assistant", "content": [part(kind, source)]}]}
        yield Case(line(answer), "without text", f"{kind} as the answer")
        nobody = {"messages": [ANSWER], key: [source]}
        yield Case(line(nobody), "before the first user turn", f"{kind} without a user")
        inline = {
            "cut": (f"data:{kind}/x;base64,AAAA", "not an image|cannot be decoded"),
            "broken": ("data:;base64,A*A", "base64 is broken"),
            "empty": ("data:;base64,", "is empty"),
            "percent": ("data:text/plain,a%20b", "without base64"),
            "headless": ("data:", "without base64"),
        }
        for name, (uri, expect) in inline.items():
            yield Case(about(kind, uri), expect, f"inline {kind} {name}")
        yield Case(line({**talk("?"), key: [{"bytes": "AAAA"}]}), "inline", f"{kind} bytes")
        yield Case(
            line({**talk("?"), key: [{"path": source, "url": source}]}), "is a path", f"{kind} path and url"
        )
        yield Case(line({**talk("?"), key: [""]}), "is a path or URL", f"{kind} empty path")
        yield Case(about(kind, source, detail=7), "unknown option", f"{kind} unknown option")
        url = {"type": f"{kind}_url", f"{kind}_url": {}}
        yield Case(line(talk([url])), "is a path or URL", f"{kind}_url without url")
        yield Case(line(talk([part(kind, source, url=source)])), "keep one", f"{kind} with two sources")
    options = {"zero": 0, "negative": -1, "word": "2", "bool": True, "huge": 1e300, "list": [2]}
    for name, value in options.items():
        yield Case(about("video", "good.mp4", fps=value), "fps is a positive number", f"fps {name}")
        yield Case(
            about("image", "good.png", max_pixels=value), "max_pixels is a positive", f"max_pixels {name}"
        )
    yield Case(about("image", "good.png", max_pixels=3.5), "whole number", "half a pixel")
    yield Case(
        line(talk([{"type": "input_audio", "input_audio": {"data": "AAAA"}}])),
        "cannot be decoded as audio",
        "input_audio",
    )
    yield Case(line(talk([{"type": "input_audio", "input_audio": "AAAA"}])), "input_audio is", "bare audio")
    yield Case(line(talk([part("video", ["a.png", "b.png"])])), "video is one file", "video of frames")
    for type_ in ("img", "txt", "image_urls", "file", "tool_result", "Text", ""):
        yield Case(
            line(talk([{"type": type_, "text": "x"}])), "type is .*valid are text", f"part type {type_!r}"
        )
