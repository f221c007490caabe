"""A row and the statistics of its data set, as a terminal shows them."""

from __future__ import annotations

import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ...data.encode import SampleEncoder
from ...printable import printable
from ..config import TrainConfig
from .findings import Findings, Spread
from .packed import PackedRow, PackedSample, TokenRun, name_of, thumbnail

# Named by their values: themes of terminals have greens and yellows on which black cannot be read.
LABELLED = Style(color="#0b2e17", bgcolor="#a6e3b4")
CONTEXT = Style()
WEIGHT = Style(dim=True)
PLACEHOLDER = Style(color="#3d2c00", bgcolor="#f5d48a")
BAR_CELLS = 28
BINS = 12
SHOWN_TEXT = 2000
"""Characters of a sample that are shown; of longer ones the beginning and the end."""
SHOWN_SAMPLES = 12
SHOWN_SOURCES = 20
SHOWN_PICTURES = 8
PICTURE_CELLS = 18
"""Width and height of a thumbnail; a cell shows two pixels, one above the other."""


def print_findings(
    console: Console, config: TrainConfig, found: Findings, packed: PackedRow, encoder: SampleEncoder
) -> None:
    """Print all of it."""
    console.print(_totals(config, found))
    if len(found.per_source) > 1:
        console.print(_sources(found))
    for spread in found.spreads:
        console.print(_histogram(spread))
    for shown in _row(packed, encoder, console.color_system is not None):
        console.print(shown)
    for notice in found.notices:
        word, style = ("stops", "bold red") if notice.stops else ("notice", "yellow")
        text = Text.assemble((f"{word}: ", style), printable(notice.text))
        console.print(text, soft_wrap=not console.is_terminal)  # a line each, where another program reads


def _totals(config: TrainConfig, found: Findings) -> RenderableType:
    table = Table(title="Data", title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    for name, value in {"model": config.model, **found.totals}.items():
        table.add_row(name, Text(printable(value)))
    return table


def _sources(found: Findings) -> RenderableType:
    title = "Sources" if found.survey.is_whole else "Sources (tokens and labels estimated for an epoch)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("source")
    for name in ("looked at", "share", "tokens", "share", "labels", "mean length"):
        table.add_column(name, justify="right")
    samples = max(1, sum(row[1] for row in found.per_source))
    tokens = max(1, sum(row[2] for row in found.per_source))
    for name, count, own, labels, mean in found.per_source[:SHOWN_SOURCES]:
        cells = (f"{count:,}", f"{count / samples:.1%}", f"{own:,}", f"{own / tokens:.1%}", f"{labels:,}")
        table.add_row(Text(printable(name)), *cells, f"{mean:,.0f}")
    if len(found.per_source) > SHOWN_SOURCES:
        table.caption = f"and {len(found.per_source) - SHOWN_SOURCES:,} more"
    return table


def _histogram(spread: Spread) -> RenderableType:
    bins = spread.bins(BINS)
    most = max((many for *_, many in bins), default=1)
    middle = f"median {spread.at(0.5):,}, 95 % up to {spread.at(0.95):,}, most {spread.at(1):,}"
    title = Text.assemble((f"{spread.name[0].upper()}{spread.name[1:]}", "bold"), f": {middle}")
    table = Table(show_header=False, box=None, padding=(0, 1))
    for _ in range(2):
        table.add_column(justify="right")
    table.add_column()
    for low, high, many in bins:
        bar = "█" * round(BAR_CELLS * many / most) or ("▏" if many else "")
        name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        table.add_row(name, f"{many:,}", Text(bar, style="cyan"))
    return Group(title, Text()) if len(bins) < 2 else Group(title, table, Text())


def _row(packed: PackedRow, encoder: SampleEncoder, colors: bool) -> list[RenderableType]:
    legend = Text.assemble(
        (packed.title, "bold"), "  ", (" has labels ", LABELLED), " ", (" media ", PLACEHOLDER), " context"
    )
    if packed.has_weights:
        legend.append("  ×n: the weight of the labels behind it, where that is not 1")
    shown: list[RenderableType] = [legend]
    for number, sample in enumerate(packed.samples[:SHOWN_SAMPLES]):
        parts: list[RenderableType] = [_text(sample, colors)]
        refs = [piece.ref for piece in sample.pieces if piece.ref is not None] if colors else []
        pictures = [thumbnail(encoder, ref, PICTURE_CELLS) for ref in refs[:SHOWN_PICTURES]]
        if any(pictures):
            parts.append(Columns([_picture(picture) for picture in pictures if picture is not None]))
        head = f"{number} · {printable(sample.where)} · {sample.tokens:,} tokens, {sample.labels:,} labels"
        shown.append(
            Panel(
                Group(*parts),
                title=Text(head),
                subtitle=Text(sample.part),
                title_align="left",
                box=box.ROUNDED,
            )
        )
    more = len(packed.samples) - SHOWN_SAMPLES
    if more > 0:
        shown.append(Text(f"and {more:,} samples more; --html=FILE has all of them"))
    shown += [Text(f"not in the row: {printable(one)}", style="red") for one in packed.refused]
    return shown


def _text(sample: PackedSample, colors: bool) -> Text:
    """The pieces one after the other; without colors, labels are between brackets."""
    text = Text()
    for piece in sample.pieces:
        said = _said(piece)
        if piece.media:
            text.append(said, PLACEHOLDER)
            continue
        if piece.weight != 1:
            text.append(f"×{piece.weight:g}", WEIGHT)
        if colors or not piece.labelled:
            text.append(said, LABELLED if piece.labelled else CONTEXT)
        else:
            text.append(f"⟦{said}⟧")
    if len(text) > SHOWN_TEXT:
        cut = f" … {len(text) - SHOWN_TEXT:,} characters … "
        return Text.assemble(text[: SHOWN_TEXT // 2], (cut, "dim"), text[-SHOWN_TEXT // 2 :])
    return text


def _said(piece: TokenRun) -> str:
    if not piece.media:
        return printable(piece.text)
    name = f" {printable(name_of(piece.ref))}" if piece.ref is not None else ""
    return f" {piece.media}{name}: {piece.tokens:,} tokens "


def _picture(picture: object) -> Text:
    """Two pixels in a cell, the upper one in its foreground."""
    pixels = np.asarray(picture)
    pixels = pixels[: len(pixels) // 2 * 2]
    text = Text()
    for above, below in zip(pixels[::2], pixels[1::2], strict=True):
        for top, bottom in zip(above, below, strict=True):
            colors = ("#{:02x}{:02x}{:02x}".format(*pixel) for pixel in (top, bottom))
            text.append("▀", Style(color=next(colors), bgcolor=next(colors)))
        text.append("\n")
    return text
