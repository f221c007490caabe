"""Where the turns of a conversation lie in what a chat template makes of it.

Templates may strip reasoning from earlier turns, trim what is said, or look ahead, so a turn's text is not
simply found again in what they render. Instead a *mark* that occurs nowhere else is put into the content of
each turn, and the conversation is rendered again: without its marks this must be the same text, and each mark
must be there once, in order. Where a turn starts and ends is then told by renderings that stop before it,
with the generation prompt, and after it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, count
from typing import Any

from .prefixes import Message, Prefixes

Span = tuple[int, int]

Render = Callable[[Sequence[Message], bool], str]
"""Of messages, and whether the generation prompt follows."""

_TAG = re.compile(r"<[^<>\s]*>")
SHOWN = 60
"""Characters of a text that a refusal quotes."""

_TAG_OR_WORD = re.compile(rf"{_TAG.pattern}|(?P<word>[^\W_]{{2,}})")


class MarkedConversation:
    """A conversation rendered with marks; refused where a turn is dropped, repeated or moved.

    Args:
        messages: as the template takes them; contents are strings or lists of parts.
        render: the template.
        special: finds a special token; no content holds one that the template uses.
    """

    def __init__(self, messages: Sequence[Message], render: Render, special: re.Pattern[str]) -> None:
        self.render, self.special = render, special
        self.plain = render(messages, False)
        said = [self.plain, *all_texts(messages)]
        # Letters and digits only, so that no filter of a template changes it.
        salt = next(salt for salt in (f"qz{n}zq" for n in count()) if not any(salt in text for text in said))
        self.any_mark = re.compile(rf"{salt}(\d+)e")
        marked = [_marked(message, f"{salt}{number}e") for number, message in enumerate(messages)]
        self.messages = [old if new is None else new for old, new in zip(messages, marked, strict=True)]
        self.marks = {
            number: f"{salt}{number}e" for number, message in enumerate(marked) if message is not None
        }
        self.prefixes = Prefixes(self.messages)
        self.text = render(self.messages, False)
        self.places = self._places()
        self.nearest = list(accumulate((n if n in self.marks else -1 for n in range(len(marked))), max))
        """Of each turn: itself or the turn before it that has a mark; -1 where there is none."""
        lengths = [len(self.marks[number]) for number in self.places]
        self.mark_starts = list(self.places.values())
        self.marks_before = list(accumulate(lengths, initial=0))
        self.says_the_same = self.any_mark.sub("", self.text) == self.plain

    def generated(self, number: int) -> Span:
        """What the model would generate for a turn, in the text without marks: from the generation prompt to
        the turn's end token."""
        if not self.says_the_same:
            raise ValueError(
                "the chat template renders a turn differently when its content has one more word, so the "
                "turn cannot be located in the text; give the template {% generation %} blocks"
            )
        try:
            start, stop = self._found(number)
            if self.prefixes.is_checked(number):
                self._check_prefix(number, (start, stop))
        except ValueError:
            if not self.prefixes.give_all():
                raise
            start, stop = self._found(number)
        return self._place(start), self._place(stop)

    def _found(self, number: int) -> Span:
        start = self._start(number)
        return start, self._stop(number, start)

    def _places(self) -> dict[int, int]:
        """Where the mark of each turn stands in the text, in order."""
        found = [(int(mark[1]), mark.start()) for mark in self.any_mark.finditer(self.text)]
        times = Counter(number for number, _ in found)
        for number in self.marks:
            if times[number] != 1:
                raise ValueError(
                    f"the chat template {'repeats' if times[number] else 'drops'} turn {number} "
                    f"({self.messages[number]['role']}), so the rendered text would not be that of the "
                    "record; use a template that renders every turn once"
                )
        if [number for number, _ in found] != list(self.marks):
            raise ValueError(
                "the chat template renders the turns in another order than the record has; "
                "use a template that keeps it"
            )
        return dict(found)

    def _check_prefix(self, number: int, span: Span) -> None:
        """Refuse a template that writes a turn otherwise when turns far before it are left out."""
        with self.prefixes.whole():
            if span == self._found(number):
                return
        raise ValueError(
            f"the chat template writes turn {number} differently when turns far before it are left out, "
            f"so it cannot be located in a conversation of {len(self.messages)} turns; shorten the "
            "conversation, or give the template {% generation %} blocks"
        )

    def _after_mark(self, number: int) -> int:
        """Where the text goes on after a turn's mark; its beginning where no turn before has one."""
        return self.places[number] + len(self.marks[number]) if number >= 0 else 0

    def _start(self, number: int) -> int:
        """Where the text goes on after the generation prompt."""
        before = self.prefixes.until(number)
        prompt = self.render(before, True)
        nearest = self.nearest[number - 1] if number else -1
        tail = _after(prompt, self.marks.get(nearest, ""))
        begin = self._after_mark(nearest)
        if not self.text.startswith(tail, begin):
            text = self.text[begin : begin + max(len(tail), SHOWN) + 1]
            return begin + self._start_of_shorter(number, tail, text)
        start = begin + len(tail)
        if self.special.match(self.text, start) and prompt == self.render(before, False):
            raise ValueError(
                "the chat template has no generation prompt (add_generation_prompt), but begins a turn "
                f"with {self.text[start : start + 40]!r}; which part of it the model would generate is "
                "unclear, so no label mask can be made"
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
                f"the chat template begins turn {number} with {text[:SHOWN]!r}, but prompts for it with "
                f"{tail[-SHOWN:]!r}; which part of it the model would generate is unclear, so no label "
                "mask can be made"
            )
        return cut

    def _stop(self, number: int, start: int) -> int:
        """Where the turn's end token ends."""
        is_last = number == len(self.messages) - 1
        ended = self.text if is_last else self.render(self.prefixes.until(number + 1), False)
        if number not in self.marks:
            # Nothing is said but tool calls, in which there is no special token that the template uses.
            end = self._end_of_turn(ended)
            place = self.text.find(ended[slice(*end)], start) if end else -1
            if end is None or place < 0:
                raise ValueError(f"the chat template does not end turn {number} with a special token")
            return place + end[1] - end[0]
        rest = _after(ended, self.marks[number])
        found = self._end_of_turn(rest)
        turn = rest[: found[1]] if found else rest.rstrip()
        begin = self._after_mark(number)
        if not self.text.startswith(turn, begin):
            raise ValueError(
                f"the chat template ends turn {number} with {self.text[begin : begin + SHOWN]!r}, but with "
                f"{turn[-SHOWN:]!r} where it is the last one"
            )
        return begin + len(turn)

    def _end_of_turn(self, text: str) -> Span | None:
        """The first special tokens in a row that only such tokens and white space follow: there are templates
        that put one more token after the last turn, on a line of its own."""
        end = None
        following = len(text)
        # Token by token, for a pattern that says all of it looks through a row of tokens again and again.
        for start, stop in reversed([token.span() for token in self.special.finditer(text)]):
            if text[stop:following].strip():
                break
            end = (start, end[1] if end is not None and end[0] == stop else stop)
            following = start
        return end

    def _place(self, marked: int) -> int:
        return marked - self.marks_before[bisect_left(self.mark_starts, marked)]


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
        # Each tag or each word outside of one, whichever comes first.
        words = (found for found in _TAG_OR_WORD.finditer(text) if found["word"])
        longest = max(words, key=lambda word: word.end() - word.start(), default=None)
        if longest is not None:
            place = longest.start() + 1
    return text[:place] + mark + text[place:]


def _after(text: str, mark: str) -> str:
    """What follows a mark, all where there is none."""
    if mark not in text:
        raise ValueError("the chat template drops a turn when the conversation stops after it")
    return text[text.index(mark) + len(mark) :]
