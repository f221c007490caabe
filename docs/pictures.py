"""Draw docs/overview.svg and docs/data_path.svg: python docs/pictures.py [FOLDER]"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from seqbraid.layout import SequenceLayout
from seqbraid.layout.render import HUES, INK, PALE_HUES, RULE, SOFT

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
SAMPLES = (
    (1000, "a long text, 1000 tokens"),
    (300, "images, 300"),
    (250, "text, 250"),
    (150, "audio"),
    (100, "100"),
)
"""Tokens, and what is written on them."""
PANEL, BLUE = "#f4f7fa", "#0072b2"


class Drawing:
    """Shapes on a white ground, in the order they were added."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title" font-family="{FONT}">',
            f'<title id="title">{escape(title)}</title>',
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0.5 L8 4 L0 7.5 z" fill="{SOFT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = RULE) -> None:
        """A rectangle with round corners."""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        ink: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text."""
        weight = ' font-weight="600"' if bold else ""
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points with a head at its end."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.lines.append(
            f'<path d="M{path}" fill="none" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#arrow)"/>'
        )

    def panel(self, x: float, y: float, width: float, height: float, room: str, lines: Sequence[str]) -> None:
        """A step of the way of the data: what happens and how; at the right where it is decided."""
        self.box(x, y, width, height, PANEL)
        self.text(x + 14, y + 22, lines[0], bold=True)
        for number, line in enumerate(lines[1:], start=1):
            self.text(x + 14, y + 22 + 18 * number, line, 12, SOFT)
        self.text(x + width - 14, y + 22, room, 12, BLUE, "end")

    def upright(self, x: float, y: float, words: str) -> None:
        """A line of text that is read upwards, around its middle."""
        self.lines.append(
            f'<text transform="translate({x:g} {y:g}) rotate(-90)" font-size="12" fill="{SOFT}" '
            f'text-anchor="middle">{escape(words)}</text>'
        )

    def write(self, path: Path) -> None:
        """The drawing as a file."""
        path.write_text("\n".join([*self.lines, "</svg>"]) + "\n", encoding="utf-8")


def overview() -> Drawing:
    """Samples, the packed row, and what each of four ranks holds of it."""
    layout = SequenceLayout([length for length, _ in SAMPLES], ring=2, ulysses=2)
    drawing = Drawing(900, 372, "Samples are packed into one row, which is split over four ranks")
    left, scale = 130, 740 / layout.num_tokens
    drawing.text(20, 35, "samples", bold=True)
    drawing.text(20, 94, "packed row", bold=True)
    x: float = left
    for (length, kind), pale, fill in zip(SAMPLES, PALE_HUES, HUES, strict=False):
        width = length * scale
        drawing.box(x + 3, 16, width - 6, 30, pale, "none")
        drawing.text(x + width / 2, 35, kind, 12, anchor="middle")
        drawing.box(x, 76, width, 28, fill, "#ffffff")
        x += width
    drawing.arrow((left + 16, 51), (left + 16, 71))
    drawing.text(left + 28, 65, "packed, each with positions and labels of its own", 12, SOFT)
    drawing.arrow((left + 16, 109), (left + 16, 131))
    drawing.text(
        left + 28, 124, "long samples are cut over ring × ulysses ranks, short ones stay whole", 12, SOFT
    )
    wide = 740 / layout.num_local_tokens
    for rank in range(layout.num_ranks):
        y = 140 + 38 * rank
        ring, ulysses = divmod(rank, layout.ulysses)
        drawing.text(20, y + 13, f"rank {rank}", bold=True)
        drawing.text(20, y + 27, f"ring {ring}, ulysses {ulysses}", 11, SOFT)
        for segment in layout.segments(rank):
            whole = segment.num_tokens == layout.lengths[segment.sequence]
            fill = (PALE_HUES if whole else HUES)[segment.sequence]
            x, width = left + segment.offset * wide, segment.num_tokens * wide
            drawing.box(x, y, width, 30, fill, "#ffffff")
            words = "whole sample" if whole else f"{segment.start}–{segment.stop - 1}"
            drawing.text(x + width / 2, y + 19, words, 12, INK if whole else "#ffffff", "middle")
    drawing.box(20, 304, 860, 52, PANEL)
    claim = "loss = sum of the token losses on all ranks / label tokens of the whole optimizer step"
    drawing.text(450, 326, claim, 14, anchor="middle", bold=True)
    claim = "the loss of the stock model run on each sample alone; so is every gradient, to rounding error"
    drawing.text(450, 345, f"= {claim}", 13, SOFT, "middle")
    return drawing


STEPS = (
    (
        "record → sample",
        "data/records, data/chat, data/media",
        "One conversation or document through the model's chat template and processor: ids, label mask,",
        "pixels, mel frames. One sample at a time, in a worker process.",
    ),
    (
        "samples → rows of an optimizer step",
        "data/stream, layout/packing.py",
        "Which samples share a row and which rows a step has, from data, seed and batch sizes alone:",
        "the same on any mesh. Rows are balanced over the data ranks by estimated cost.",
    ),
    (
        "row → this rank's micro-batch",
        "data/pack.py, layout, sequence_parallel/plans.py",
        "Targets are shifted and positions counted per sample; layout, ring rounds, gated-delta chains,",
        "who encodes which image. One index selects this rank's tokens of everything.",
    ),
    (
        "Step: micro-batches and counts",
        "models/step.py, models/agreement.py",
        "All ranks agree once: label tokens, settings, and whatever a rank refuses, such as a bad sample.",
    ),
    (
        "media encoders",
        "models/towers.py, sequence_parallel/media.py",
        "Each image, video or clip is encoded by one rank; its features go to the ranks that own its tokens.",
    ),
    (
        "decoder layers of the stock model, on this rank's tokens",
        "models/adapter.py, sequence_parallel, ops",
        "Softmax attention by Ulysses, ring or both; gated delta by states or by heads. They call kernels",
        "that take explicit sequence boundaries.",
    ),
    (
        "head and loss, in chunks of tokens",
        "models/step_loss.py, ops/linear_cross_entropy.py",
        "A sum in float32, divided once by the label tokens of the whole step.",
    ),
    (
        "backward, gradients, update",
        "distributed, train",
        "FSDP2 sums gradients over the ranks that saw other tokens; then clipping, optimizer, checkpoint.",
    ),
)
"""What happens, where it is decided, and how."""
AHEAD = 3
"""Steps that are made ahead of the optimizer step."""


def data_path() -> Drawing:
    """From a record to the optimizer's update, and the rooms in which each step is decided."""
    heights = [34 + 18 * (len(lines) - 2) for lines in STEPS]
    tops = [16 + sum(heights[:number]) + 26 * number for number in range(len(STEPS))]
    drawing = Drawing(
        900, tops[-1] + heights[-1] + 16, "The way of the data, from a record to the optimizer's update"
    )
    for words, first, last in (("ahead of the step", 0, AHEAD - 1), ("the step", AHEAD, len(STEPS) - 1)):
        top, bottom = tops[first], tops[last] + heights[last]
        drawing.box(14, top, 6, bottom - top, BLUE if first else RULE, "none")
        drawing.upright(36, (top + bottom) / 2, words)
    for number, (top, height, (head, room, *how)) in enumerate(zip(tops, heights, STEPS, strict=True)):
        drawing.panel(50, top, 834, height, room, [head, *how])
        if number + 1 < len(STEPS):
            drawing.arrow((467, top + height + 3), (467, top + height + 23))
    return drawing


def main(folder: Path) -> None:
    """Write both drawings."""
    overview().write(folder / "overview.svg")
    data_path().write(folder / "data_path.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
