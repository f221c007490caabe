"""Every malformed record is refused with its reason, quickly, and opens nothing outside the media folder."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqbraid.data.conversation import MediaRef, parse_conversation
from seqbraid.data.media_files import MediaFiles
from seqbraid.data.source import JsonlSource, Source

from .fuzz import Case, good_records, make_corpus, media_root

pytest.importorskip("PIL")
pytest.importorskip("soundfile")
pytest.importorskip("av")

SLOWEST_S = 5.0
"""Of processor time, which other work on the machine does not lengthen."""


class Watch:
    """Notes what the process opens and connects to, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.opened: list[str] = []
        self.connected: list[str] = []
        sys.addaudithook(self._note)  # a hook cannot be taken back, hence the switch

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            self.opened.append(os.path.realpath(os.fsdecode(args[0])))
        if event in (
            "socket.connect",
            "socket.getaddrinfo",
            "urllib.Request",
            "subprocess.Popen",
            "os.system",
        ):
            self.connected.append(f"{event} {args}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    return make_corpus(folder / "corpus")


def read_all(source: Source, index: int, media: MediaFiles) -> Iterator[tuple[MediaRef, Any]]:
    """A record's media, decoded as training would; first and last frame of a video."""
    for ref in parse_conversation(source[index]).media:
        if ref.kind == "image":
            yield ref, media.image(ref)
        elif ref.kind == "audio":
            yield ref, media.audio(ref, 16_000)
        else:
            yield ref, media.video(ref, [0, media.video_info(ref).num_frames - 1])


def jsonl(path: Path, lines: list[bytes]) -> JsonlSource:
    path.write_bytes(b"\n".join(lines))
    return JsonlSource(path)


def test_good_records_are_read(cases: list[Case], folder: Path) -> None:
    source = jsonl(folder / "good.jsonl", [json.dumps(record).encode() for record in good_records()])
    media = MediaFiles(media_root(folder / "corpus"))
    kinds = [[ref.kind for ref, _ in read_all(source, index, media)] for index in range(len(source))]
    assert kinds == [[], ["image"], ["image", "video", "audio"], ["audio"], ["video"], ["image"]]


def test_each_malformed_record_is_refused_with_its_reason(
    cases: list[Case], folder: Path, watch: Watch
) -> None:
    test_good_records_are_read(cases, folder)  # so that nothing is imported late while the watch is on
    root = media_root(folder / "corpus").resolve()
    source = jsonl(folder / "bad.jsonl", [case.record_line for case in cases])
    media = MediaFiles(root)
    assert len(source) == len(cases) >= 600
    wrong = []
    for index, case in enumerate(cases):
        began = time.process_time()
        watch.opened.clear()
        watch.on = True
        try:
            list(read_all(source, index, media))
            outcome = "was read"
        except ValueError as error:
            outcome = "" if re.search(case.expect, str(error)) else f"gave {error}"
            if len(str(error)) > 2000:
                outcome = f"gave a reason of {len(str(error))} characters"
        except BaseException as error:
            outcome = f"raised {type(error).__name__}: {error}"
        finally:
            watch.on = False
        took = time.process_time() - began
        outside = [p for p in watch.opened if not Path(p).is_relative_to(root) and p != str(source.path)]
        if took > SLOWEST_S:
            outcome += f" took {took:.1f} s"
        if outside:
            outcome += f" opened {outside}"
        if outcome:
            wrong.append(f"{case.name}: {outcome}; expected {case.expect}")
    assert not wrong, "\n".join(wrong)
    assert not watch.connected


def test_the_watch_sees_what_is_opened(folder: Path, watch: Watch) -> None:
    (folder / "seen").write_text("x")
    watch.opened.clear()
    watch.on = True
    os.close(os.open(folder / "seen", os.O_RDONLY))
    watch.on = False
    assert watch.opened == [str((folder / "seen").resolve())]
