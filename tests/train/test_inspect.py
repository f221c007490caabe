"""`seqbraid inspect` shows the rows and the steps that a run has, and says what is wrong with its data."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from seqbraid.cli import main
from seqbraid.mesh import Mesh
from seqbraid.models.tiny.decoders import tiny_config
from seqbraid.train.config_file import parse_config, to_yaml
from seqbraid.train.inspect.findings import Findings, steps_of_epoch
from seqbraid.train.inspect.packed import PackedRow, packed_row
from seqbraid.train.inspect.run import inspect
from seqbraid.train.inspect.survey import Reader, survey
from seqbraid.train.setup import EncoderFactory, load_model_processor, make_loader, open_data, row_options
from tests.helpers.runs import config, said, shown, write

image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, some about pictures, and documents, the longest of which no row holds."""
    folder = tmp_path_factory.mktemp("inspect")
    for name, color in (("red", "red"), ("blue", "blue")):
        image.new("RGB", (40, 24), color).save(folder / f"{name}.png")
    write(folder / "text.jsonl", [said(number) for number in range(60)])
    seen = [shown(number, ("red.png", "blue.png")[number % 2]) for number in range(12)]
    write(
        folder / "pictures.jsonl",
        [record for pair in zip(seen, map(said, range(12)), strict=True) for record in pair],
    )
    pages = [
        {"text": f"Page {number}. " + "It is a small red square. " * (number * 4)} for number in range(20)
    ]
    write(folder / "pages.jsonl", pages)
    return folder


def settings(folder: Path, **changes: Any) -> Any:
    return config(folder, folder / "out", train={"steps": None, "epochs": 1}, **changes)


def with_data(wanted: Any, **changes: Any) -> Any:
    return replace(wanted, data=replace(wanted.data, **changes)).check()


