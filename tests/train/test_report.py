"""The report of runs: whole in itself, true to the logs, and patient with what logs look like."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqbraid.cli import main
from seqbraid.train.log import current_records
from seqbraid.train.report.data import loss_difference, read_run, thinned
from seqbraid.train.report.page import write_report
from seqbraid.train.report.plot import BLUE, GREY, Mark, Series, line_plot
from seqbraid.train.report.summary import COLORS
from tests.helpers.png import read_png

SVG = "{http://www.w3.org/2000/svg}"


def make_run(folder: Path, losses: list[Any], **others: Any) -> Path:
    """A run with these losses, from step 1 on; `None` is a step without one."""
    folder.mkdir(parents=True)
    lines = []
    for step, loss in enumerate(losses, 1):
        record = {"step": step, "loss": loss, "grad_norm": 1.0, "time": 1000.0 + 2 * step, **others}
        lines.append(json.dumps({key: value for key, value in record.items() if value is not None}))
    (folder / "log.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


def append(run: Path, text: str) -> None:
    with (run / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)


def page_of(tmp_path: Path, *runs: Path) -> str:
    out = tmp_path / "new" / "report.html"
    write_report(runs, out)
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    return out.read_text(encoding="utf-8")


def plots(page: str) -> dict[str, ET.Element]:
    found = [ET.fromstring(svg) for svg in re.findall(r"<svg xmlns=.*?</svg>", page, re.DOTALL)]
    return {str(plot.findtext(f"{SVG}title")): plot for plot in found}


def curves(plot: ET.Element) -> dict[str, list[tuple[float, float]]]:
    return {
        curve.attrib["data-series"]: [
            (float(x), float(y)) for x, y in (point.split(",") for point in curve.attrib["points"].split())
        ]
        for curve in plot.iter(f"{SVG}polyline")
    }


class Text(HTMLParser):
    """Cells of tables, row by row, and every tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag: str) -> None:
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == first)


def test_a_run_is_drawn_and_summed_up(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", [4.0, 3.0, 2.5], lr=1e-4, tokens=1000, tokens_per_s=500.0, memory_gib=3.25,
        data_wait_s=0.0, padding=0.125, accuracy=0.5, pipeline_bubble=0.25, expert_load_max=1.5,
    )  # fmt: skip
    append(run, '{"step": 3, "eval_loss": 2.75, "time": 1008.0}\n')
    append(run, '{"step": 3, "event": "checkpoint", "seconds": 1.5, "time": 1008.5}\n')
    append(run, '{"step": 2, "event": "resumed", "time": 1009.0}\n')
    (run / "config.yaml").write_text("train:\n  lr: 1.0e-4\n")
    page = page_of(tmp_path, run)
    drawn = plots(page)
    assert set(drawn) == {
        "Loss", "Next-token accuracy", "Gradient norm", "Learning rate", "Speed", "Peak memory",
        "Waiting for data", "Padding", "Waiting for other pipeline stages", "Picks of the busiest expert",
    }  # fmt: skip
    loss = curves(drawn["Loss"])
    assert set(loss) == {"run", "run, eval"}
    (x0, y0), (x1, y1), (x2, y2) = loss["run"]
    assert x1 - x0 == pytest.approx(x2 - x1) and (y1 - y0) == pytest.approx(2 * (y2 - y1), abs=0.02)
    assert loss["run, eval"] == [(x2, pytest.approx((y1 + y2) / 2, abs=0.02))]
    assert len(list(drawn["Loss"].iter(f"{SVG}circle"))) == 1, "a single evaluation is a dot"
    marks = [
        mark.findtext(f"{SVG}title") for mark in drawn["Loss"].iter(f"{SVG}g") if mark.get("class") == "mark"
    ]
    assert marks == ["run: checkpoint at step 3", "run: resumed at step 2"]
    text = Text(page)
    heads, cells = text.rows[:2]
    assert dict(zip(heads, cells, strict=True)) == {
        "run": "run", "steps": "3", "last loss": "2.5000", "best eval loss": "2.7500 at 3",
        "accuracy": "50.0%", "tokens": "3 k", "tokens/s": "500", "memory": "3.25 GiB", "time": "0:00:07",
    }  # fmt: skip
    assert text.row("3")[1:3] == ["checkpoint", "seconds 1.5"]
    assert "lr: 1.0e-4" in page


