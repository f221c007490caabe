"""Pictures of the demo's report: a digit, and where the tokens of a row live."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import islice
from xml.etree import ElementTree as ET

from torch import Tensor

from ...layout import SequenceLayout
from ...layout.render import INK, layout_svg
from .digits import GREY_LEVELS, IMAGE, IMAGE_SIDE, IMAGE_TOKENS, LONG, Sample, num_tokens
from .training import Settings

ROWS_TO_CHOOSE_FROM = 30
SVG = "http://www.w3.org/2000/svg"


def digit_svg(image: Tensor) -> str:
    """An image as squares of ink."""
    cells = [
        f"<rect x='{x}' y='{y}' width='1.02' height='1.02' fill-opacity='{ink / GREY_LEVELS:.2f}'/>"
        for y, line in enumerate(image.tolist())
        for x, ink in enumerate(line)
        if ink
    ]
    return f"<svg xmlns='{SVG}' viewBox='0 0 {IMAGE_SIDE} {IMAGE_SIDE}'>{''.join(cells)}</svg>"


def layout_picture(settings: Settings) -> str:
    """One of the first rows, with a long sample and the most others, and what each rank holds of it."""
    rows = list(islice(settings.rows(), min(ROWS_TO_CHOOSE_FROM, settings.steps)))
    step, row = max(enumerate(rows), key=lambda numbered: (_has_long(numbered[1]), len(numbered[1])))
    layout = SequenceLayout([num_tokens(sample) for sample in row], settings.ring, settings.ulysses)
    num_images = sum(len(sample["image_grid_thw"]) for sample in row)
    title = f"The row of step {step + 1}: {len(row)} samples with {num_images} images"
    about = (
        f"An image has {IMAGE_TOKENS} tokens, marked by a dark bar. It is encoded on one rank, and its "
        "features are sent to the ranks that hold its tokens."
    )
    return f"<p class='soft'>{escape(about)}</p>" + mark_images(layout_svg(layout, title), row)


def _has_long(row: Sequence[Sample]) -> bool:
    return any(len(sample["image_grid_thw"]) >= LONG[0] for sample in row)


def mark_images(svg: str, row: Sequence[Sample]) -> str:
    """A layout's drawing with a dark bar at the foot of every run of image tokens."""
    ET.register_namespace("", SVG)
    root = ET.fromstring(svg)
    for group in root.iter(f"{{{SVG}}}g"):
        if group.get("class") not in ("row", "segments"):
            continue
        for segment in list(group):
            x, y, width, height = (float(segment.attrib[name]) for name in ("x", "y", "width", "height"))
            sequence, start, stop = (int(segment.attrib[f"data-{n}"]) for n in ("sequence", "start", "stop"))
            scale = width / (stop - start)
            is_image = row[sequence]["input_ids"][start:stop] == IMAGE
            for first, end in _runs(is_image.tolist()):
                mark = {"class": "image", "fill": INK, "height": "3", "y": f"{y + height - 3:g}"}
                mark["x"], mark["width"] = f"{x + first * scale:.2f}", f"{(end - first) * scale - 0.6:.2f}"
                ET.SubElement(group, f"{{{SVG}}}rect", mark)
    return ET.tostring(root, encoding="unicode")


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Where the flags are set, as ranges."""
    edges = [i for i, (a, b) in enumerate(zip([False, *flags], [*flags, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))
