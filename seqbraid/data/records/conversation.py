"""Conversations: one record of a dataset, checked and brought to one form.

Accepted are three ways to write the same thing (`formats` has the table of these and all others):

- OpenAI: `{"messages": [{"role": "user", "content": "…" or a list of parts}, …], "tools": […]}`;
- ms-swift: `messages` whose text holds `<image>`, `<video>`, `<audio>` where the items of the lists `images`,
  `videos`, `audios` beside them belong; or `query`, `response` and, optionally, `system` and `history`;
- ShareGPT: `{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}`, with
  the same markers and lists.

A key that is not read is refused by its name, unless it is to be ignored; null and empty values count as
absent.
Every refusal is a `ValueError` that says where in the record and what to change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from .known_keys import known_keys
from .parts import LIST_OF_KIND, Marker, MediaKind, MediaRef, listed_media, parse_content
from .plain_json import check_plain, show
from .tools import calls_of_text, parse_tool_calls, parse_tools

__all__ = ["Conversation", "MediaKind", "MediaRef", "Role", "Turn", "parse_conversation"]

Role = Literal["system", "user", "assistant", "tool"]

OPENAI_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function": "tool",
    "tool_call": "assistant",
    "function_call": "assistant",
}
SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
CALLS = ("tool_call", "function_call")
"""Roles of turns whose content is the JSON of calls, in the words of ms-swift and LLaMA-Factory."""
STYLES = (
    "a conversation has either `messages` (role and content), `conversations` (from and value), or `query` "
    "and `response`"
)
EXTRA = ("tool_calls", "reasoning_content", "name", "tool_call_id")
"""Keys of a message that chat templates read beside role and content."""

LOSS_KEYS = ("loss", "train", "weight")
"""Keys that say whether a message has labels; `weight`, OpenAI's name for it, may be any number."""

RawMessage = tuple[str, Role, Mapping[str, Any]]
"""Where a turn stands, its role, and the message with its `content`, whatever the format."""

_Draft = tuple[str, Role, list[Any], Mapping[str, Any]]
"""Where a turn stands, its role, its parts (a marker may still be among them), and its message."""

STYLE_OF = {"role": "messages", "from": "conversations"}
"""By the key of a turn that names its speaker, the list that has such turns."""
STYLE_KEYS = ("messages", "conversations", "response")
MEDIA_KEYS = (*LIST_OF_KIND.values(), *LIST_OF_KIND)
"""Beside the turns; one item may be given as `image`."""
RECORD_KEYS = (
    *("messages", "conversations", "query", "response", "history", "system", "tools"),
    *MEDIA_KEYS,
)
REFUSED = {
    "loss_scale": 'use "loss": true or false',
    "train_detail": 'a turn has labels as a whole or not at all: use "train": true or false',
}
"""Keys of ms-swift and axolotl for what has labels that are not supported, and what to use instead."""

TURN_KEYS = (*EXTRA, *LOSS_KEYS, *REFUSED)
"""Keys of a turn beside its speaker and what it says."""


@dataclass(frozen=True)
class Turn:
    """What one speaker says: texts and media in order."""

    role: Role
    parts: tuple[str | MediaRef, ...]
    loss: bool
    """Whether the model learns to say this; only ever so for the assistant."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`tool_calls`, `reasoning_content`, `name`, `tool_call_id`, where the record has them."""
    weight: float = 1.0
    """How much each of its labels counts in the loss."""

    @property
    def media(self) -> list[MediaRef]:
        """The media of this turn, in order."""
        return [part for part in self.parts if isinstance(part, MediaRef)]


@dataclass(frozen=True)
class Conversation:
    """The turns of one sample and the tools its assistant may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def has_weights(self) -> bool:
        """Whether labels count other than once."""
        return any(turn.loss and turn.weight != 1 for turn in self.turns)

    @property
    def media(self) -> list[MediaRef]:
        """All media, in the order in which they are met."""
        return [item for turn in self.turns for item in turn.media]


def parse_conversation(record: Any, ignored: Collection[str] = ()) -> Conversation:
    """Check a record and bring it to one form; `ignored` are keys that may be there and are not read.

    >>> talk = parse_conversation(
    ...     {
    ...         "messages": [
    ...             {"role": "user", "content": "<image>What is it?"},
    ...             {"role": "assistant", "content": "A cat."},
    ...         ],
    ...         "images": ["cat.png"],
    ...     }
    ... )
    >>> talk.media[0].source, [turn.loss for turn in talk.turns]
    ('cat.png', [False, True])
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"a record is a JSON object, not {show(record)}; {STYLES}")
    styled = {key: record[key] for key in STYLE_KEYS if record.get(key) is not None}
    if not styled:
        raise ValueError(f"{STYLES}; this one has none of them")
    said = known_keys(record, RECORD_KEYS, ignored, "the record")
    if not said.keys() & styled.keys():  # what is empty is then what is wrong with it
        said |= styled
    return conversation_of(said, _messages(said, ignored))


