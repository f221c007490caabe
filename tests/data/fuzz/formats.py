"""Malformed records of the formats that are no conversations from the start."""

from __future__ import annotations

from collections.abc import Iterator

from .case import ANSWER, QUESTION, Case, line
from .records import WRONG


def wrong_formats() -> Iterator[Case]:
    for name, value in WRONG.items():
        if value is None:
            continue
        yield Case(line({"text": value}), "text is a string", f"text {name}")
        yield Case(line({"instruction": "?", "output": value}), "output is a string", f"output {name}")
        yield Case(line({"instruction": value, "output": "x"}), "instruction is a str", f"instruction {name}")
        pair = {"instruction": "?", "input": value, "output": "x"}
        yield Case(line(pair), "input is a string", f"input {name}")
        yield Case(line({"prompt": value, "completion": "x"}), "two strings or two lists", f"prompt {name}")
        expect = r"completion(\[0\])? is (a list|an object)" if isinstance(value, list) else "completion is"
        yield Case(line({"prompt": [QUESTION], "completion": value}), expect, f"completion {name}")
        if name != "list of int":
            yield Case(line({"input_ids": value}), r"input_ids(\[0\])? is an? (list|integer)", f"ids {name}")
            tokens = {"input_ids": [1, 2], "labels": value}
            yield Case(line(tokens), r"labels(\[0\])? is an? (list|integer)", f"labels {name}")
    ids = {"input_ids": [5, 6, 7]}
    for name, record, expect in (
        ("empty text", {"text": ""}, "text is empty"),
        ("text beside messages", {"text": "a", "messages": [QUESTION, ANSWER]}, "keys of messages"),
        ("text and title", {"text": "a", "title": "b"}, "unknown key 'title'"),
        ("no output", {"instruction": "a", "input": "b"}, "nearest format is alpaca.*`output` is missing"),
        ("prompt alone", {"prompt": "a"}, "`completion` is missing"),
        ("no answer", {"prompt": [QUESTION], "completion": [QUESTION]}, "nothing to train on"),
        (
            "learnt prompt",
            {"prompt": [{**ANSWER, "loss": 1}], "completion": [ANSWER]},
            "does not cover a prom",
        ),
        ("two kinds", {"prompt": "a", "completion": [ANSWER]}, "two strings or two lists"),
        ("unpaired preference", {"prompt": "a", "completion": "b", "label": True}, "preference data"),
        ("DPO pair", {"prompt": "a", "chosen": "b", "rejected": "c"}, "examples/losses/dpo.py trains on it"),
        (
            "LLaMA-Factory's pair",
            {"instruction": "a", "chosen": "b", "rejected": "c"},
            "preference data",
        ),
        (
            "axolotl's segments",
            {"segments": [{"label": True, "text": "a"}]},
            "fits no format: it has 'segments'",
        ),
        ("kto tag", {"instruction": "a", "output": "b", "kto_tag": False}, "preference data"),
        ("no ids", {"input_ids": []}, "input_ids is empty"),
        ("one id", {"input_ids": [5]}, "no token after the first"),
        ("huge id", {"input_ids": [5, 2**40]}, r"input_ids\[1\] is an integer"),
        ("half an id", {"input_ids": [5, 1.5]}, r"input_ids\[1\] is an integer"),
        ("short labels", {**ids, "labels": [5]}, "labels has 1 entries"),
        ("shifted labels", {**ids, "labels": [6, 7, -100]}, "shifted by one"),
        ("other labels", {**ids, "labels": [5, 6, 8]}, r"labels\[2\] is 8"),
        ("no labels", {**ids, "labels": [-100] * 3}, "nothing to train on"),
        ("padding", {**ids, "attention_mask": [1, 1, 0]}, r"attention_mask\[2\] is 0"),
        ("packed", {**ids, "position_ids": [0, 1, 0]}, "hold several"),
        ("mask of two", {**ids, "completion_mask": [0, 1, 2]}, "valid are 0, 1"),
    ):
        yield Case(line(record), expect, f"format: {name}")
    deep = line({"prompt": "?", "completion": "x"})[:-1] + b', "tools": ' + b"[" * 90 + b"]" * 90 + b"}"
    yield Case(deep, "unknown key 'tools'|deeper", "deep tools of a plain completion")
    yield Case(line({"text": "\ud800"}), "surrogate", "lone surrogate in a text")


def wrong_calls() -> Iterator[Case]:
    cases = {
        "calls not JSON": (
            [QUESTION, {"role": "tool_call", "content": "f(x)"}],
            r"\[1\].content is the JSON",
        ),
        "calls of a number": ([QUESTION, {"role": "function_call", "content": "5"}], r"content\[0\] is"),
        "calls twice": (
            [QUESTION, {"role": "tool_call", "content": '{"name": "f"}', "tool_calls": [{"name": "f"}]}],
            "with tool_calls; keep one",
        ),
        "half learnt call": (
            [QUESTION, {**ANSWER, "loss": False}, {"role": "tool_call", "content": '{"name": "f"}'}],
            "only one of them has labels",
        ),
        "half a loss": ([QUESTION, {**ANSWER, "loss": 0.5}], "a `weight` may be any number"),
        "a weight below 0": ([QUESTION, {**ANSWER, "weight": -0.5}], "weight is a number of 0 and above"),
        "a weight in words": ([QUESTION, {**ANSWER, "weight": "0.5"}], "weight is a number of 0 and above"),
        "labels of part of a turn": (
            [QUESTION, {**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": True}]}],
            "train_detail is not supported",
        ),
        "a question with labels": ([{**QUESTION, "train": True}, ANSWER], "only assistant turns have labels"),
        "arguments not JSON": (
            [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}],
            "arguments is a string that is not JSON",
        ),
        "arguments are a list": (
            [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "JSON of an object, not of",
        ),
    }
    for name, (messages, expect) in cases.items():
        yield Case(line({"messages": messages}), expect, f"calls: {name}")
