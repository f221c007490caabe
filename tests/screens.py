"""Pictures of what users see, to be looked at: `python -m tests.screens` writes them into `out/screens`.

A terminal is one of tmux, what it shows at the end of a command becomes a picture with its colors; a page is
drawn by Chromium. Both are Debian packages (`apt-get install tmux chromium`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
OUT = ROOT / "out" / "screens"
COLUMNS, LINES = 120, 400
LIMIT_S = 600.0

INSPECT = "-m seqbraid inspect examples/{}/config.yaml --html {}"
TERMINALS = {
    "inspect_pictures": INSPECT.format("qwen3_vl", "out/screens/pictures.html"),
    "inspect_documents": INSPECT.format("qwen3_5_documents", "out/screens/documents.html"),
    "inspect_sounds": INSPECT.format("qwen3_omni_audio", "out/screens/sounds.html"),
}
"""By the picture's name, what Python is given on a terminal."""

RUN = "out/screens/run"
TRAIN = f"-m seqbraid train examples/qwen3_vl/config.yaml --out={RUN} --resume=auto --train.steps=20"
TALK = f"-m seqbraid chat {RUN} --temperature 0 --image out/examples/shapes/media/eval0_0.png"
TYPED = ("What is in the picture?", "What is in the picture?")

PAGES = {"page_pictures": "pictures.html", "page_documents": "documents.html", "page_sounds": "sounds.html"}
"""By the picture's name, a page in the folder of pictures."""


def tmux(*arguments: str) -> str:
    """What a command of tmux prints; it has a server of its own."""
    command = ["tmux", "-L", f"seqbraid-{os.getpid()}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def on_terminal(arguments: Sequence[str], typed: Sequence[str] = ()) -> str:
    """What a terminal shows when a command has ended, with the codes of its colors; lines are typed where it
    asks for them, and then Ctrl-D.
    """
    done = "seqbraid-screen-is-done"
    keys = [*([line, "Enter"] for line in typed), ["C-d"]] if typed else []
    command = f"clear; export COLORTERM=truecolor; {shlex.join([sys.executable, *arguments])}; echo {done}"
    # As tall as it may become, so that nothing scrolls out of it.
    tmux("new-session", "-d", "-s", "screen", "-x", str(COLUMNS), "-y", str(LINES), "-c", str(ROOT), "sh")
    try:
        tmux("send-keys", "-t", "screen", command, "Enter")
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            time.sleep(0.5)
            lines = tmux("capture-pane", "-e", "-p", "-t", "screen").rstrip().splitlines()
            if done in [line.strip() for line in lines]:
                return "\n".join(lines[: [line.strip() for line in lines].index(done)])
            if keys and lines and lines[-1].strip() == ">":  # once each: a second Ctrl-D would end the shell
                tmux("send-keys", "-t", "screen", *keys.pop(0))
        raise TimeoutError(f"{command} has not ended after {LIMIT_S:g} s")
    finally:
        tmux("kill-server")


def browser() -> str:
    """Chromium, by the name that it has here."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))),
        None,
    )
    if found is None or shutil.which("tmux") is None:
        raise SystemExit("make screens needs tmux and Chromium: apt-get install tmux chromium")
    return found


def draw(page: Path, picture: Path, width: int, height: int) -> None:
    """A picture of a page."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={picture}",
            page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)


def main() -> None:
    """Draw all of them."""
    browser()
    OUT.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, ROOT / "examples" / "make_data.py"], cwd=ROOT, check=True)
    talks = {"train": TRAIN, "chat": TALK}
    for name, command in {**TERMINALS, **talks}.items():
        shown = Text.from_ansi(on_terminal(command.split(), TYPED if command == TALK else ()))
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        console.print(shown)
        drawing = OUT / f"{name}.svg"
        console.save_svg(str(drawing), title=f"python {command}")
        lines = shown.plain.count("\n") + 1
        draw(drawing, OUT / f"{name}.png", 1500, min(25 * lines + 120, 12000))
        print(f"wrote {OUT / name}.png")
    for name, page in PAGES.items():
        draw(OUT / page, OUT / f"{name}.png", 1120, 2600)
        print(f"wrote {OUT / name}.png")


if __name__ == "__main__":
    main()