def conversation_of(said: Mapping[str, Any], messages: Iterable[RawMessage]) -> Conversation:
    """The conversation of some messages, with the media, tools and system prompt that the record has beside
    them; they are read only after what the record holds is known to be plain JSON.
    """
    listed = {kind: _listed(said, kind) for kind in get_args(MediaKind)}
    check_plain(said)
    kinds_listed = frozenset(kind for kind, refs in listed.items() if refs)
    turns: list[_Draft] = []
    for where, role, message in _with_system(said, messages):
        parts = parse_content(
            message.get("content"), kinds_listed, f"{where}.content", bool(message.get("tool_calls"))
        )
        turns.append((where, role, parts, message))
    _place_listed(turns, listed)
    checked = tuple(_turn(*turn) for turn in turns)
    _check_order(checked)
    return Conversation(checked, parse_tools(said.get("tools")))


def _listed(record: Mapping[str, Any], kind: MediaKind) -> list[MediaRef]:
    """The media that stand beside the turns, several under `images` or one under `image`."""
    names = [name for name in (LIST_OF_KIND[kind], kind) if name in record]
    if len(names) > 1:
        raise ValueError(f"the record has both `{names[0]}` and `{names[1]}`; keep one")
    return listed_media(record[names[0]], kind, names[0]) if names else []


def _messages(record: Mapping[str, Any], ignored: Collection[str]) -> Iterator[RawMessage]:
    styles = [key for key in ("messages", "conversations", "response") if key in record]
    also = [key for key in ("query", "history") if key in record and styles != ["response"]]
    if len(styles) != 1 or also:
        raise ValueError(f"{STYLES}; this one has {' and '.join(f'`{key}`' for key in styles + also)}")
    style = styles[0]
    if style == "response":
        yield from history_turns(record)
        if "query" in record:
            yield "query", "user", {"content": record["query"]}
        yield "response", "assistant", {"content": record["response"]}
    else:
        yield from listed_turns(record[style], style, ignored)


def _with_system(record: Mapping[str, Any], messages: Iterable[RawMessage]) -> Iterator[RawMessage]:
    turns = list(messages)
    if "system" in record:
        if not isinstance(record["system"], str):
            raise ValueError(f"system is a string, not {show(record['system'])}")
        if any(role == "system" for _, role, _ in turns):
            raise ValueError("the record has both `system` and a system turn; keep one of them")
        yield "system", "system", {"content": record["system"]}
    yield from turns


def listed_turns(messages: Any, style: str, ignored: Collection[str]) -> Iterator[RawMessage]:
    """The turns of a list of messages that stands under the key `style`, ShareGPT's `conversations` or one
    in OpenAI's words. Calls that are turns of their own become part of the assistant's turn before them.
    """
    spoken: list[RawMessage] = []
    for where, role, message, calls in _spoken(messages, style, ignored):
        if calls and spoken and spoken[-1][1] == "assistant":
            before = spoken[-1][2]
            if any(before.get(key) != message.get(key) for key in LOSS_KEYS):
                raise ValueError(f"{where} is one turn with that before it, but only one of them has labels")
            both = [*before.get("tool_calls", ()), *message["tool_calls"]]
            spoken[-1] = (*spoken[-1][:2], {**before, "tool_calls": both})
        else:
            spoken.append((where, role, message))
    yield from spoken


def _spoken(
    messages: Any, style: str, ignored: Collection[str]
) -> Iterator[tuple[str, Role, Mapping[str, Any], bool]]:
    """The turns one by one, and whether they are calls."""
    who, what, roles = (
        ("from", "value", SHAREGPT_ROLES) if style == "conversations" else ("role", "content", OPENAI_ROLES)
    )
    other = "role" if who == "from" else "from"
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{style} is a list of at least one turn, not {show(messages)}")
    for number, message in enumerate(messages):
        where = f"{style}[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is an object with `{who}` and `{what}`, not {show(message)}")
        role = message.get(who)
        if role is None and isinstance(message.get(other), str):
            raise ValueError(
                f"{where} has `{other}`, but a turn in `{style}` has `{who}` and `{what}`; rename "
                f"`{style}` to `{STYLE_OF[other]}`"
            )
        if not isinstance(role, str) or role not in roles:
            near = get_close_matches(role.lower(), roles, 1) if isinstance(role, str) else []
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}.{who} is {show(role)}; valid are {', '.join(roles)}{hint}")
        if style == "conversations" and not isinstance(message.get("value"), str):
            raise ValueError(f"{where}.value is a string, not {show(message.get('value'))}")
        turn = known_keys(message, (who, what, *TURN_KEYS), ignored, where)
        if role in CALLS:
            if "tool_calls" in turn:
                raise ValueError(f"{where} is a {role} turn with tool_calls; keep one of them")
            calls = calls_of_text(message.get(what), f"{where}.{what}")
            yield where, roles[role], {**turn, "content": None, "tool_calls": calls}, True
        else:
            yield where, roles[role], {**turn, "content": message.get(what)}, False