def run(wanted: Any, folder: Path, *arguments: str, **options: Any) -> tuple[Findings, str]:
    """What it found, and what it printed without colors."""
    path = folder / "config.yaml"
    path.write_text(to_yaml(wanted))
    console = Console(width=110, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    found = inspect([str(path), *arguments], console=console, **options)
    return found, console.export_text()


def reader_of(wanted: Any) -> Reader:
    alone = Mesh(rank=0, world_size=1)
    model_config = tiny_config("qwen3")
    model_config.vocab_size = 400
    source = open_data(wanted.data.train, wanted.data, alone)
    return Reader(source, EncoderFactory(wanted.model, wanted.data, model_config)(), row_options(wanted))


@pytest.mark.parametrize(
    "changes", [{}, {"train": "{}/pages.jsonl", "over_long": "split"}, {"shuffle": False}]
)
def test_the_rows_and_steps_are_those_of_a_run(data: Path, changes: dict[str, Any]) -> None:
    changes = {key: value.format(data) if key == "train" else value for key, value in changes.items()}
    wanted = with_data(settings(data), **changes)
    loader = make_loader(
        wanted, tiny_config("qwen3", vocab_size=400), Mesh(rank=0, world_size=1), lists_bad=False
    )
    steps = list(loader)
    reader = reader_of(wanted)
    found = survey(reader, 10**6)
    assert found.is_whole and steps_of_epoch(wanted, found) == len(steps)
    assert sum(map(sum, found.rows)) == sum(step.tokens for step in steps)
    assert len(found.rows) == sum(len(step.rows) for step in steps)
    rows = [row for step in steps for row in zip(step.rows, step.where, strict=True)]
    decode = load_model_processor(wanted.model).decode
    for number in (0, 1, 4):
        packed = packed_row(reader, number)
        texts = ["".join(piece.text for piece in sample.pieces) for sample in packed.samples]
        samples, where = next(row for row in rows if [decode(one["input_ids"]) for one in row[0]] == texts)
        assert where == [sample.where for sample in packed.samples]
        for own, sample in zip(packed.samples, samples, strict=True):
            ids, labels = sample["input_ids"], sample["labels"]
            assert "".join(piece.text for piece in own.pieces if piece.labelled) == decode(
                labels[labels != -100]
            )
            assert own.tokens == len(ids) and own.labels == int((labels[1:] != -100).sum())


def test_what_is_estimated_from_a_part_is_near(data: Path) -> None:
    wanted = settings(data)
    whole, part = survey(reader_of(wanted), 10**6), survey(reader_of(wanted), 30)
    assert (part.looked_at, part.total, part.is_whole) == (30, 60, False)
    assert abs(steps_of_epoch(wanted, part) - steps_of_epoch(wanted, whole)) <= 2
    _, printed = run(wanted, data, samples=30)
    assert "60, of which 30 were looked at, spread evenly" in printed and "about " in printed


class Parsed(HTMLParser):
    """The page's tags, in which each is closed, and what is marked."""

    EMPTY = ("meta", "img", "rect")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.marks: list[str] = []
        self.sources: list[str] = []
        self.media: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.sources += [str(value) for key, value in attrs if key in ("src", "href")]
        if tag == "mark":
            self.marks.append("")
        if given.get("class") == "media":
            self.media.append("")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["mark"]:
            self.marks[-1] += data
        if self.open[-1:] == ["span"] and self.media:
            self.media[-1] += data


def labelled(packed: PackedRow) -> list[str]:
    return [piece.text for sample in packed.samples for piece in sample.pieces if piece.labelled]


def test_the_command_shows_pictures_and_labels_on_a_terminal_and_a_page(data: Path) -> None:
    wanted = with_data(replace(settings(data), model="tiny:qwen3_vl"), train=f"{data}/pictures.jsonl")
    path, page = data / "seen.yaml", data / "page.html"
    path.write_text(to_yaml(wanted))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "seqbraid", "inspect", str(path), "--html", str(page)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    printed = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # nobody has the other end any more
            break
        if not block:
            break
        printed += block
    os.close(ours)
    assert process.wait() == 0, printed.decode()
    text = printed.decode()
    answers = re.findall("\x1b\\[38;2;11;46;23;48;2;166;227;180m(.*?)\x1b\\[0m", text)
    assert answers[0] == " has labels " and len(answers) > 3
    assert all(re.fullmatch(r"The (number|answer) is \d+\.<\|im_end\|>", one) for one in answers[1:])
    names = set(re.findall("\x1b\\[38;2;61;44;0;48;2;245;212;138m image (\\w+).png: ", text))
    for name, color in (("red", "255;0;0"), ("blue", "0;0;255")):  # two pixels in a cell
        assert (f"\x1b[38;2;{color};48;2;{color}m▀" in text) == (name in names)
    assert names
    found = Parsed(page.read_text(encoding="utf-8"))
    assert found.sources and all(one.startswith("data:image/png;base64,") for one in found.sources)
    pictures = [one for one in found.media[1:] if one]  # the first is of the legend
    assert len(pictures) == len(found.sources) and all(
        re.fullmatch(r"image (red|blue)\.png: \d+ tokens", one) for one in pictures
    )
    assert found.marks[0] == "has labels" and all(mark.endswith("<|im_end|>") for mark in found.marks[1:])
    assert len(found.marks) > 4


def test_a_page_escapes_what_data_say_and_replaces_only_its_own(data: Path) -> None:
    evil = "</pre><script>alert(1)</script>\x1b[2J"
    write(data / "evil.jsonl", [{"query": evil, "response": "<b>A</b> & 'B'"}])
    wanted = with_data(settings(data), train=f"{data}/evil.jsonl")
    page = data / "evil.html"
    _, printed = run(wanted, data, html=page)
    found = Parsed(page.read_text(encoding="utf-8"))
    assert "<script" not in page.read_text() and found.marks[1:] == ["<b>A</b> & 'B'<|im_end|>"]
    assert "\x1b[2J" not in printed and "\\x1b[2J" in printed and "⟦<b>A</b> & 'B'<|im_end|>⟧" in printed
    run(wanted, data, html=page)
    page.write_text("mine")
    with pytest.raises(ValueError, match="exists and is no page of inspect"):
        run(wanted, data, html=page)


def test_weights_of_labels_are_shown_where_they_are_not_1(data: Path) -> None:
    user = {"role": "user", "content": "Again?"}
    answers = [
        {"role": "assistant", "content": said, "weight": weight}
        for said, weight in (("Half.", 0.5), ("None.", 0), ("Once.", 1), ("Twice.", 2))
    ]
    talk = {"messages": [message for answer in answers for message in (user, answer)]}
    write(data / "weights.jsonl", [talk, said(1)])
    wanted, page = with_data(settings(data), train=f"{data}/weights.jsonl"), data / "weights.html"
    _, printed = run(wanted, data, html=page)
    assert "×n: the weight of the labels" in printed
    found = {word: weight for weight, word in re.findall(r"(×[\d.]+)?⟦(\w+)", printed)}
    assert found == {"Half": "×0.5", "Once": "", "Twice": "×2", "The": ""}
    text = page.read_text(encoding="utf-8")
    weights = re.findall(r"(?:<sup>(×[\d.]+)</sup>)?<mark>(\w+)", text)
    assert {word: weight for weight, word in weights} == {**found, "has": ""}
    run(settings(data), data, html=page)
    assert "<sup>" not in page.read_text(encoding="utf-8")


def texts(found: Findings) -> str:
    return "\n".join(f"{'STOPS ' if notice.stops else ''}{notice.text}" for notice in found.notices)


def test_notices_say_what_would_stop_and_what_is_lost(data: Path) -> None:
    bad = [said(1), {"query": "?", "answer": "a"}, *(said(number) for number in range(2, 30))]
    write(data / "bad.jsonl", bad)
    wanted = with_data(settings(data), train=f"{data}/bad.jsonl")
    assert (
        "STOPS 1 sample cannot be used: the run stops at the first (data.on_bad_sample=error). bad.jsonl:2: "
        in texts(run(wanted, data)[0])
    )
    left = texts(run(with_data(wanted, on_bad_sample="skip"), data)[0])
    assert "1 sample cannot be used: left out" in left and "STOPS" not in left
    pages = with_data(settings(data), train=f"{data}/pages.jsonl")
    over = {
        name: texts(run(with_data(pages, over_long=name), data)[0])
        for name in ("error", "drop", "truncate", "split")
    }
    lengths = [
        len(load_model_processor("tiny:qwen3")(json.loads(line)["text"])["input_ids"]) + 1
        for line in (data / "pages.jsonl").open()
    ]
    long = [length for length in lengths if length > 192]
    start = f"{len(long)} samples longer than a row of 192: "
    assert f"STOPS {start}the run stops at the first (data.over_long=error)" in over["error"]
    assert f"{start}left out" in over["drop"] and "STOPS" not in over["drop"]
    assert f"{start}cut, which loses {sum(long) - 192 * len(long):,} labels" in over["truncate"]
    assert f"{start}split" in over["split"] and f"longest has {max(long):,}" in over["split"]
    assert "cannot be used" not in over["split"]
    write(data / "unfit.jsonl", [{"question": "?", "answer": "a"}] * 2)
    found, printed = run(with_data(wanted, train=f"{data}/unfit.jsonl"), data)
    assert "STOPS 2 samples cannot be used" in texts(found) and "median" not in printed
    assert "epochs of the run" not in found.totals


def test_reasoning_that_is_left_out_and_padding_are_noticed(data: Path) -> None:
    template = load_model_processor("tiny:qwen3").chat_template.replace(
        "{%- if message.reasoning_content -%}", "{%- if message.reasoning_content and loop.last -%}"
    )
    turns = [
        {"role": role, "content": "a", **({"reasoning_content": "because"} if role == "assistant" else {})}
        for role in ("user", "assistant") * 3
    ]
    write(data / "thought.jsonl", [{"messages": turns}] * 5)
    wanted = with_data(settings(data), train=f"{data}/thought.jsonl", chat_template=template)
    assert "leaves out the reasoning of 10 assistant turns (67%)" in texts(run(wanted, data)[0])
    short = [{"text": "It is."}] * 200
    write(data / "short.jsonl", short)
    wanted = with_data(settings(data), train=f"{data}/short.jsonl", policy="zigzag")
    found, printed = run(replace(wanted, mesh=replace(wanted.mesh, dp_shard=1, ring=4)), data)
    assert re.search(r"[\d.]+% of the slots are padding on this mesh: samples are short", texts(found))
    assert "slots computed" in printed
    assert "slots are padding" not in texts(run(wanted, data)[0])


def test_sources_are_told_apart_and_mixed_as_in_a_run(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "cache"))
    mixed: Any = [
        {"path": f"{data}/text.jsonl", "weight": 3},
        {"path": f"{data}/pages.jsonl", "weight": 1, "format": "text"},
    ]
    found, printed = run(with_data(settings(data), train=mixed, over_long="split"), data)
    assert [(name, count) for name, count, *_ in found.per_source] == [
        ("text.jsonl", 60),
        ("pages.jsonl", 20),
    ]
    assert "75.0%" in printed and "text.jsonl" in printed
    assert sum(row[2] for row in found.per_source) == found.survey.numbers("length").sum()


