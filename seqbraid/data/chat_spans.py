"""Where the turns of a conversation lie in what a chat template makes of it.

Templates may strip reasoning from earlier turns, trim what is said, or look ahead, so a turn's text is not
simply found again in what they render. Instead a *mark* that occurs nowhere else is put into the content of
each turn, and the conversation is rendered again: without its marks this must be the same text, and each mark
must be there once, in order. Where a turn starts and ends is then told by renderings that stop before it,
with the generation prompt, and after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

Span = tuple[int, int]
Message = dict[str, Any]

Render = Callable[[Sequence[Message], bool], str]
"""Of messages, and whether the generation prompt follows."""

_TAG = re.compile(r"<[^<>\s]*>")
_WORD = re.compile(r"[^\W_]{2,}")


class MarkedConversation:
    """A conversation rendered with marks; refused where a turn is dropped, repeated or moved.

    Args:
        messages: as the template takes them; contents are strings or lists of parts.
        render: the template.
        special: finds a special token; no content holds one that the template uses.
    """

    def __init__(self, messages: Sequence[Message], render: Render, special: re.Pattern[str]) -> None:
        self.render, self.special = render, special
        token = f"(?:{special.pattern})"
        # The first special tokens in a row that only such tokens and white space follow: there are templates
        # that put one more token after the last turn, on a line of its own.
        self.end_of_turn = re.compile(rf"{token}+(?=(?:{token}|\s)*\Z)")
        self.plain = render(messages, False)
        said = [self.plain, *all_texts(messages)]
        # Letters and digits only, so that no filter of a template changes it.
        salt = next(salt for salt in (f"qz{n}zq" for n in count()) if not any(salt in text for text in said))
        self.any_mark = re.compile(rf"{salt}\d+e")
        marked = [_marked(message, f"{salt}{number}e") for number, message in enumerate(messages)]
        self.messages = [old if new is None else new for old, new in zip(messages, marked, strict=True)]
        self.marks = {
            number: f"{salt}{number}e" for number, message in enumerate(marked) if message is not None
        }
        self.text = render(self.messages, False)
        self._check_turns()

    def generated(self, number: int) -> Span:
        """What the model would generate for a turn, in the text without marks: from the generation prompt to
        the turn's end token."""
        if self._without_marks(self.text) != self.plain:
            raise ValueError(
                "the chat template writes something else when a turn says one word more, so that a turn "
                "cannot be found in its text; give the template {% generation %} blocks"
            )
        start = self._start(number)
        return self._place(start), self._place(self._stop(number, start))

    def _check_turns(self) -> None:
        places = []
        for number, mark in self.marks.items():
            if (found := self.text.count(mark)) != 1:
                raise ValueError(
                    f"the chat template {'repeats' if found else 'drops'} turn {number} "
                    f"({self.messages[number]['role']}), so it would not be the record that is learnt"
                )
            places.append(self.text.index(mark))
        if places != sorted(places):
            raise ValueError("the chat template puts the turns in another order")

    def _start(self, number: int) -> int:
        """Where the text goes on after the generation prompt."""
        prompt = self.render(self.messages[:number], True)
        nearest = next((self.marks[n] for n in reversed(range(number)) if n in self.marks), "")
        tail = _after(prompt, nearest)
        begin = len(self.text) - len(_after(self.text, nearest))
        if not self.text.startswith(tail, begin):
            return begin + self._start_of_shorter(number, tail, self.text[begin:])
        start = begin + len(tail)
        if self.special.match(self.text, start) and prompt == self.render(self.messages[:number], False):
            raise ValueError(
                "the chat template has no generation prompt (add_generation_prompt), but begins a turn with "
                f"{self.text[start : start + 40]!r}; what of it the model would generate is not clear"
            )
        return start

    def _start_of_shorter(self, number: int, tail: str, text: str) -> int:
        """Where the generation prompt goes further than what the template writes for a turn that lies back.

        What is more must be a tag, such as `<think>`, on a line of its own or after a special token.
        """
        both = next((n for n, (a, b) in enumerate(zip(tail, text, strict=False)) if a != b), len(text))
        ends = [found.end() for found in self.special.finditer(tail)]
        cut = max([tail.rfind("\n", 0, both) + 1, *(end for end in ends if end <= both)])
        if any(end > cut for end in ends) or not _TAG.match(tail, cut):
            raise ValueError(
                f"the chat template begins turn {number} with {text[:60]!r}, but prompts for it with "
                f"{tail[-60:]!r}; what of it the model would generate is not clear"
            )
        return cut

    def _stop(self, number: int, start: int) -> int:
        """Where the turn's end token ends."""
        is_last = number == len(self.messages) - 1
        ended = self.text if is_last else self.render(self.messages[: number + 1], False)
        if number not in self.marks:
            # Nothing is said but tool calls, in which there is no special token that the template uses.
            end = self.end_of_turn.search(ended)
            place = self.text.find(end[0], start) if end else -1
            if end is None or place < 0:
                raise ValueError(f"the chat template does not end turn {number} with a special token")
            return place + len(end[0])
        rest = _after(ended, self.marks[number])
        found = self.end_of_turn.search(rest)
        turn = rest[: found.end()] if found else rest.rstrip()
        begin = self.text.index(self.marks[number]) + len(self.marks[number])
        if not self.text.startswith(turn, begin):
            raise ValueError(
                f"the chat template ends turn {number} with {self.text[begin : begin + 60]!r}, but with "
                f"{turn[-60:]!r} where it is the last one"
            )
        return begin + len(turn)

    def _place(self, marked: int) -> int:
        return len(self._without_marks(self.text[:marked]))

    def _without_marks(self, text: str) -> str:
        return self.any_mark.sub("", text)


def all_texts(value: Any) -> list[str]:
    """All strings in a value, however deep."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in all_texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in all_texts(item)]
    return []


def _marked(message: Message, mark: str) -> Message | None:
    """The message with a mark in its last text that says something; None where there is no such text."""
    at_end = message["role"] == "assistant"
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": _insert(content, mark, at_end)} if content.strip() else None
    for place in reversed(range(len(content))):
        if content[place].get("text", "").strip():
            part = content[place] | {"text": _insert(content[place]["text"], mark, at_end)}
            return message | {"content": [*content[:place], part, *content[place + 1 :]]}
    return None


def _insert(text: str, mark: str, at_end: bool) -> str:
    """Put a mark where templates do not look: they look at the beginning and the end of what a user says, and
    for tags in what the assistant says; and they trim white space."""
    place = len(text.rstrip())
    if not at_end:
        tags = [found.span() for found in _TAG.finditer(text)]
        words = [w for w in _WORD.finditer(text) if not any(a <= w.start() < b for a, b in tags)]
        if words:
            place = max(words, key=lambda word: word.end() - word.start()).start() + 1
    return text[:place] + mark + text[place:]


def _after(text: str, mark: str) -> str:
    """What follows a mark, all where there is none."""
    if mark not in text:
        raise ValueError("the chat template drops a turn when the conversation stops after it")
    return text[text.index(mark) + len(mark) :]
