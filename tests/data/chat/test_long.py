"""Long conversations cost in proportion to their length, and are found in the text as short ones are."""

from __future__ import annotations

from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqbraid.data.chat import prefixes
from seqbraid.data.chat.template import ChatTemplate
from seqbraid.data.plain import within
from seqbraid.data.records.conversation import parse_conversation
from seqbraid.data.records.plain_json import parse_json
from seqbraid.data.tiny import tiny_training_model

from .test_chat import CHATML, LLAMA3, MISTRAL, PHI, QWEN3, chat_of, said

NUMBERED = CHATML.replace("m.role +", "m.role + loop.index0|string +").replace(
    "assistant\\n", "assistant' + messages|length|string + '\\n"
)
"""Counts the turns, so that it writes each otherwise when others are left out."""
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def talk(number: int) -> list[dict[str, Any]]:
    """A question and its answer, again and again."""
    turns = [said("user", f"What is {n} + {n}?") for n in range(number)]
    answers = [said("assistant", f"It is {2 * n}.") for n in range(number)]
    return [turn for pair in zip(turns, answers, strict=True) for turn in pair]


def loop(number: int) -> list[dict[str, Any]]:
    """One question, and then call after call of a tool."""
    found = [said("system", "Call f."), said("user", "Which?")]
    for n in range(number):
        found += [said("assistant", "", tool_calls=[CALL]), said("tool", f"{n}")]
        found += [said("tool", "more")] * (n % 2)
    return [*found, said("assistant", "That.")]


CONVERSATIONS = {
    "chatml": (CHATML, talk),
    "chatml, system": (CHATML, lambda number: [said("system", "Be brief."), *talk(number)]),
    "llama3": (LLAMA3, talk),
    "mistral": (MISTRAL, talk),
    "phi": (PHI, talk),
    "qwen3": (QWEN3, talk),
    "qwen3, tools": (QWEN3, loop),
}


class Counting(ChatTemplate):
    """A template that counts the messages that it writes."""

    written = 0

    def _rendered(self, messages: Any, *args: Any, **options: Any) -> Any:
        self.written += len(messages)
        return super()._rendered(messages, *args, **options)


def rendered(template: str, messages: list[dict[str, Any]]) -> tuple[Any, int]:
    """A conversation as text, and how many messages were written for it."""
    chat = Counting(chat_of(template).tokenizer)
    return chat.render(parse_conversation({"messages": messages})), chat.written


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_turns_of_a_long_conversation_are_those_found_with_all_turns_before_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, make = CONVERSATIONS[name]
    found, written = rendered(template, make(40))
    monkeypatch.setattr(prefixes, "SHORT", 10**9)
    wanted, all_written = rendered(template, make(40))
    assert found == wanted and len(found.spans) >= 40
    assert written < all_written / 1.5


@pytest.mark.parametrize("name", ["chatml", "qwen3, tools"])
def test_messages_that_are_written_grow_with_the_turns(name: str) -> None:
    template, make = CONVERSATIONS[name]
    few, many = (rendered(template, make(number))[1] / number for number in (75, 300))
    assert many < 1.5 * few < 150


def test_a_template_that_needs_all_turns_is_given_them_or_refused() -> None:
    found, _ = rendered(NUMBERED, talk(40))
    assert [found.text[start:stop] for start, stop in found.spans] == [
        f"It is {2 * n}.<|im_end|>" for n in range(40)
    ]
    with pytest.raises(ValueError, match="turn"):
        rendered(NUMBERED, talk(300))


def test_a_late_change_of_the_prompt_is_seen() -> None:
    """A generation prompt that depends on the first turns, but is found in the text with and without."""
    secret = CHATML.replace("assistant\\n'", "assistant\\n' + ('It is ' if messages|length > 90 else '')")
    assert secret != CHATML
    with pytest.raises(ValueError, match="far before it are left out"):
        rendered(secret, talk(300))


def test_many_placeholders_and_special_tokens_in_a_row() -> None:
    processor = tiny_training_model("qwen3_vl")[1]
    images = [{"type": "image", "image": "a.png"}] * 20_000
    messages = [{"role": "user", "content": images}, said("assistant", "Many.")]
    found = ChatTemplate(processor).render(parse_conversation({"messages": messages}))
    assert [found.text[start:stop] for start, stop in found.spans] == ["Many.<|im_end|>"]


def question(text: str) -> list[dict[str, Any]]:
    return [said("user", text), said("assistant", "That.")]


GROWS = {
    "markers": lambda n: {"messages": question("<image>" * n), "images": ["a.png"] * n},
    "text of the user": lambda n: {"messages": question("some words " * 20 * n)},
    "text of the assistant": lambda n: {
        "messages": [said("user", "?"), said("assistant", "a word " * 20 * n)]
    },
    "end tags of reasoning": lambda n: {
        "messages": [said("user", "?"), said("assistant", "</think>" * n + "a")]
    },
    "turns": lambda n: {"messages": talk(n // 20)},
}


@pytest.mark.parametrize("name", GROWS)
def test_time_grows_with_the_length(name: str) -> None:
    """Twelve times the length takes less than forty times as long; a square would be 144."""
    chat = ChatTemplate(tiny_training_model("qwen3_vl")[1])

    def seconds(size: int) -> float:
        record, begun = GROWS[name](size), process_time()
        chat.render(parse_conversation(record))
        return process_time() - begun

    seconds(500)  # what is made once is made here
    assert min(seconds(12_000) for _ in range(2)) < 40 * max(0.002, min(seconds(1_000) for _ in range(3)))


@given(st.data())
def test_tokens_within_spans_are_those_within_one_of_them(data: st.DataObject) -> None:
    def places(most: int) -> list[int]:
        return sorted(data.draw(st.lists(st.integers(0, 40), max_size=most)))

    ends, edges = places(40), places(12)
    offsets = list(zip([0, *ends], ends, strict=False))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    found = within(np.asarray(offsets, np.int64).reshape(-1, 2), spans)
    wanted = [any(a <= start < stop <= b for a, b in spans) for start, stop in offsets]
    assert found.tolist() == wanted


def test_a_key_twice_among_many_is_found() -> None:
    keys = ",".join(f'"{n}": 0' for n in range(50_000))
    with pytest.raises(ValueError, match=r"'49999'.*twice"):
        parse_json("{" + keys + ', "49999": 1}')