def test_time_is_that_of_the_run_before(data: Path) -> None:
    wanted = replace(settings(data), out=str(data / "timed"))
    assert "unknown" in run(wanted, data)[0].totals["time of an epoch"]
    (data / "timed").mkdir()
    lines = [{"step": step, "tokens_per_s": 50.0, "time": 1.0} for step in range(3)]
    write(data / "timed" / "log.jsonl", lines)
    found = run(wanted, data)[0]
    tokens = sum(map(sum, found.survey.rows))
    assert found.totals["time of an epoch"].startswith(f"about 0:{tokens // 50 // 60:02d}:")


def test_what_cannot_be_shown_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = data / "refused.yaml"
    path.write_text(to_yaml(settings(data)))
    for arguments, reason in (
        (["--samples", "0"], "--samples=0 must be at least 1"),
        (["--row", "900"], "--row=900: an epoch has no such row"),
        (["--data.row_tokns=5"], "data.row_tokens"),
        ([f"--data.train={data}/none.jsonl"], "none.jsonl does not exist"),
    ):
        assert main(["inspect", str(path), *arguments]) == 2
        assert reason in capsys.readouterr().err
    assert main(["inspect", str(path), f"--data.train={data}/pages.jsonl"]) == 1  # as a run would stop
    assert main(["inspect", f"{data}/text.jsonl"]) == 2
    assert f"give it as --data.train={data}/text.jsonl" in capsys.readouterr().err
    assert main(["inspect", "--model=tiny:llama", f"--data.train={data}/text.jsonl"]) == 0  # all it needs
    assert "1 of 8,192 tokens" in capsys.readouterr().out
    parse_config([str(path)])
