"""The table of a layout says of every rank what it holds."""

from __future__ import annotations

import re
from io import StringIO
from typing import NamedTuple

from hypothesis import given
from rich.console import Console

from seqbraid.layout.layout import PADDING, SequenceLayout
from seqbraid.layout.render import layout_table

from .test_render import MANY, SVG, drawn, is_rounded, layouts


def printed(layout: SequenceLayout, width: int = 120) -> str:
    console = Console(record=True, width=width, file=StringIO())
    console.print(layout_table(layout))
    return console.export_text()


ROW = re.compile(r" *(\d+) +(\d+) +(\d+) +((?:#\S+ )*(?:\+\d+ more )?) *([\d,]+) +([\d,]+) +([\d.]+)× *")


class Row(NamedTuple):
    ring_rank: int
    ulysses_rank: int
    holds: list[str]
    numbers: list[str]
    """Tokens, padding, cost."""


def rows(text: str) -> dict[int, Row]:
    """The rows of a printed table by rank, what a rank holds joined over its lines."""
    found: dict[int, Row] = {}
    for line in text.splitlines():
        if match := ROW.fullmatch(line):
            rank, ring_rank, ulysses_rank, holds, *numbers = match.groups()
            found[int(rank)] = Row(int(ring_rank), int(ulysses_rank), holds.split(), numbers)
        elif re.match(r" +(#\S+\)|\+\d+ more|more) ", line):
            found[max(found)].holds.extend(line.split())
    return found


@MANY
@given(layouts)
def test_the_table_says_what_every_rank_holds(layout: SequenceLayout) -> None:
    shown = rows(printed(layout))
    assert list(shown) == list(range(layout.num_ranks))
    costs = [layout.attention_cost(rank) for rank in range(layout.num_ranks)]
    for rank, (ring_rank, ulysses_rank, holds, (tokens, padding, cost)) in shown.items():
        real = int((layout.index(rank) != PADDING).sum())
        assert ring_rank * layout.ulysses + ulysses_rank == rank and ulysses_rank < layout.ulysses
        assert (tokens, padding) == (f"{real:,}", f"{layout.num_local_tokens - real:,}")
        assert is_rounded(cost, costs[rank] * len(costs) / sum(costs))
        names = [f"#{s.sequence}[{s.start}:{s.stop})" for s in layout.segments(rank)]
        rest = [f"+{len(names) - 8}", "more"] if len(names) > 8 else []
        assert holds == names[:8] + rest


def test_the_table_sums_up() -> None:
    layout = SequenceLayout([900, 300, 40], ring=2, ulysses=2, policy="contiguous")
    text = printed(layout)
    for line in (
        "3 sequences on 4 ranks",
        "policy contiguous · ring 2 × ulysses 2",
        "1,240 tokens, 0.0% padding",
        "2 of 3 sequences split (96.8% of tokens)",
        "attention cost max/mean 1.15×",
    ):
        assert line in [shown.strip() for shown in text.splitlines()]


def test_a_narrow_terminal_loses_no_number() -> None:
    layout = SequenceLayout([90_000, 30_000] + [400] * 50, ring=4, ulysses=2)
    wide, narrow = rows(printed(layout)), rows(printed(layout, width=80))
    assert len(wide) == len(narrow) == 8
    assert all(wide[rank].numbers == narrow[rank].numbers for rank in range(8))


def test_the_table_uses_the_colours_of_the_drawing() -> None:
    layout = SequenceLayout([900, 300, 40], ring=2, ulysses=2)
    table = layout_table(layout)
    (holds,) = [column for column in table.columns if str(column.header).startswith("holds")]
    in_table = {
        (str(cell)[span.start : span.end].split("[")[0], str(span.style).split(" on ")[1])
        for cell in holds.cells
        for span in getattr(cell, "spans", ())
    }
    in_drawing = {
        (f"#{rect.get('data-sequence')}", rect.get("fill"))
        for rect in drawn(layout).iter(f"{SVG}rect")
        if rect.get("data-sequence") is not None
    }
    assert in_table == in_drawing
