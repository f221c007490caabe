"""Plots: what is drawn lies where its values are."""

from __future__ import annotations

import math
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seqbraid.train.report.plot import (
    BLUE,
    BOTTOM,
    HEIGHT,
    LEFT,
    ORANGE,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    data_range,
    line_plot,
    linear_ticks,
    log_ticks,
    tick_label,
)

SVG = "{http://www.w3.org/2000/svg}"


def points(svg: str) -> dict[str, list[tuple[float, float]]]:
    """The corners of each curve, by the name of its series."""
    found = {}
    for curve in ET.fromstring(svg).iter(f"{SVG}polyline"):
        pairs = [pair.split(",") for pair in curve.attrib["points"].split()]
        found[curve.attrib["data-series"]] = [(float(x), float(y)) for x, y in pairs]
    return found


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_points_are_proportional_to_their_values() -> None:
    series = [Series("a", [0, 10, 20], [0.0, 1.0, 4.0], BLUE), Series("b", [0, 20], [4.0, 0.0], ORANGE)]
    found = points(line_plot("two", series, "step", "loss"))
    (x0, y0), (x1, y1), (x2, y2) = found["a"]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02) and x2 > x0
    assert (y0 - y1) / (y0 - y2) == pytest.approx(0.25, abs=1e-3) and y2 < y0
    assert found["b"] == [(x0, y2), (x2, y0)]
    assert (x0, y0) == (LEFT, HEIGHT - BOTTOM) and (x2, y2) == (WIDTH - RIGHT, TOP), "they fill the plot"


def test_a_decade_is_as_high_as_the_next_and_zero_lies_on_the_edge() -> None:
    found = points(line_plot("d", [Series("a", range(4), [1e-7, 1e-5, 1e-3, 0.0], BLUE)], "x", "y", log=True))
    y = [y for _, y in found["a"]]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.02) and y[2] < y[0]
    assert y[3] == y[0]


def test_names_titles_and_ticks_are_written() -> None:
    series = [
        Series("one <process>", [1, 300], [0.4, 2.8], BLUE),
        Series("ranks", [1, 300], [0.4, 2.8], ORANGE),
    ]
    written = texts(line_plot("Loss & more", series, "step", "nats"))
    assert {"Loss & more", "one <process>", "ranks", "step", "nats", "50", "300", "2.5"} <= set(written)


@settings(max_examples=500)
@example(1.0, 140001.0)  # between seven steps of 20,000 and three of 50,000
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_linear_ticks_are_round_few_and_inside(low: float, size: float) -> None:
    high = low + size
    if high - low < 1e-9 * abs(high):
        return
    ticks = linear_ticks(low, high)
    slack = 1e-6 * size
    assert 3 <= len(ticks) <= 8 and all(low - slack <= tick <= high + slack for tick in ticks)
    step = ticks[1] - ticks[0]
    leading = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(leading - factor) for factor in (1, 2, 5)) < 1e-3


def test_ticks_by_hand() -> None:
    assert linear_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert log_ticks(1e-8, 1e-4) == pytest.approx([1e-8, 1e-7, 1e-6, 1e-5, 1e-4])
    assert log_ticks(0.1, 1) == pytest.approx([0.1, 0.2, 0.5, 1.0])
    assert len(log_ticks(1e-30, 1.0)) <= 8
    assert data_range([3e-7, 2e-5, 0.0], log=True) == pytest.approx((1e-7, 1e-4))
    assert data_range([0.3, 2.8], log=False) == (0.0, 2.8)
    assert [tick_label(v) for v in (0, 0.05, 1200, 1e-7, 2e-12, 2.5)] == [
        "0",
        "0.05",
        "1,200",
        "10⁻⁷",
        "2·10⁻¹²",
        "2.5",
    ]


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ([], "at least one series"),
        ([Series("a", [1, 2], [1], BLUE)], "2 x and 1 y"),
        ([Series("a", [1], [math.nan], BLUE)], "nan"),
    ],
)
def test_what_cannot_be_drawn_is_refused(series: list[Series], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        line_plot("t", series, "x", "y")


@pytest.mark.parametrize("log", [False, True])
def test_a_single_value_is_drawn(log: bool) -> None:
    for value in (0.0, 1.0, 3e-9):
        ((x, y),) = points(line_plot("t", [Series("a", [1], [value], BLUE)], "x", "y", log=log))["a"]
        assert math.isfinite(x) and math.isfinite(y)
