"""The messages of a conversation up to one of its turns, as a template needs them to write that turn.

What a template writes for a turn depends on a few turns before it and on the first ones. Rendering all that
comes before each of n turns would be n² / 2 messages, so of a long conversation only those are given; and at
turns that are further and further apart, all of them, to see that the template writes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Message = dict[str, Any]

SHORT = 64
"""Up to so many messages all that come before a turn are given."""
LEAST, MOST = 8, 32
"""At least and at most so many messages before a turn are given of a longer conversation."""
LONGEST = 512
"""Up to so many messages all are given after all, for a template that writes something else otherwise."""
FIRST = 4
"""So many of its first messages may be given before them."""


class Prefixes:
    """The beginnings of a conversation, long ones without what is in the middle."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._all = len(messages) <= SHORT

    def until(self, number: int) -> Sequence[Message]:
        """The messages before that of a number."""
        cut = None if self._all else self._cut(number)
        if cut is None:
            return self.messages[:number]
        first, resumed = cut
        return [*self.messages[:first], *self.messages[resumed:number]]

    def is_checked(self, number: int) -> bool:
        """Whether to look if the template writes a turn the same after all that comes before it: at twice as
        many turns each time, for odd and even ones, and at the last two, so that the work stays linear."""
        doubled = 0 in (number & (number - 1), number & (number + 1))
        return not self._all and (doubled or number >= len(self.messages) - 2)

    def give_all(self) -> bool:
        """Give all messages from now on; False where that is the case already, or would take too long."""
        if self._all or len(self.messages) > LONGEST:
            return False
        self._all = True
        return True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give all messages for a while."""
        self._all = True
        try:
            yield
        finally:
            self._all = False

    def _cut(self, number: int) -> tuple[int, int] | None:
        """How many first messages are kept, and where it goes on: with a message like the first one left out,
        and an even number left out, for there are templates that want the speakers to take turns."""
        leading = next((n for n, m in enumerate(self.messages) if m["role"] != "system"), 0)
        for first in range(leading, leading + FIRST):
            for resumed in range(number - LEAST, max(first, number - MOST), -1):
                alike = _shape(self.messages[first]) == _shape(self.messages[resumed])
                if alike and (resumed - first) % 2 == 0:
                    return first, resumed
        return None


def _shape(message: Message) -> tuple[Any, ...]:
    return message["role"], "tool_calls" in message
