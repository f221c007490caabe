"""What a person is shown is what the layout says: every band to scale, every number its own."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqbraid.layout.layout import PADDING, SequenceLayout
from seqbraid.layout.render import HUES, INK, PALE_HUES, PAPER, layout_svg

MANY = settings(max_examples=60, deadline=None)
SVG = "{http://www.w3.org/2000/svg}"

layouts = st.builds(
    SequenceLayout,
    st.lists(
        st.one_of(st.integers(1, 4), st.integers(1, 300), st.integers(1, 10**5)), min_size=1, max_size=24
    ),
    ring=st.sampled_from([1, 2, 3, 8]),
    ulysses=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["contiguous", "zigzag", "balanced"]),
    multiple_of=st.sampled_from([1, 2, 64]),
)


def drawn(layout: SequenceLayout, title: str | None = None) -> ET.Element:
    return ET.fromstring(layout_svg(layout, title))


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [element for element in root.iter() if element.get("class") == name]


def number(element: ET.Element, name: str) -> float:
    value = element.get(name)
    assert value is not None
    return float(value)


def whole_number(element: ET.Element, name: str) -> int:
    value = element.get(name)
    assert value is not None
    return int(value)


def texts(root: ET.Element) -> list[str]:
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def is_rounded(text: str, value: float) -> bool:
    """Whether a text is a number with two decimals; ties may be rounded either way."""
    return re.fullmatch(r"\d+\.\d\d", text) is not None and abs(float(text) - value) < 0.005 + 1e-9


def painted(
    layout: SequenceLayout, rects: list[ET.Element], x0: float, scale: float, num_slots: int
) -> Tensor:
    """For every slot the token of the row that the rectangles show there, −1 where there is none."""
    tokens = torch.full((num_slots,), PADDING)
    for rect in rects:
        begin, width = (number(rect, "x") - x0) / scale, number(rect, "width") / scale
        slot, count = round(begin), whole_number(rect, "data-stop") - whole_number(rect, "data-start")
        assert (begin, width) == pytest.approx((slot, count), rel=1e-9, abs=1e-3)
        assert (tokens[slot : slot + count] == PADDING).all(), "two rectangles lie on each other"
        first = layout.cu_seqlens[whole_number(rect, "data-sequence")] + whole_number(rect, "data-start")
        tokens[slot : slot + count] = torch.arange(first, first + count)
    return tokens


@MANY
@given(layouts)
def test_lanes_show_every_slot_to_scale(layout: SequenceLayout) -> None:
    lanes = of_class(drawn(layout), "lane")
    assert [whole_number(lane, "data-rank") for lane in lanes] == list(range(layout.num_ranks))
    frames = []
    for rank, lane in enumerate(lanes):
        (slots,), (segments,) = of_class(lane, "slots"), of_class(lane, "segments")
        x, width = number(slots, "x"), number(slots, "width")
        scale = width / layout.num_local_tokens
        assert slots.get("fill") == "url(#seqbraid-padding)"
        for rect in segments:
            assert (rect.get("y"), rect.get("height")) == (slots.get("y"), slots.get("height"))
        shown = painted(layout, list(segments), x, scale, layout.num_local_tokens)
        assert torch.equal(shown, layout.index(rank))
        frames.append((x, width, number(slots, "y"), number(slots, "height")))
    assert len({(x, width) for x, width, _, _ in frames}) == 1, "lanes are compared, so they share one scale"
    assert all(y + height < next_y for (_, _, y, height), (_, _, next_y, _) in pairwise(frames))


def row_frame(root: ET.Element) -> tuple[list[ET.Element], float, float]:
    """The rectangles of the row, and where it begins and ends on the page."""
    (row,) = of_class(root, "row")
    ends = [number(rect, "x") + number(rect, "width") for rect in row]
    return list(row), min(number(rect, "x") for rect in row), max(ends)


@MANY
@given(layouts)
def test_the_row_shows_every_sequence_with_its_length(layout: SequenceLayout) -> None:
    root = drawn(layout)
    rects, begin, end = row_frame(root)
    assert end == pytest.approx(number(root, "width") - 28)
    scale = (end - begin) / layout.num_tokens
    shown = painted(layout, rects, begin, scale, layout.num_tokens)
    assert torch.equal(shown, torch.arange(layout.num_tokens))
    widths = [0.0] * len(layout.lengths)
    for rect in rects:
        widths[whole_number(rect, "data-sequence")] += number(rect, "width")
    assert widths == pytest.approx([length * scale for length in layout.lengths], rel=1e-9)


def texts_on(root: ET.Element, rects: list[ET.Element]) -> list[tuple[ET.Element, ET.Element]]:
    """The texts that lie on rectangles of one band, each with its rectangle."""
    top = number(rects[0], "y")
    bottom = top + number(rects[0], "height")
    on_band = [text for text in root.iter(f"{SVG}text") if top < number(text, "y") < bottom]
    return [
        (rect, text)
        for text in on_band
        for rect in rects
        if 0 < number(text, "x") - number(rect, "x") < number(rect, "width")
    ]


@MANY
@given(layouts)
def test_the_number_on_a_chunk_is_the_rank_that_holds_it(layout: SequenceLayout) -> None:
    root = drawn(layout)
    rects, begin, end = row_frame(root)
    scale = (end - begin) / layout.num_tokens
    rank_of_token = torch.empty(layout.num_tokens, dtype=torch.long)
    for rank in range(layout.num_ranks):
        index = layout.index(rank)
        rank_of_token[index[index != PADDING]] = rank
    named = 0
    for chunk, text in texts_on(root, rects):
        first = round((number(chunk, "x") - begin) / scale)
        last = round((number(chunk, "x") + number(chunk, "width") - begin) / scale)
        (rank,) = set(rank_of_token[first:last].tolist())
        assert text.text in (f"{rank}", f"rank {rank}")
        named += 1
    assert named >= sum(number(chunk, "width") > 30 for chunk in rects)


@MANY
@given(layouts)
def test_a_sequence_has_one_colour_strong_where_it_is_split(layout: SequenceLayout) -> None:
    root = drawn(layout)
    fills: dict[int, set[str | None]] = {}
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("data-sequence") is not None:
            fills.setdefault(whole_number(rect, "data-sequence"), set()).add(rect.get("fill"))
    for i in range(len(layout.lengths)):
        (fill,) = fills[i]
        assert fill in (HUES if layout.is_split(i) else PALE_HUES)
    longest = sorted(range(len(layout.lengths)), key=lambda i: -layout.lengths[i])[: len(HUES)]
    assert len({(HUES + PALE_HUES).index(str(*fills[i])) % len(HUES) for i in longest}) == len(longest)


def extents(root: ET.Element) -> list[tuple[float, float, float, str]]:
    """Baseline, left and right end of every text, in a font whose letters are 0.6 em wide."""
    found: list[tuple[float, float, float, str]] = []

    def visit(element: ET.Element, size: float, anchor: str) -> None:
        size = float(element.get("font-size", size))
        anchor = element.get("text-anchor", anchor)
        if element.tag == f"{SVG}text":
            text = "".join(element.itertext()).strip()
            width = 0.6 * size * len(text)
            left = number(element, "x") - {"start": 0, "middle": 0.5, "end": 1}[anchor] * width
            found.append((number(element, "y"), left, left + width, text))
        else:
            for child in element:
                visit(child, size, anchor)

    visit(root, 12, "start")
    return sorted(found)


@MANY
@given(layouts)
@example(SequenceLayout([10**7], ring=2))
@example(SequenceLayout([10**9] * 10, ring=2, policy="contiguous"))
@example(SequenceLayout([10**7] * 10, ring=16, ulysses=8, multiple_of=2**20))
def test_texts_neither_overlap_nor_leave_the_page(layout: SequenceLayout) -> None:
    root = drawn(layout)
    found = extents(root)
    assert all(left >= 0 and right <= number(root, "width") for _, left, right, _ in found)
    assert all(0 < y < number(root, "height") for y, *_ in found)
    for (y, _, right, one), (next_y, left, _, other) in pairwise(found):
        assert y != next_y or right <= left, f"{one!r} runs into {other!r}"


@MANY
@given(layouts)
def test_numbers_beside_a_lane_are_those_of_its_rank(layout: SequenceLayout) -> None:
    root = drawn(layout)
    costs = [layout.attention_cost(rank) for rank in range(layout.num_ranks)]
    mean = sum(costs) / len(costs)
    bars = []
    for rank, lane in enumerate(of_class(root, "lane")):
        tokens = int((layout.index(rank) != PADDING).sum())
        padding = layout.num_local_tokens - tokens
        shown = texts(lane)
        ring_rank, ulysses_rank = rank // layout.ulysses, rank % layout.ulysses
        assert shown[:2] == [f"rank {rank}", f"ring {ring_rank} · ulysses {ulysses_rank}"]
        beside = [f"{tokens:,}"] + [f"+{padding:,} pad"] * (padding > 0)
        assert shown[-len(beside) - 1 : -1] == beside
        assert is_rounded(shown[-1].removesuffix("×"), costs[rank] / mean)
        bars.append(sum(number(bar, "width") for bar in of_class(lane, "cost")))
    total = sum(bars)
    assert bars == pytest.approx([total * cost / sum(costs) for cost in costs], rel=1e-5, abs=1e-4)


def test_a_row_worked_out_by_hand() -> None:
    # 900 + 300 + 40 tokens in quarters of 310. Causal pairs: 405,450 + 45,150 + 820 = 451,420, a mean of
    # 112,855. The first two ranks share the pairs of tokens 0 to 619 of #0, 192,510: 96,255 or 0.85 of the
    # mean each; the other two share the rest, 129,455 or 1.15 each.
    layout = SequenceLayout([900, 300, 40], ring=2, ulysses=2, policy="contiguous")
    root = drawn(layout)
    shown = texts(root)
    assert [text for text in shown if re.fullmatch(r"[\d.]+×", text)] == ["0.85×", "0.85×", "1.15×", "1.15×"]
    assert [text for text in shown if re.fullmatch(r"#\d\[.*", text)] == [
        "#0[0:310)",
        "#0[310:620)",
        "#0[620:900)",
        "#1[0:30)",
        "#1[30:300)",
        "#2[0:40)",
    ]
    assert "#0 · 900 tokens" in shown and "#1 · 300 tokens" in shown and "#2" in shown
    assert "policy contiguous · ring 2 × ulysses 2 · lengths 900, 300, 40" in shown
    assert shown[-1].split(" · ") == [
        "1,240 tokens, 0.0% padding",
        "2 of 3 sequences split (96.8% of tokens)",
        "attention cost max/mean 1.15×",
    ]
    assert "split over ranks" in shown and "whole on one rank" in shown and "padding" not in shown


def test_padding_worked_out_by_hand() -> None:
    # Zigzag pads 5 to 8 and 3 to 4. Rank 0 holds tokens 0, 1 of the first and 0 of the second, rank 1 the
    # other five: 8 of 12 slots.
    root = drawn(SequenceLayout([5, 3], ring=2, policy="zigzag"))
    shown = texts(root)
    assert [text for text in shown if text.endswith(" pad")] == ["+3 pad", "+1 pad"]
    assert shown[-1].startswith("8 tokens, 33.3% padding · 2 of 2 sequences split (100.0% of tokens)")
    assert "padding" in shown and "whole on one rank" not in shown
    shown = texts(drawn(SequenceLayout([5, 3], ring=2, policy="zigzag", multiple_of=8)))
    assert shown[-1].startswith("8 tokens, 50.0% padding")


def test_many_lengths_are_summed_up() -> None:
    shown = texts(drawn(SequenceLayout([30] * 199 + [1700], ring=8)))
    assert any(text.endswith("· lengths from 30 to 1,700") for text in shown)


@MANY
@given(st.text())
def test_any_title_is_shown_as_it_is(title: str) -> None:
    root = drawn(SequenceLayout([3]), title)
    assert root[0].tag == f"{SVG}title"
    expected = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "\ufffd", title)
    # A parser reads every kind of line end as a line feed.
    assert (root[0].text or "") == expected.replace("\r\n", "\n").replace("\r", "\n")


def test_titles_are_escaped_and_shortened_on_the_page_alone() -> None:
    title = "<script>&amp;</script>\ud800 " + "長い" * 100
    root = drawn(SequenceLayout([3]), title)
    assert root[0].text == title.replace("\ud800", "\ufffd")
    heading = texts(root)[0]
    assert (
        heading.startswith("<script>&amp;</script>") and heading.endswith("…") and len(heading) < len(title)
    )
    assert drawn(SequenceLayout([3, 4], ring=2))[0].text == "2 sequences on 2 ranks"
    assert drawn(SequenceLayout([3]))[0].text == "1 sequence on 1 rank"


@MANY
@given(layouts)
def test_a_drawing_stands_alone(layout: SequenceLayout) -> None:
    root = drawn(layout)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "desc", "defs", "pattern", "rect", "g", "path", "text", "tspan"}
    ids = {element.get("id") for element in root.iter()} - {None}
    for element in root.iter():
        assert not any(name.endswith("href") or name.startswith("on") for name in element.attrib)
        for value in element.attrib.values():
            assert "url(" not in value or value.removeprefix("url(#").removesuffix(")") in ids
    background = next(child for child in root if child.tag == f"{SVG}rect")
    assert background.get("fill") == PAPER
    assert number(background, "width") >= number(root, "width") - 1
    assert number(background, "height") >= number(root, "height") - 1


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_is_legible_on_every_colour() -> None:
    # Seven sequences in halves on two ranks, then whole on one: every strong and every pale colour.
    for ring in (2, 1):
        layout = SequenceLayout([700, 600, 500, 400, 300, 200, 100], ring=ring, policy="zigzag")
        root = drawn(layout)
        checked = set()
        for rect, text in texts_on(root, row_frame(root)[0]):
            fill, ink = str(rect.get("fill")), str(text.get("fill"))
            assert ink in (INK, PAPER)
            low, high = sorted(luminance(colour) + 0.05 for colour in (fill, ink))
            assert high / low > 4, f"{ink} on {fill}"
            checked.add(fill)
        assert checked == set(HUES if ring == 2 else PALE_HUES)
