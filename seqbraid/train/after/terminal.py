"""`seqbraid chat`: a conversation in the terminal, line by line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ...mesh import launched
from ...printable import printable
from ..progress import clocked_lines
from ..setup import make_device
from .chat import Attachments, Chat, ChatOptions
from .load import load_usable

with suppress(ImportError):  # not on Windows
    import readline  # noqa: F401  gives input() a history and keys to edit with

HELP = "/reset forgets the conversation, /image FILE and /audio FILE go with the next message, /exit ends"


def talk(
    folder: Path,
    checkpoint: str | None = None,
    images: Sequence[Path] = (),
    clips: Sequence[Path] = (),
    options: ChatOptions | None = None,
) -> int:
    """Talk to the model of a run or of a folder until the end of the input; the exit status."""
    if launched()[1] > 1:
        raise ValueError("chat runs in one process; start it without torchrun")
    clocked_lines()(f"loading the model of {folder}")
    try:
        usable = load_usable(folder, checkpoint, make_device())
        chat = Chat(usable, options or ChatOptions())
        media = Attachments(
            [chat.load_image(path) for path in images], [chat.load_audio(path) for path in clips]
        )
    except KeyboardInterrupt:
        return 130
    _print(f"{usable.name}: {type(usable.model).__name__}. {HELP}")
    while (line := _read()) is not None:
        if not line.strip():
            continue
        if line.startswith("/"):
            if line.split()[0] in ("/exit", "/quit"):
                break
            _command(chat, line, media)
            continue
        try:
            chat.ask(line, media, _say)
        except ValueError as error:
            _print(str(error))
        else:
            media = Attachments()
            _print("")
    return 0


def _command(chat: Chat, line: str, media: Attachments) -> None:
    """What begins with a slash."""
    name, _, rest = line.strip().partition(" ")
    try:
        if name == "/reset":
            chat.reset()
            media.images.clear()
            media.clips.clear()
            _print("forgotten")
        elif name == "/image":
            media.images.append(chat.load_image(Path(rest.strip()).expanduser()))
        elif name == "/audio":
            media.clips.append(chat.load_audio(Path(rest.strip()).expanduser()))
        else:
            _print(HELP if name == "/help" else f"{name} is unknown; {HELP}")
    except ValueError as error:
        _print(str(error))


def _read() -> str | None:
    """A line; None at the end of the input, and at a Ctrl-C."""
    try:
        line = input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            _print("")
        return None
    return line.encode("utf-8", "replace").decode("utf-8")  # bytes that are no text


def _say(piece: str) -> None:
    """A piece of an answer, of which a terminal obeys nothing."""
    print(printable(piece), end="", flush=True)


def _print(text: str) -> None:
    """A line of ours, which a terminal breaks between words."""
    console = Console(highlight=False)
    console.print(Text(printable(text)), soft_wrap=not console.is_terminal)
    sys.stdout.flush()
