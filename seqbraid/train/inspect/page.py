"""A row and the statistics of its data set as one HTML page, with nothing to load from elsewhere."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ...data.encode import SampleEncoder
from ..config import TrainConfig
from ..config_file import to_yaml
from ..report.style import STYLE
from .findings import Findings, Spread
from .packed import PackedRow, PackedSample, TokenRun, name_of, thumbnail

GENERATOR = "<meta name='generator' content='seqbraid inspect'>"
OWN_STYLE = """
body { max-width: 1080px; }
:root { --labelled: #bfecc9; --media: #fbe3a1; }
@media (prefers-color-scheme: dark) { :root { --labelled: #1f5c39; --media: #6b531a; } }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 500; }
th, td { border-bottom: 1px solid var(--card); padding: 5px 14px 5px 0; text-align: right; }
th:first-child, td:first-child { overflow-wrap: anywhere; text-align: left; }
.totals td { text-align: left; }
.totals td:first-child { color: var(--soft); }
.wide { overflow-x: auto; }
.notice { background: var(--card); border-left: 4px solid #e8871a; margin: 8px 0; padding: 8px 14px;
          overflow-wrap: anywhere; }
.notice.stops { border-color: var(--bad); }
.spreads { display: grid; gap: 18px 36px; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); }
.sample { border: 1px solid var(--card); border-radius: 10px; margin: 14px 0; overflow: hidden; }
.sample header { background: var(--card); color: var(--soft); font-size: 13px; overflow-wrap: anywhere;
                 padding: 6px 14px; }
.sample pre { background: none; border-radius: 0; margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
mark { background: var(--labelled); border-radius: 3px; color: inherit; }
.media { background: var(--media); border-radius: 5px; display: inline-block; margin: 2px;
         font: 12px system-ui, sans-serif; overflow-wrap: anywhere; padding: 3px 7px;
         vertical-align: middle; }
.media img { display: block; image-rendering: auto; max-width: 96px; }
"""


def is_page(path: Path) -> bool:
    """Whether a file is one that `write_page` wrote."""
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(1024)


def write_page(
    out: Path, config: TrainConfig, found: Findings, packed: PackedRow, encoder: SampleEncoder
) -> None:
    """Write the page into a file, which may be an older one of these."""
    page = inspect_page(config, found, packed, encoder).encode("utf-8", errors="replace")
    half = out.with_name(out.name + ".tmp")
    try:
        if out.exists() and not is_page(out):
            raise ValueError(f"--html={str(out)!r} exists and is no page of inspect; give another file")
        out.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(page)
        half.replace(out)
    except OSError as error:
        raise ValueError(f"--html={str(out)!r} cannot be written: {error}; give another file") from None


def inspect_page(config: TrainConfig, found: Findings, packed: PackedRow, encoder: SampleEncoder) -> str:
    """The whole page."""
    title = f"Training data of {config.out}"
    looked = "every sample of an epoch was looked at"
    if not found.survey.is_whole:
        looked = (
            f"{found.survey.looked_at:,} of {found.survey.total:,} samples were looked at, spread evenly "
            "over an epoch; numbers of an epoch are estimated from them"
        )
    sections = [
        f"<h1>{escape(title)}</h1><p class='soft'>{escape(looked)}.</p>",
        *(
            f"<p class='notice{' stops' if notice.stops else ''}'>{escape(notice.text)}</p>"
            for notice in found.notices
        ),
        _table([], [(name, value) for name, value in found.totals.items()], "totals"),
        _sources(found) if len(found.per_source) > 1 else "",
        f"<div class='spreads'>{''.join(map(_histogram, found.spreads))}</div>",
        _row(packed, encoder),
        f"<details><summary>config.yaml</summary><pre>{escape(to_yaml(config))}</pre></details>",
    ]
    head = f"<meta charset='utf-8'>{GENERATOR}<title>{escape(title)}</title><style>{STYLE}{OWN_STYLE}</style>"
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in heads)}</tr>" if heads else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='wide'><table class='{kind}'>{head}{body}</table></div>"


def _sources(found: Findings) -> str:
    tokens = max(1, sum(row[2] for row in found.per_source))
    rows = [
        (name, f"{count:,}", f"{own:,}", f"{own / tokens:.1%}", f"{labels:,}", f"{mean:,.0f}")
        for name, count, own, labels, mean in found.per_source
    ]
    heads = ("source", "looked at", "tokens", "share", "labels", "mean length")
    return f"<h2>Sources</h2>{_table(heads, rows)}"


def _histogram(spread: Spread) -> str:
    """Bars as SVG, each of which says its numbers."""
    bins = spread.bins()
    if not bins:
        return ""
    most, width, height = max(many for *_, many in bins), 400, 110
    step = width / len(bins)
    bars = "".join(
        f"<rect x='{n * step:.1f}' y='{height - tall:.1f}' width='{max(step - 1.5, 0.8):.1f}' "
        f"height='{tall:.1f}' fill='#2f86d1'><title>{low:,} to {high:,}: {many:,}</title></rect>"
        for n, (low, high, many) in enumerate(bins)
        for tall in [height * many / most]
    )
    ends = f"<text x='0' y='{height + 15}'>{bins[0][0]:,}</text>"
    ends += f"<text x='{width}' y='{height + 15}' text-anchor='end'>{bins[-1][1]:,}</text>"
    middle = f"median {spread.at(0.5):,}, 95 % up to {spread.at(0.95):,}, most {spread.at(1):,}"
    name = escape(spread.name[0].upper() + spread.name[1:])
    said = f"<h2>{name}</h2><p class='soft'>{middle}</p>"
    if len(bins) < 2:
        return f"<div>{said}</div>"
    return (
        f"<div>{said}"
        f"<svg viewBox='0 0 {width} {height + 20}' role='img' font-size='11' fill='currentColor'>"
        f"<title>{name}</title>{bars}{ends}</svg></div>"
    )


def _row(packed: PackedRow, encoder: SampleEncoder) -> str:
    legend = "<mark>has labels</mark> <span class='media'>media</span> context"
    if packed.has_weights:
        legend += " <sup>×n</sup> the weight of the labels behind it, where that is not 1"
    refused = "".join(f"<p class='bad'>not in the row: {escape(one)}</p>" for one in packed.refused)
    samples = "".join(_sample(number, sample, encoder) for number, sample in enumerate(packed.samples))
    return f"<h2>{escape(packed.title)}</h2><p class='soft'>{legend}</p>{refused}{samples}"


def _sample(number: int, sample: PackedSample, encoder: SampleEncoder) -> str:
    part = f" · {sample.part}" if sample.part else ""
    head = f"{number} · {sample.where} · {sample.tokens:,} tokens, {sample.labels:,} labels{part}"
    said = "".join(_piece(piece, encoder) for piece in sample.pieces)
    return f"<section class='sample'><header>{escape(head)}</header><pre>{said}</pre></section>"


def _piece(piece: TokenRun, encoder: SampleEncoder) -> str:
    if not piece.media:
        text = escape(piece.text)
        weight = f"<sup>×{piece.weight:g}</sup>" if piece.weight != 1 else ""
        return f"{weight}<mark>{text}</mark>" if piece.labelled else text
    name = f" {escape(name_of(piece.ref))}" if piece.ref is not None else ""
    picture = "" if piece.ref is None else thumbnail(encoder, piece.ref)
    image = ""
    if picture:
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        image = f"<img alt='' src='data:image/png;base64,{b64encode(buffer.getvalue()).decode()}'>"
    return f"<span class='media'>{image}{escape(piece.media)}{name}: {piece.tokens:,} tokens</span>"
