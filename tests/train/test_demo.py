"""The demo, for a few steps on two ranks: its curves, its verdict, and its report on a page."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from seqbraid.cli import main
from seqbraid.layout import SequenceLayout
from seqbraid.layout.render import layout_svg
from seqbraid.train.demo import run as demo
from seqbraid.train.demo.digits import Digits, make_sample
from seqbraid.train.demo.page import ALONE_COLOR, SPLIT_COLOR, demo_report
from seqbraid.train.demo.pictures import mark_images
from seqbraid.train.demo.result import DemoResult
from seqbraid.train.demo.training import Outcome, Settings
from tests.helpers.png import read_png

STEPS = 4
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    return demo.train_both_ways(Settings(STEPS, 0, 2, tmp_path_factory.mktemp("demo")))


def test_ranks_and_one_process_have_the_same_losses(result: DemoResult) -> None:
    assert [len(run.losses) for run in (result.split, result.alone, result.backwards)] == [STEPS] * 3
    assert max(result.differences) < 1e-4
    assert result.curves_agree
    losses = result.alone.losses
    assert abs(losses[0] - losses[-1]) > 1e-2, "nothing was learnt, so nothing was compared"


def test_stock_transformers_reads_the_checkpoint_and_the_digits(result: DemoResult) -> None:
    assert len(result.split.predictions) == len(result.held_out) == 297
    same = sum(a == b for a, b in zip(result.split.predictions, result.stock_predictions, strict=True))
    assert same >= 296, "but for a tie, the packed model reads what the stock model reads"
    right = sum(a == b for a, b in zip(result.split.predictions, result.held_out.labels, strict=True))
    assert result.accuracy == pytest.approx(right / 297)
    assert result.split.accuracy[-1][0] == STEPS


def finished(split: list[float], floor: list[float], accuracy: float) -> DemoResult:
    """A result with these relative differences and this accuracy, of ten digits."""
    alone = [1.0] * len(split)
    trained = [
        Outcome([1.0 + d for d in differences], 1.0, [(len(alone), accuracy)], list(range(10)))
        for differences in (split, [0.0] * len(split), floor)
    ]
    digits = Digits(torch.full((10, 8, 8), 16.0), torch.arange(10))
    return DemoResult(
        Settings(len(split), 0, 4, Path("out")), *trained, digits, list(range(10)), 700_000, 2.0
    )


@pytest.mark.parametrize(
    ("split", "floor", "accuracy", "status"),
    [
        ([1e-7, 1e-6, 4e-4], [0.0, 1e-6, 5e-5], 0.95, 0),
        ([1e-7, 1e-6, 4e-4], [0.0, 1e-6, 5e-5], 0.89, 1),
        ([1e-7, 1e-6, 6e-4], [0.0, 1e-6, 5e-5], 0.95, 1),
        # A defect at the first step is not excused by what rounding becomes later.
        ([1e-4, 1e-6, 1e-5], [0.0, 1e-6, 5e-5], 0.95, 1),
    ],
)
def test_the_exit_status_is_the_verdict(
    split: list[float],
    floor: list[float],
    accuracy: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(demo, "train_both_ways", lambda settings: finished(split, floor, accuracy))
    assert main(["demo", "--out", str(tmp_path / "new")]) == status
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--processes", "0"]])
def test_nothing_to_do_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_the_report_is_whole_in_itself(result: DemoResult) -> None:
    page = demo_report(result)
    without_names = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|url\((?!#)", without_names)
    drawings = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    curves = [curve for drawing in drawings for curve in drawing.iter(f"{SVG}polyline")]
    by_name = {curve.attrib["data-series"]: len(curve.attrib["points"].split()) for curve in curves}
    assert by_name["one process, each sample alone"] == by_name["2 ranks, packed"] == STEPS
    assert by_name["2 ranks against one process"] == STEPS
    assert by_name["held-out digits read right"] == len(result.split.accuracy)
    assert f"{result.accuracy:.1%}" in page and f"{max(result.differences):.1e}" in page
    assert f"seqbraid demo --steps {STEPS} --seed 0 --processes 2 --out {result.settings.out}" in page
    assert f"torch {torch.__version__}" in page


def test_image_tokens_are_marked_where_they_lie() -> None:
    row = [make_sample(Digits(torch.zeros(n, 8, 8), torch.zeros(n, dtype=torch.long))) for n in (30, 4)]
    layout = SequenceLayout([210, 28], ring=2)
    drawing = ET.fromstring(mark_images(layout_svg(layout), row))
    (band,) = (group for group in drawing.iter(f"{SVG}g") if group.get("class") == "row")
    segments = [rect.attrib for rect in band if "data-start" in rect.attrib]
    marks = [rect.attrib for rect in band if rect.get("class") == "image"]
    scale = float(segments[0]["width"]) / (int(segments[0]["data-stop"]) - int(segments[0]["data-start"]))
    left = min(float(segment["x"]) for segment in segments)
    marked = {
        round((float(mark["x"]) - left) / scale) + i
        for mark in marks
        for i in range(round((float(mark["width"]) + 0.6) / scale))
    }
    assert marked == {7 * digit + 1 + i for digit in range(34) for i in range(4)}


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="there is no chromium on the PATH to draw the page"
)
def test_a_browser_draws_both_curves(result: DemoResult, tmp_path: Path) -> None:
    # Curves apart from each other, so that neither can hide behind the other.
    apart = replace(result, split=replace(result.split, losses=[0.8 * loss for loss in result.split.losses]))
    page, shot = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(demo_report(apart), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [
        f"--screenshot={shot}",
        "--window-size=1000,2600",
        f"--user-data-dir={tmp_path}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    pixels = read_png(shot)
    assert pixels.shape == (2600, 1000, 3)
    paper = (pixels == pixels[0, 0]).all(axis=2)
    assert 0.3 < paper.mean() < 0.97, "a page with text and drawings on it"
    alone, split = (
        # Edges are mixed with the paper: near is enough, but not so near that red or grey letters count.
        (abs(pixels.astype(int) - list(bytes.fromhex(color[1:]))) < 45).all(axis=2)
        for color in (ALONE_COLOR, SPLIT_COLOR)
    )
    # Other drawings have these colours too: only the first plot counts, from its legend down to its axis.
    top = alone.any(axis=1).argmax()
    for ink, least in ((alone[top : top + 260], 1500), (split[top : top + 260], 300)):
        assert ink.sum() > least, f"{ink.sum()} pixels"
        columns = ink.any(axis=0).nonzero()[0]
        assert columns.max() - columns.min() > 600, "the curve goes over the width of the plot"