def history_turns(record: Mapping[str, Any]) -> Iterator[RawMessage]:
    """The turns of `history`, a list of pairs, all of whose answers the loss covers."""
    history = record.get("history", [])
    if not isinstance(history, list):
        raise ValueError(f"history is a list of [query, response] pairs, not {show(history)}")
    for number, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history[{number}] is a [query, response] pair, not {show(pair)}")
        yield f"history[{number}][0]", "user", {"content": pair[0]}
        yield f"history[{number}][1]", "assistant", {"content": pair[1]}


def _place_listed(turns: Sequence[_Draft], listed: Mapping[MediaKind, list[MediaRef]]) -> None:
    """Put the items of `images`, `videos`, `audios` where their markers are, in place."""
    unmarked: list[MediaRef] = []
    for kind in get_args(MediaKind):
        refs = listed[kind]
        places = [
            (parts, place)
            for _, _, parts, _ in turns
            for place, part in enumerate(parts)
            if isinstance(part, Marker) and part.kind == kind
        ]
        if refs and not places:
            unmarked += refs
        elif len(refs) != len(places):
            name = LIST_OF_KIND[kind]
            literal = "" if refs else f'; a literal "<{kind}>" is written {{"type": "text", "text": …}}'
            raise ValueError(
                f"the record has {len(places)} <{kind}> markers and {len(refs)} items in `{name}`; give one "
                f"item for each marker{literal}"
            )
        else:
            for (parts, place), ref in zip(places, refs, strict=True):
                # A part may say how its item is to be read even when the item stands in the list.
                parts[place] = replace(ref, options={**ref.options, **parts[place].options})
    if unmarked:
        first = next((parts for _, role, parts, _ in turns if role == "user"), None)
        if first is None:
            raise ValueError(
                f"{len(unmarked)} media without markers are put before the first user turn, but there is none"
            )
        first[:0] = unmarked


def _turn(where: str, role: Role, parts: Sequence[str | MediaRef], message: Mapping[str, Any]) -> Turn:
    extra = {key: message[key] for key in EXTRA if key in message}
    for key in EXTRA[1:]:
        if not isinstance(extra.get(key, ""), str):
            raise ValueError(f"{where}.{key} is a string, not {show(extra[key])}")
    if "tool_calls" in extra:
        extra["tool_calls"] = parse_tool_calls(extra["tool_calls"], role, f"{where}.tool_calls")
    if role == "system" and any(isinstance(part, MediaRef) for part in parts):
        raise ValueError(f"{where} is a system turn with media; move them to a user turn")
    said = any(isinstance(part, str) and part.strip() for part in parts)
    if role == "assistant" and not said and not extra.get("tool_calls"):
        raise ValueError(
            f"{where} is an assistant turn without text, so it has no label; leave it out or fill it in"
        )
    weight = _weight(message, role, where)
    return Turn(role, tuple(parts), weight > 0, extra, weight or 1.0)


def _weight(message: Mapping[str, Any], role: Role, where: str) -> float:
    """What a turn's labels count; 0 where it has none."""
    for refused, instead in REFUSED.items():
        if message.get(refused) is not None:
            raise ValueError(f"{where}.{refused} is not supported; {instead}")
    given = [key for key in LOSS_KEYS if message.get(key) is not None]
    if len(given) > 1:
        raise ValueError(f"{where} has both `{given[0]}` and `{given[1]}`; keep one")
    if not given:
        return float(role == "assistant")
    key = given[0]
    weight = message[key]
    if key == "weight":
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{where}.weight is a number of 0 and above, not {show(weight)}")
    elif weight not in (0, 1):  # a list is equal to no number, and True is 1: both are what is meant here
        if isinstance(weight, int | float):
            raise ValueError(
                f"{where}.{key} is {show(weight)}; give 0 or 1, true or false; a `weight` may be any "
                "number: how much each label of the turn counts"
            )
        raise ValueError(f"{where}.{key} is true or false, not {show(weight)}")
    if weight and role != "assistant":
        raise ValueError(
            f"{where}.{key} is {show(weight)} on a {role} turn; only assistant turns have labels"
        )
    return float(weight)


def _check_order(turns: Sequence[Turn]) -> None:
    for number, turn in enumerate(turns):
        if turn.role == "system" and number:
            raise ValueError(f"turn {number} is a system turn; a system message must come first")
        if turn.role == "tool" and (not number or turns[number - 1].role not in ("assistant", "tool")):
            raise ValueError(f"turn {number} is a tool result, but no assistant turn comes before it")
    if not any(turn.loss for turn in turns):
        raise ValueError(
            'no assistant turn has labels, so there is nothing to train on (is "loss" false on every turn?)'
        )
