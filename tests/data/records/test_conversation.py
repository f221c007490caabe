"""Conversations of every style come to one form, and nothing but a ValueError comes of the rest."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.data.records.conversation import Conversation, MediaRef, Turn, parse_conversation
from seqbraid.data.records.formats import check_ignored

USER = {"role": "user", "content": "Which?"}
ANSWER = {"role": "assistant", "content": "This."}
LEARNT = Turn("assistant", ("This.",), True)


def test_the_three_styles_say_the_same() -> None:
    picture, sound = MediaRef("image", "a.png"), MediaRef("audio", "b.wav")
    wanted = Conversation(
        (
            Turn("system", ("Be kind.",), False),
            Turn("user", ("Is ", picture, " like ", sound, "?"), False),
            LEARNT,
        )
    )
    parts = [
        {"type": "text", "text": "Is "},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "text", "text": " like "},
        {"type": "audio", "audio": "b.wav"},
        {"type": "text", "text": "?"},
    ]
    marked, media = "Is <image> like <audio>?", {"images": ["a.png"], "audios": [{"path": "b.wav"}]}
    system = {"role": "system", "content": "Be kind."}
    records: list[Any] = [
        {"messages": [system, {"role": "user", "content": parts}, ANSWER]},
        {"messages": [system, {"role": "user", "content": marked}, ANSWER], **media},
        {"messages": [{"role": "user", "content": marked}, ANSWER], "system": "Be kind.", **media},
        {
            "conversations": [{"from": "human", "value": marked}, {"from": "gpt", "value": "This."}],
            "system": "Be kind.",
            **media,
        },
        {
            "system": "Be kind.",
            "query": marked,
            "response": "This.",
            **media,
            "id": None,
            "meta": {"x": None},
        },
    ]
    for record in records:
        assert parse_conversation(record) == wanted, record
        assert parse_conversation(json.loads(json.dumps(record))).media == [picture, sound]
    assert pickle.loads(pickle.dumps(wanted)) == wanted


def test_markers_take_the_listed_items_in_order_through_all_turns() -> None:
    turns = [
        {"role": "user", "content": "<image>1<video>"},
        ANSWER,
        {
            "role": "user",
            "content": [{"type": "image", "max_pixels": 99}, {"type": "text", "text": "<image>"}],
        },
        ANSWER,
    ]
    talk = parse_conversation({"messages": turns, "images": ["a", "b", "c"], "videos": ["v"]})
    a, b, c = MediaRef("image", "a"), MediaRef("image", "b", {"max_pixels": 99}), MediaRef("image", "c")
    assert talk.turns[0].parts == (a, "1", MediaRef("video", "v"))
    assert talk.turns[2].parts == (b, c)


def test_media_without_markers_stand_before_the_first_users_text() -> None:
    system = {"role": "system", "content": "Look."}
    talk = parse_conversation({"messages": [system, USER, ANSWER, USER, ANSWER], "images": ["a", "b"]})
    assert [turn.parts for turn in talk.turns[:2]] == [
        ("Look.",),
        (MediaRef("image", "a"), MediaRef("image", "b"), "Which?"),
    ]
    assert not talk.turns[3].media


def test_a_marker_may_be_said_in_a_part() -> None:
    html = {"role": "user", "content": [{"type": "text", "text": "What is <video> in HTML?"}]}
    assert parse_conversation({"messages": [html, ANSWER]}).turns[0].parts == ("What is <video> in HTML?",)


def test_only_the_assistant_turns_not_excluded_are_learnt() -> None:
    turns = [USER, {**ANSWER, "loss": False}, {**USER, "loss": False}, {**ANSWER, "loss": True}, USER, ANSWER]
    assert [turn.loss for turn in parse_conversation({"messages": turns}).turns] == [False] * 3 + [
        True,
        False,
        True,
    ]
    for key in ("weight", "train"):
        turns = [USER, {**ANSWER, key: 0}, USER, {**ANSWER, key: 1}]
        assert [turn.loss for turn in parse_conversation({"messages": turns}).turns] == [False] * 3 + [True]


def test_labels_of_a_turn_may_count_more_or_less() -> None:
    turns = [USER, {**ANSWER, "weight": 0.5}, USER, {**ANSWER, "weight": 0}, USER, ANSWER]
    talk = parse_conversation({"messages": turns})
    assert [(turn.loss, turn.weight) for turn in talk.turns if turn.role == "assistant"] == [
        (True, 0.5),
        (False, 1.0),
        (True, 1.0),
    ]
    assert talk.has_weights
    assert not parse_conversation({"messages": [USER, {**ANSWER, "weight": 1}]}).has_weights


def test_one_image_is_seen_and_keys_that_say_nothing_are_absent() -> None:
    talk = parse_conversation({"messages": [USER, ANSWER]})
    seen = parse_conversation(
        {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "image": "a.png"}
    )
    assert seen.media == [MediaRef("image", "a.png")]
    spoken = {"from": "gpt", "value": "This.", "train": None}
    for empty in (None, "", [], {}, {"path": None, "bytes": None}):
        keys = ("image", "images", "rejected_response", "chosen", "label", "id", "tools", "history", "query")
        turns = [USER, {**ANSWER, "loss": empty, "tool_calls": empty, "refusal": empty, "audio": empty}]
        assert parse_conversation({"messages": turns, **dict.fromkeys(keys, empty)}) == talk
    said = {"conversations": [{"from": "human", "value": "Which?"}, spoken], "messages": [], "response": ""}
    assert parse_conversation(said) == talk


def test_keys_that_are_to_be_ignored_are_and_no_others() -> None:
    turns = [USER, {**ANSWER, "id": 1}]
    record = {"messages": turns, "id": b"x", "label": False, "rejected": "No."}
    ignored = check_ignored(["id", "label", "rejected"])
    assert parse_conversation(record, ignored) == parse_conversation({"messages": [USER, ANSWER]})
    for key in sorted(ignored):
        with pytest.raises(ValueError, match=key):
            parse_conversation(record, ignored - {key})
    with pytest.raises(ValueError, match="ignore_keys has loss, which is used"):
        check_ignored(["id", "loss"])


def test_what_templates_read_is_kept() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        {**USER, "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {**ANSWER, "tool_calls": None},
    ]
    talk = parse_conversation({"messages": turns, "tools": json.dumps([{"name": "f"}])})
    assert [turn.extra for turn in talk.turns] == [
        {"name": "Ann"},
        {"tool_calls": [call], "reasoning_content": "Hm."},
        {"tool_call_id": "1"},
        {},
    ]
    assert talk.turns[1].loss and talk.turns[1].parts == ()
    assert talk.tools == ({"name": "f"},)


def test_options_of_a_part_are_kept_and_nulls_of_tables_are_not() -> None:
    part = {"type": "video", "video": "v", "fps": 2, "max_frames": 8, "image": None, "text": None}
    talk = parse_conversation({"messages": [{"role": "user", "content": [part]}, ANSWER], "images": None})
    assert talk.media == [MediaRef("video", "v", {"fps": 2, "max_frames": 8})]


def test_refusals_say_where_and_what_is_valid() -> None:
    cases: list[tuple[Any, str]] = [
        (
            {"messages": [USER, {"role": "asistant", "content": "x"}]},
            r"messages\[1\].role.*did you mean 'assistant'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "txt"}]}]},
            r"\[1\].content\[0\].*'text'",
        ),
        ({"messages": [USER, ANSWER], "images": [b"\x89PNG"]}, r"images\[0\] is a path"),
        ({"messages": [USER, ANSWER], "images": [{"bytes": b"\x89PNG", "path": "a"}]}, "inline"),
        ({"messages": [USER, ANSWER], "tools": [{"x": float("nan")}]}, "finite"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud83d"}]}, "surrogate"),
        (
            {"messages": [USER, {"role": "assistant", "content": "x", "loss": {1, 2}}]},
            "values are strings, numbers",
        ),
        ({"messages": [USER, {**ANSWER, 5: "x"}]}, "keys are strings"),
    ]
    for record, reason in cases:
        with pytest.raises(ValueError, match=reason):
            parse_conversation(record)


KEYS = st.sampled_from(
    [
        *("messages", "conversations", "role", "content", "from", "value", "type", "text", "image", "images"),
        *("videos", "url", "path", "loss", "tools", "tool_calls", "system", "query", "response", "history"),
        *("function", "name", "arguments", "fps", "weight"),
    ]
)
WORDS = st.sampled_from(
    [
        *("system", "user", "assistant", "human", "gpt", "tool", "text", "image", "video"),
        *("<image>", "<video>a", "data:", "a.png"),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORDS
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=25,
)
MESSAGE = st.fixed_dictionaries(
    {"role": WORDS | JSON, "content": WORDS | JSON}, optional={"loss": JSON, "tool_calls": JSON}
)
RECORD = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4)}, optional={"images": JSON, "tools": JSON, "system": JSON}
)


@settings(max_examples=300, deadline=None)
@given(JSON | RECORD | st.dictionaries(KEYS, JSON, max_size=4))
def test_any_value_is_a_conversation_or_a_value_error(record: Any) -> None:
    try:
        talk = parse_conversation(record)
    except ValueError as error:
        str(error).encode()
        return
    assert any(turn.loss for turn in talk.turns)
    assert all(turn.role == "assistant" for turn in talk.turns if turn.loss)
    assert all(isinstance(part, str | MediaRef) for turn in talk.turns for part in turn.parts)
    json.dumps([turn.extra for turn in talk.turns] + list(talk.tools), allow_nan=False)
