"""Text of others (names of files, errors of templates) as a console may show it."""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from unicodedata import category

KEPT = "\n\t"
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Controls, such as that which begins a terminal's commands; marks that turn the direction of text; halves of
characters, which stand for bytes of a file's name and cannot be printed; other ends of lines."""
JOINERS = "\u200c\u200d"
"""Of emoji and of scripts that need them."""


def printable(text: object) -> str:
    r"""With backslash escapes for what a terminal would obey rather than show.

    >>> printable("\x1b[2Jx\r.jsonl \x9b1A \u202egpj \udcff"), printable("è 漢 👩‍🔬\n")
    ('\\x1b[2Jx\\r.jsonl \\x9b1A \\u202egpj \\udcff', 'è 漢 👩‍🔬\n')
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in KEPT + JOINERS and category(character) in UNSEEN
        else character
        for character in text
    )


class PrintableFormatter(logging.Formatter):
    """The lines of loggers, escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line as a console may show it."""
        return printable(super().format(record))


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback on standard error, escaped; for `sys.excepthook`."""
    print(printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
