"""How a layout is shown to a person: a table for the terminal, a drawing for a page.

In both, a sequence has one colour: strong where it is split over ranks, pale where it is whole on one.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from .layout import Segment, SequenceLayout

if TYPE_CHECKING:
    from rich.table import Table

HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""The colours of Okabe and Ito, which colour-blind readers tell apart; grey is left to padding."""
PALE_HUES = ("#99c7e0", "#f5d999", "#99d8c7", "#ebc9dc", "#bbe1f6", "#eebf99", "#f9f4b3")
"""The same, three fifths white."""
INK, SOFT, RULE, PAPER = "#1b2430", "#5d6b7a", "#cdd4dc", "#ffffff"

TABLE_SEGMENTS = 8
"""How many segments of a rank a table names before it counts the rest."""


def layout_table(layout: SequenceLayout) -> Table:
    """A row per rank: what it holds, its real tokens, its padding, its attention cost over the mean."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{_headline(layout)}\n{_settings(layout)}",
        caption="\n".join(_summary(layout)),
        box=box.SIMPLE_HEAD,
    )
    for name in ("rank", "ring", "ulysses"):
        table.add_column(name, justify="right")
    table.add_column("holds #sequence[start:stop)", overflow="fold")
    for name in ("tokens", "padding", "cost/mean"):
        table.add_column(name, justify="right", no_wrap=True)
    fills = _fills(layout)
    for rank, (tokens, cost) in enumerate(zip(_rank_tokens(layout), _relative_costs(layout), strict=True)):
        held = layout.segments(rank)
        holds = Text(" ").join(
            Text(_name(segment), style=f"{_ink(fills[segment.sequence])} on {fills[segment.sequence]}")
            for segment in held[:TABLE_SEGMENTS]
        )
        if len(held) > TABLE_SEGMENTS:
            holds.append(f" +{len(held) - TABLE_SEGMENTS:,} more", style="italic")
        ring_rank, ulysses_rank = divmod(rank, layout.ulysses)
        padding = layout.num_local_tokens - tokens
        numbers = (f"{tokens:,}", f"{padding:,}", f"{cost:.2f}×")
        table.add_row(str(rank), str(ring_rank), str(ulysses_rank), holds, *numbers)
    return table


# The drawing, in pixels. From left to right: the names of the ranks, their slots, their tokens, their cost.
WIDTH, MARGIN = 1200, 28
BANDS_X, ROW_WIDTH, LANE_WIDTH = 140, 1032, 720
TOKENS_END, COST_X, COST_WIDTH = 950, 980, 130
ROW_HEIGHT, LANE_HEIGHT, LANE_STEP, RING_GAP = 36, 28, 34, 8
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
HATCHING = "seqbraid-padding"


def layout_svg(layout: SequenceLayout, title: str | None = None) -> str:
    """Draw a layout as a self-contained SVG: the row as it is packed, and below it what each rank holds.

    >>> drawing = layout_svg(SequenceLayout([900, 300, 40], ring=2, ulysses=2), title="Three sequences")
    >>> drawing.count('class="lane"')
    4
    """
    heading = _printable(_headline(layout) if title is None else title)
    settings, summary = f"{_settings(layout)} · {_lengths(layout)}", " · ".join(_summary(layout))
    top = 256
    bottom = top + _lane_y(layout, layout.num_ranks - 1) + LANE_HEIGHT
    height = bottom + 84
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img", viewBox=f"0 0 {WIDTH} {height}")
    root.attrib |= {"width": str(WIDTH), "height": str(height)}
    _add(root, "title", heading)
    _add(root, "desc", f"{settings}. {summary}.")
    pattern = _add(_add(root, "defs"), "pattern", id=HATCHING, width=6, height=6)
    pattern.attrib |= {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    _add(pattern, "rect", width=6, height=6, fill="#eef1f4")
    _add(pattern, "rect", width=1.6, height=6, fill="#b4bdc7")
    # A background of its own: the page that shows the drawing may be dark.
    _add(root, "rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=10, fill=PAPER, stroke=RULE)
    page = _add(root, "g", font_family=FONT, font_size=12, fill=INK)
    _add(page, "text", _shortened(heading, 20), x=MARGIN, y=44, font_size=20, font_weight=700)
    _add(page, "text", _shortened(settings, 13), x=MARGIN, y=66, font_size=13, fill=SOFT)
    _draw_row(page, layout, top=140)
    _draw_ranks(page, layout, top, bottom)
    _draw_legend(page, layout, y=102)
    _add(page, "text", summary, x=BANDS_X, y=bottom + 56, font_size=13)
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"


def _draw_row(page: ET.Element, layout: SequenceLayout, top: float) -> None:
    """The sequences in row order, and on every chunk of them the rank that holds it."""
    about = "#n is sequence n; the number on a chunk is the rank that holds it"
    _add_head(page, top - 38, "The packed row", about)
    fills = _fills(layout)
    scale = ROW_WIDTH / layout.num_tokens
    row = _add(page, "g", class_="row")
    marks = _add(page, "g", text_anchor="middle")
    starts = list(accumulate(layout.lengths, initial=0))
    for i, length in enumerate(layout.lengths):
        names = (f"#{i} · {_count(length, 'token')}", f"#{i} · {length:,}", f"#{i}")
        middle = BANDS_X + (starts[i] + length / 2) * scale
        _write_fitting(marks, names, length * scale, 12, x=middle, y=top - 10, font_weight=600)
    chunks = sorted(segment for rank in range(layout.num_ranks) for segment in layout.segments(rank))
    for chunk in chunks:
        x, room = BANDS_X + (starts[chunk.sequence] + chunk.start) * scale, chunk.num_tokens * scale
        fill = fills[chunk.sequence]
        _add_segment(row, chunk, x=x, y=top, width=room, height=ROW_HEIGHT, fill=fill)
        ranks = (f"rank {chunk.rank}", f"{chunk.rank}")
        _write_fitting(marks, ranks, room, 12, x=x + room / 2, y=top + ROW_HEIGHT / 2 + 4, fill=_ink(fill))
    num_chunks = Counter(chunk.sequence for chunk in chunks)
    for before, after in pairwise(chunks):
        x = BANDS_X + (starts[after.sequence] + after.start) * scale
        if before.sequence != after.sequence:
            room = min(layout.lengths[before.sequence], layout.lengths[after.sequence]) * scale
            _add_rule(marks, x, top, ROW_HEIGHT, PAPER, min(2.5, room / 4))
        else:
            room = layout.lengths[after.sequence] / num_chunks[after.sequence] * scale
            over = 5 if room > 10 else 0
            _add_rule(marks, x, top - over, ROW_HEIGHT + 2 * over, INK, min(1.2, room / 8))
    _draw_axis(page, top + ROW_HEIGHT + 7, layout.num_tokens, ROW_WIDTH, "tokens of the row")


def _draw_ranks(page: ET.Element, layout: SequenceLayout, top: int, bottom: int) -> None:
    """A lane per rank: its slots in local order, its tokens and its attention cost."""
    slots = layout.num_local_tokens
    about = f"{_count(slots, 'slot')} each, in the order in which a rank holds them"
    _add_head(page, top - 18, "The ranks", about)
    _add(page, "text", "tokens", x=TOKENS_END, y=top - 18, text_anchor="end", font_weight=600)
    _add(page, "text", "attention cost / mean", x=COST_X, y=top - 18, font_weight=600)
    fills, costs = _fills(layout), _relative_costs(layout)
    mean_width = COST_WIDTH / max(1.25, *costs)
    mean_x = COST_X + mean_width
    for rank, (tokens, cost) in enumerate(zip(_rank_tokens(layout), costs, strict=True)):
        y = top + _lane_y(layout, rank)
        ring_rank, ulysses_rank = divmod(rank, layout.ulysses)
        lane = _add(page, "g", class_="lane", data_rank=rank)
        _add(lane, "text", f"rank {rank}", x=MARGIN, y=y + 12, font_size=13, font_weight=600)
        coordinates = f"ring {ring_rank} · ulysses {ulysses_rank}"
        _add(lane, "text", coordinates, x=MARGIN, y=y + 25, font_size=10, fill=SOFT)
        _draw_slots(lane, layout, rank, y, fills)
        numbers = _add(lane, "g", text_anchor="end", font_size=13)
        _add(numbers, "text", f"{tokens:,}", x=TOKENS_END, y=y + (18 if tokens == slots else 13))
        if tokens < slots:
            padding = f"+{slots - tokens:,} pad"
            _add(numbers, "text", padding, x=TOKENS_END, y=y + 25, font_size=10, fill=SOFT)
        _add(numbers, "text", f"{cost:.2f}×", x=WIDTH - MARGIN, y=y + 18)
        bar: dict[str, str | float] = {"class_": "cost", "y": y + 8, "height": 12}
        _add(lane, "rect", x=COST_X, width=min(cost, 1) * mean_width, fill="#8393a5", **bar)
        if cost > 1:
            _add(lane, "rect", x=mean_x, width=(cost - 1) * mean_width, fill="#d55e00", **bar)
    _add_rule(page, mean_x, top - 6, bottom - top + 12, SOFT, 1)
    _add(page, "text", "mean", x=mean_x, y=bottom + 21, text_anchor="middle", font_size=10, fill=SOFT)
    _draw_axis(page, bottom + 7, slots, LANE_WIDTH, "slots of a rank")


def _draw_slots(lane: ET.Element, layout: SequenceLayout, rank: int, top: int, fills: list[str]) -> None:
    """The segments of a rank over a hatched lane: what they leave free is padding."""
    scale = LANE_WIDTH / layout.num_local_tokens
    slots = _add(lane, "rect", class_="slots", x=BANDS_X, y=top, width=LANE_WIDTH, height=LANE_HEIGHT)
    slots.set("fill", f"url(#{HATCHING})")
    segments = _add(lane, "g", class_="segments")
    marks = _add(lane, "g", text_anchor="middle", font_size=11)
    for segment in layout.segments(rank):
        x, room = BANDS_X + segment.offset * scale, segment.num_tokens * scale
        fill = fills[segment.sequence]
        _add_segment(segments, segment, x=x, y=top, width=room, height=LANE_HEIGHT, fill=fill)
        names = (_name(segment), f"#{segment.sequence}")
        _write_fitting(marks, names, room, 11, x=x + room / 2, y=top + LANE_HEIGHT / 2 + 4, fill=_ink(fill))
    for before, after in pairwise(layout.segments(rank)):
        room = min(before.num_tokens, after.num_tokens) * scale
        _add_rule(marks, BANDS_X + after.offset * scale, top, LANE_HEIGHT, PAPER, min(2, room / 4))


def _draw_axis(page: ET.Element, y: float, total: int, width: float, unit: str) -> None:
    """Round numbers below a band of `total` tokens."""
    step = next(s for power in range(19) for s in (10**power, 2 * 10**power, 5 * 10**power) if total <= 8 * s)
    axis = _add(page, "g", font_size=10, fill=SOFT, text_anchor="middle")
    for value in range(0, total + 1, step):
        x = BANDS_X + value * width / total
        _add_rule(axis, x, y, 4, SOFT, 0.8)
        label = f"{value:,}"
        _add(axis, "text", label, x=min(x, WIDTH - 8 - _text_width(label, 10) / 2), y=y + 14)
    _add(axis, "text", unit, x=BANDS_X - 14, y=y + 14, text_anchor="end")


def _draw_legend(page: ET.Element, layout: SequenceLayout, y: float) -> None:
    """What the three kinds of fill mean, as far as the drawing has them."""
    split = {layout.is_split(i) for i in range(len(layout.lengths))}
    padded = layout.num_tokens < layout.num_ranks * layout.num_local_tokens
    kinds = (
        (True in split, HUES[:3], "split over ranks", 150),
        (False in split, PALE_HUES[:3], "whole on one rank", 164),
        (padded, [f"url(#{HATCHING})"] * 3, "padding", 80),
    )
    x = WIDTH - MARGIN - sum(width for present, _, _, width in kinds if present)
    for present, fills, meaning, width in kinds:
        if present:
            for i, fill in enumerate(fills):
                _add(page, "rect", x=x + 8 * i, y=y - 11, width=8, height=14, fill=fill)
            _add(page, "text", meaning, x=x + 31, y=y, fill=SOFT)
            x += width


def _add(parent: ET.Element, tag: str, text: str | None = None, /, **attributes: str | float) -> ET.Element:
    """Append an element; `font_size` stands for the attribute `font-size`, `class_` for `class`."""
    element = ET.SubElement(parent, tag)
    element.text = text
    for name, value in attributes.items():
        # Twelve digits: a width stays proportional to its tokens, however long the row is.
        number = f"{value:.12g}" if isinstance(value, float) else str(value)
        element.set(name.rstrip("_").replace("_", "-"), number)
    return element


def _add_segment(parent: ET.Element, segment: Segment, *, width: float, **attributes: str | float) -> None:
    """A segment as a rectangle; where a pointer can hit it, it says what it is."""
    about = {"data_sequence": segment.sequence, "data_start": segment.start, "data_stop": segment.stop}
    rect = _add(parent, "rect", width=width, **attributes, **about)
    if width > 2:
        _add(rect, "title", f"{_name(segment)} on rank {segment.rank}: {_count(segment.num_tokens, 'token')}")


def _add_rule(parent: ET.Element, x: float, top: float, height: float, stroke: str, width: float) -> None:
    """A vertical line; one too thin to be seen is left out."""
    if width > 0.05:
        _add(parent, "path", d=f"M{x:.7g} {top:.7g}v{height:.7g}", stroke=stroke, stroke_width=width)


def _add_head(page: ET.Element, y: float, name: str, about: str) -> None:
    head = _add(page, "text", name, x=BANDS_X, y=y, font_size=14, font_weight=700)
    _add(head, "tspan", about, dx=10, font_size=12, font_weight=400, fill=SOFT)


def _write_fitting(
    parent: ET.Element, texts: tuple[str, ...], room: float, size: float, **attributes: str | float
) -> None:
    """Write the first of the texts that fits, if any does."""
    for text in texts:
        if _text_width(text, size) + 4 <= room:
            _add(parent, "text", text, **attributes)
            return


def _text_width(text: str, size: float) -> float:
    """A width that the text stays below in all usual fonts; ideographs are as wide as they are high."""
    return size * sum(1.0 if ord(letter) > 0x2E7F else 0.64 for letter in text)


def _shortened(text: str, size: float) -> str:
    """The text, or as much of its beginning as the page is wide."""
    while _text_width(text, size) > WIDTH - 2 * MARGIN:
        text = text[:-2] + "…"
    return text


def _printable(text: str) -> str:
    """Replace the characters that XML cannot hold even when escaped."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _lane_y(layout: SequenceLayout, rank: int) -> int:
    """Where a rank's lane begins below the first; the ranks of a Ulysses group stand closer together."""
    return rank * LANE_STEP + (rank // layout.ulysses * RING_GAP if layout.ulysses > 1 else 0)


def _rank_tokens(layout: SequenceLayout) -> list[int]:
    return [sum(s.num_tokens for s in layout.segments(rank)) for rank in range(layout.num_ranks)]


def _relative_costs(layout: SequenceLayout) -> list[float]:
    costs = [layout.attention_cost(rank) for rank in range(layout.num_ranks)]
    return [cost * len(costs) / sum(costs) for cost in costs]


def _fills(layout: SequenceLayout) -> list[str]:
    """The colour of each sequence: the longest ones, which get split, differ, and policies agree on it."""
    fills = [""] * len(layout.lengths)
    for place, i in enumerate(sorted(range(len(fills)), key=lambda i: -layout.lengths[i])):
        fills[i] = (HUES if layout.is_split(i) else PALE_HUES)[place % len(HUES)]
    return fills


def _ink(fill: str) -> str:
    return PAPER if fill == HUES[0] else INK


def _name(segment: Segment) -> str:
    return f"#{segment.sequence}[{segment.start}:{segment.stop})"


def _headline(layout: SequenceLayout) -> str:
    return f"{_count(len(layout.lengths), 'sequence')} on {_count(layout.num_ranks, 'rank')}"


def _settings(layout: SequenceLayout) -> str:
    return f"policy {layout.policy} · ring {layout.ring} × ulysses {layout.ulysses}"


def _lengths(layout: SequenceLayout) -> str:
    if len(layout.lengths) <= 10:
        return f"lengths {', '.join(map(str, layout.lengths))}"
    return f"lengths from {min(layout.lengths):,} to {max(layout.lengths):,}"


def _summary(layout: SequenceLayout) -> list[str]:
    num_sequences = len(layout.lengths)
    padding = 1 - layout.num_tokens / (layout.num_ranks * layout.num_local_tokens)
    num_split = sum(layout.is_split(i) for i in range(num_sequences))
    split_share = layout.num_split_tokens / layout.num_tokens
    return [
        f"{_count(layout.num_tokens, 'token')}, {padding:.1%} padding",
        f"{num_split:,} of {_count(num_sequences, 'sequence')} split ({split_share:.1%} of tokens)",
        f"attention cost max/mean {max(_relative_costs(layout)):.2f}×",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