def test_nothing_is_loaded_and_nothing_gets_in(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>&'\""
    runs = [make_run(tmp_path / part / "<b>run</b>".replace("/", "&"), [1.0, 2.0]) for part in ("a", "b")]
    append(runs[0], json.dumps({"step": 1, "event": evil, evil: evil, "time": 1.0}) + "\n")
    (runs[0] / "config.yaml").write_text(evil)
    page = page_of(tmp_path, *runs)
    without_names = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|@import|url\((?!#)", without_names)
    tags = Text(page).tags
    assert not tags & {"b", "img", "script", "link", "iframe", "object"}, "markup of a log is text"
    assert page.count("onerror") == page.count("&lt;img src=x onerror") >= 3
    assert set(curves(plots(page)["Loss"])) == {"a/<b>run<&b>", "b/<b>run<&b>"}, "told apart by their paths"


def test_runs_are_told_apart_and_compared(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", [4.0, 2.0, 1.0, 0.5])
    near = make_run(tmp_path / "near", [4.0, 2.0 * (1 - 1e-6), 1.0])
    late = make_run(tmp_path / "late", [])
    append(late, '{"step": 9, "loss": 1.0}\n')
    lost = make_run(tmp_path / "lost", [4.0, "NaN"])
    page = page_of(tmp_path, first, near, late, lost)
    strokes = {
        c.attrib["data-series"]: c.attrib["stroke"] for c in plots(page)["Loss"].iter(f"{SVG}polyline")
    }
    assert [strokes[name] for name in ("first", "near", "late", "lost")] == list(COLORS[:4])
    table = Text(page.split("<h2>Loss against first</h2>")[1])
    assert table.row("near")[1:] == ["3", "1e-06", "2"]
    assert table.row("late")[1:] == ["0", "–", "–"]
    assert table.row("lost")[1:] == ["2", "one is not finite", "2"]
    assert "Relative difference of the loss to first" in plots(page)
    same = Text(page_of(tmp_path / "same", first, first).split("<h2>Loss against")[1])
    assert next(row for row in same.rows if row[0].endswith("(2)"))[1:] == ["4", "0", "–"]


def test_a_difference_is_by_hand(tmp_path: Path) -> None:
    a = read_run(make_run(tmp_path / "a", [1.0, "NaN", 3.0, 0.0, "Infinity"]))
    b = read_run(make_run(tmp_path / "b", [1.5, "NaN", 3.0, 0.0, 1.0, 7.0]))
    difference = loss_difference(a, b)
    assert difference is not None
    assert difference.steps.tolist() == [1, 2, 3, 4, 5]
    assert difference.relative.tolist() == [0.5 / 1.5, 0.0, 0.0, 0.0, math.inf]


def test_logs_as_they_come(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [5.0, 4.0, "NaN", 3.0, None])
    append(
        run, '{"step": 6, "loss": 2.0}\nnot json\n[1]\n{"step": "x", "loss": 1}\n{"step": 7, "loss": null}\n'
    )
    append(run, '{"step": 8, "loss": "-Infinity"}\n{"step": 9, "lo')
    drawn = curves(plots(page_of(tmp_path, run))["Loss"])["run"]
    assert len(drawn) == 4
    loss = read_run(run).curves["loss"]
    assert loss.steps.tolist() == [1, 2, 3, 4, 6, 8]
    # A log that goes back, as one that was not rewound, counts from there.
    append(run, 's": 1}\n{"step": 2, "loss": 40.0}\n')
    assert read_run(run).curves["loss"].values.tolist() == [5.0, 40.0]


DIGITS = "1" + "0" * 400
BROKEN = {
    "not JSON": ["loss went up", "{", '{"step": 3, "loss": 1', "[" * 100_000, '{"a":' * 100_000],
    "not an object": ["[1]", "3", "null", '"step"'],
    "step of the wrong type": [
        '{"loss": 1.0}', '{"step": "x", "loss": 1.0}', '{"step": null}', '{"step": 1.5}', '{"step": true}',
        '{"step": -1, "loss": 1.0}', f'{{"step": {DIGITS}, "loss": 1.0}}', '{"event": "resumed"}',
        '{"event": "resumed", "step": "x"}', '{"event": "checkpoint", "step": ' + DIGITS + "}",
    ],
}  # fmt: skip
ODD = [
    f'"loss": {DIGITS}', f'"loss": -{DIGITS}', '"loss": 1.7e308', '"loss": -1.7e308', '"loss": {}',
    '"loss": "low"', '"loss": [1.0]', '"loss": true', '"lr": -1e308', '"lr": 1e308', '"tokens": 1e308',
    '"grad_norm": 5e-324', '"grad_norm": 0.0', '"tokens_per_s": 1e308', '"accuracy": 1e308',
    '"mfu": -1e308', '"loss": 1.0, "time": 1e300', '"loss": 1.0, "time": -1e300', '"time": "noon"',
    '"event": null', '"event": ["x"]', '"event": "x", "time": 1e300', '"event": "\\ud800", "\\ud800": 1',
]  # fmt: skip
"""What may stand beside a step that is one."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", BROKEN)
def test_lines_that_are_no_records_are_counted_and_a_log_of_no_others_is_refused(
    kind: str, tmp_path: Path
) -> None:
    run, none = make_run(tmp_path / "run", [5.0, 4.0]), make_run(tmp_path / "none", [])
    for line in BROKEN[kind]:
        append(run, line + "\n")
        append(none, line + "\n")
    append(run, '{"step": 3, "lo')  # being written just now
    text = Text(page_of(tmp_path, run))
    cells = dict(zip(*text.rows[:2], strict=True))
    assert cells["unreadable lines"] == str(len(BROKEN[kind])) and cells["steps"] == "2"
    assert [record["step"] for record in current_records(run / "log.jsonl")] == [1, 2]
    message = f"none/log.jsonl is not the log of a run: of its {len(BROKEN[kind])} lines none is JSON"
    with pytest.raises(ValueError, match=message):
        write_report([run, none], tmp_path / "x.html")


@pytest.mark.filterwarnings("error")
def test_values_that_no_run_logs_break_no_page(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{n}", [5.0, 4.0]) for n in range(len(ODD))]
    for run, odd in zip(runs, ODD, strict=True):
        for step in (3, 4):
            append(run, f'{{"step": {step}, {odd}}}\n')
    alone = [make_run(tmp_path / f"alone{n}", []) for n in range(len(ODD))]
    for run, odd in zip(alone, ODD, strict=True):
        append(run, f'{{"step": 3, {odd}}}\n')
    for several in [[run] for run in (*runs, *alone)] + [runs + alone]:
        for plot in plots(page_of(tmp_path, *several)).values():
            for points in curves(plot).values():
                assert all(math.isfinite(x) and math.isfinite(y) for x, y in points)


def test_a_report_that_cannot_be_read_or_written_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", [2.0])
    folder = tmp_path / "folder"
    (folder / "log.jsonl").mkdir(parents=True)
    for paths, message in (
        ([str(folder)], "has no log.jsonl"),
        ([str(run), str(tmp_path / "nowhere")], "has no log.jsonl"),
        ([str(run), "--out", str(run / "log.jsonl" / "x.html")], "cannot be written"),
    ):
        assert main(["report", *paths]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("seqbraid report: ") and message in line


def test_a_run_without_steps_is_a_row_and_one_without_log_is_refused(tmp_path: Path) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "young", []))
    assert not plots(page) and Text(page).row("young")[1] == "0"
    (tmp_path / "none").mkdir()
    for missing in (tmp_path / "none", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"no log\.jsonl"):
            write_report([missing], tmp_path / "x.html")
    with pytest.raises(ValueError, match="at least one"):
        write_report([], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


@given(st.integers(1, 3000), st.integers(0, 2**31), st.integers(6, 300))
def test_thinning_keeps_ends_and_extremes(length: int, seed: int, most: int) -> None:
    y = np.random.default_rng(seed).normal(size=length)
    x, kept = thinned(np.arange(length) * 2.0, y, most)
    assert len(x) == len(kept) <= max(most, 0) or length <= most
    assert x == sorted(set(x)) and (x[0], x[-1]) == (0.0, 2.0 * (length - 1))
    assert (min(kept), max(kept)) == (y.min(), y.max())
    assert all(y[int(place / 2)] == value for place, value in zip(x, kept, strict=True))


def test_long_runs_stay_small(tmp_path: Path) -> None:
    losses = np.random.default_rng(0).normal(5, 1, 20_000)
    losses[12_345] = 90.0
    page = page_of(tmp_path, make_run(tmp_path / "long", losses.tolist()))
    loss = curves(plots(page)["Loss"])
    assert len(loss["long"]) <= 2000 and 100 <= len(loss["long, mean"]) <= 200
    assert len([1 for _, y in loss["long"] if y < 60]) == 1, "the one spike is drawn"
    assert len(page) < 300_000


def test_marks_beside_the_curves_are_left_out() -> None:
    series = [Series("a", [1, 2, 3], [1, 2, 3], BLUE)]
    marks = [Mark(x, f"at {x}", GREY, across=x < 3) for x in (0, 2, 3, 9)]
    drawing = ET.fromstring(line_plot("t", series, "x", "y", marks=marks, legend=False))
    found = [group for group in drawing.iter(f"{SVG}g") if group.get("class") == "mark"]
    assert [group.findtext(f"{SVG}title") for group in found] == ["at 2", "at 3"]
    assert not [group for group in drawing.iter(f"{SVG}g") if group.get("class") == "legend"]


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="there is no chromium on the PATH to draw the page"
)
def test_a_browser_draws_every_run(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{n}", [4.0 + n, 3.0 + n, 2.5 + n]) for n in range(3)]
    page_of(tmp_path, *runs)
    shot = tmp_path / "shot.png"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--screenshot={shot}", "--window-size=1000,700", f"--user-data-dir={tmp_path / 'user'}"]
    subprocess.run(
        [*command, (tmp_path / "new" / "report.html").as_uri()], check=True, timeout=120, capture_output=True
    )
    pixels = read_png(shot).astype(int)
    for color in COLORS[:3]:
        ink = (abs(pixels - list(bytes.fromhex(color[1:]))) < 45).all(axis=2)[350:]
        columns = ink.any(axis=0).nonzero()[0]
        assert columns.max() - columns.min() > 600, "the curve goes over the width of the plot"


def test_a_file_that_is_no_report_is_replaced_only_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = make_run(tmp_path / "run", [2.0, 1.0]), tmp_path / "notes.html"
    command = ["report", str(run), "--out", str(out)]
    out.write_text("mine")
    assert main(command) == 2 and out.read_text() == "mine"
    assert "is not a report" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, replaced in (("", False), ("n", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert main(command) == (0 if replaced else 2)
        assert (out.read_text() != "mine") == replaced
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(command) == 0  # ours is replaced unasked
    out.write_text("mine")
    assert main([*command, "--force"]) == 0 and out.read_text() != "mine"
    assert main(["report", str(run), "--out", str(tmp_path)]) == 2
