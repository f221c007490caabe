"""Line plots as SVG: axes with round ticks, a legend, linear or logarithmic.

Text and axes take the colour of the page around them, and the colours of the curves stand out from white and
from black, so that a plot fits a light page and a dark one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

BLUE, ORANGE, GREEN, GREY = "#2f86d1", "#e8871a", "#1f9e78", "#8a94a0"

WIDTH, HEIGHT = 880, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 18, 64, 46
LEGEND_HEIGHT = 26
FONT = "system-ui, sans-serif"
MOST_TICKS = 7
SMALLEST = 1e-100
"""What is below is drawn as 0 is."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Series:
    """A curve; where two lie on each other, a wide one below a thin one lets both be seen."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    width: float = 1.6
    dash: str = ""
    """Lengths of strokes and gaps, as SVG has them; solid when empty."""
    dots: bool = False
    """A dot at each point, as a curve of few points wants; a single point always has one."""
    opacity: float = 1.0
    """Below 1, a noisy curve lets one above it be seen."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at an x: a line across the plot, or a tick on its edge."""

    x: float
    name: str
    """Shown when the pointer rests on it."""
    color: str
    across: bool = True


@dataclass(frozen=True)
class PlotAxis:
    """A range of values along some pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value; what lies outside, as 0 does of a logarithmic axis, is put on the edge."""
        value = min(max(value, self.low), self.high)
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round values within the range."""
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def line_plot(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log: bool = False,
    y_range: tuple[float, float] | None = None,
    marks: Sequence[Mark] = (),
    legend: bool = True,
) -> str:
    """An SVG of curves over a common x.

    Args:
        title: above the plot, and its name for screen readers.
        series: one or more curves, the first drawn first.
        x_label: what the x axis counts.
        y_label: what the y axis measures.
        log: a logarithmic y axis; what is not above 0, or hardly, lies on its lower edge.
        y_range: the ends of the y axis; from the data when left out.
        marks: what happened along the x axis; those beside the curves are left out.
        legend: names and colours below the title; where a page has them once, a plot can do without.

    >>> svg = line_plot("squares", [Series("n²", [0, 1, 2], [0, 1, 4], BLUE)], "n", "value")
    >>> svg.count("<polyline")
    1
    """
    _check(series)
    x_values = [float(x) for one in series for x in one.x]
    y_values = [float(y) for one in series for y in one.y]
    x_axis = PlotAxis(*_widened(min(x_values), max(x_values)), LEFT, WIDTH - RIGHT)
    top = TOP if legend else TOP - LEGEND_HEIGHT
    y_axis = PlotAxis(*(y_range or data_range(y_values, log)), HEIGHT - BOTTOM, top, log)

    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    root.attrib |= {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "font-family": FONT, "font-size": "12"}
    _add(root, "title", title)
    page = _add(root, "g", fill="currentColor")
    _add(page, "text", title, x=LEFT, y=20, font_size=15, font_weight=600)
    _draw_axes(page, x_axis, y_axis, x_label, y_label)
    if legend:
        _draw_legend(page, series)
    _draw_marks(root, [mark for mark in marks if x_axis.low <= mark.x <= x_axis.high], x_axis, y_axis)
    for one in series:
        points = " ".join(
            f"{x_axis.place(x):.2f},{y_axis.place(y):.2f}" for x, y in zip(one.x, one.y, strict=True)
        )
        curve = _add(root, "polyline", points=points, fill="none", stroke=one.color, stroke_width=one.width)
        curve.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "round", "data-series": one.name}
        if one.dash:
            curve.set("stroke-dasharray", one.dash)
        if one.opacity < 1:
            curve.set("stroke-opacity", f"{one.opacity:g}")
        if one.dots or len(one.x) == 1:
            dots = _add(root, "g", fill=one.color)
            for x, y in zip(one.x, one.y, strict=True):
                _add(dots, "circle", cx=x_axis.place(x), cy=y_axis.place(y), r=one.width + 1)
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode")


def linear_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within the range, as many as are read at ease."""
    power = 10.0 ** math.floor(math.log10((high - low) / MOST_TICKS))
    for step in (power, 2 * power, 5 * power, 10 * power):
        ticks = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        if len(ticks) <= MOST_TICKS + 1:
            break
    return [n * step for n in ticks]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within the range, some left out where there are many, 2 and 5 times them where few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        return [10.0**n for n in range(first, last + 1, 1 + (last - first) // MOST_TICKS)]
    fine = [factor * 10.0**n for n in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [value for value in fine if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def data_range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """A range with room for all values, its ends round where the axis is logarithmic."""
    if not log:
        low, high = _widened(min(values), max(values))
        return (0.0 if 0 <= low < high / 2 else low), high
    positive = [value for value in values if value > SMALLEST] or [1.0]
    low, high = (10.0**n for n in (_floor_log(min(positive)), -_floor_log(1 / max(positive))))
    return low, max(high, 10 * low)


def tick_label(value: float) -> str:
    """A short number: 0.05, 1,200, 10⁻⁷, 2·10⁻⁷."""
    if value and not 1e-3 <= abs(value) < 1e6:
        factor, power = f"{value:.0e}".split("e")
        return f"{factor}·10".removeprefix("1·") + str(int(power)).translate(SUPERSCRIPTS)
    return f"{value:,.10g}" if abs(value) >= 1 else f"{value:.6g}"


def _floor_log(value: float) -> int:
    return math.floor(math.log10(value) + 1e-9)


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range of one value becomes one that can be drawn."""
    if high - low > SMALLEST:
        return low, high
    room = 0.5 * (abs(low) if abs(low) > SMALLEST else 1.0)
    return low - room, high + room


def _check(series: Sequence[Series]) -> None:
    if not series:
        raise ValueError("a plot needs at least one series")
    for one in series:
        if len(one.x) != len(one.y) or not len(one.x):
            raise ValueError(
                f"series {one.name!r} has {len(one.x)} x and {len(one.y)} y; give as many, not 0"
            )
        bad = [value for value in (*one.x, *one.y) if not math.isfinite(value)]
        if bad:
            raise ValueError(f"series {one.name!r} holds {bad[0]}, which cannot be drawn; leave it out")


def _draw_axes(page: ET.Element, x_axis: PlotAxis, y_axis: PlotAxis, x_label: str, y_label: str) -> None:
    grid = _add(page, "g", stroke="currentColor", stroke_opacity=0.16)
    names = _add(page, "g", fill_opacity=0.75)
    for value in y_axis.ticks:
        y = y_axis.place(value)
        _add(grid, "path", d=f"M{x_axis.start:g} {y:.2f}H{x_axis.stop:g}")
        _add(names, "text", tick_label(value), x=LEFT - 9, y=y + 4, text_anchor="end")
    for value in x_axis.ticks:
        x = x_axis.place(value)
        _add(grid, "path", d=f"M{x:.2f} {y_axis.start:g}v5")
        _add(names, "text", tick_label(value), x=x, y=HEIGHT - BOTTOM + 19, text_anchor="middle")
    _add(grid, "path", d=f"M{x_axis.start:g} {y_axis.start:g}H{x_axis.stop:g}", stroke_opacity=0.6)
    middle = (x_axis.start + x_axis.stop) / 2
    _add(names, "text", x_label, x=middle, y=HEIGHT - 8, text_anchor="middle")
    middle = (y_axis.start + y_axis.stop) / 2
    turned = {"transform": f"rotate(-90 16 {middle:g})", "text-anchor": "middle"}
    _add(names, "text", y_label, x=16, y=middle + 4).attrib.update(turned)


def _draw_legend(page: ET.Element, series: Sequence[Series]) -> None:
    """A line of names below the title, where no curve can be behind it."""
    legend = _add(page, "g", class_="legend")
    # Six pixels and a half per letter are more than letters of this size take in usual fonts.
    widths = [46 + 6.5 * len(one.name) for one in series]
    for i, one in enumerate(series):
        x = LEFT + sum(widths[:i])
        line = _add(legend, "path", d=f"M{x:g} 39h24", stroke=one.color, stroke_width=one.width)
        if one.dash:
            line.set("stroke-dasharray", one.dash)
        _add(legend, "text", one.name, x=x + 31, y=43)


def _draw_marks(root: ET.Element, marks: Sequence[Mark], x_axis: PlotAxis, y_axis: PlotAxis) -> None:
    """Below the curves, each with a wider, unseen line that the pointer finds."""
    for mark in marks:
        x = f"{x_axis.place(mark.x):.2f}"
        group = _add(root, "g", stroke=mark.color, class_="mark")
        _add(group, "title", mark.name)
        if mark.across:
            line = _add(group, "path", d=f"M{x} {y_axis.start:g}V{y_axis.stop:g}", stroke_opacity=0.8)
            line.set("stroke-dasharray", "3 4")
        else:
            _add(group, "path", d=f"M{x} {y_axis.start:g}v-7", stroke_width=2, stroke_opacity=0.8)
        _add(group, "path", d=f"M{x} {y_axis.start:g}V{y_axis.stop:g}", stroke_width=9, stroke_opacity=0)


def _add(parent: ET.Element, tag: str, text: str | None = None, /, **attributes: str | float) -> ET.Element:
    """Append an element; `font_size` stands for the attribute `font-size`, `class_` for `class`."""
    element = ET.SubElement(parent, tag)
    element.text = text
    for name, value in attributes.items():
        number = f"{value:.7g}" if isinstance(value, float) else str(value)
        element.set(name.rstrip("_").replace("_", "-"), number)
    return element
