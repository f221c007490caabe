"""docs/matrix.md: what `make matrix` found on meshes, by family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

MARK = "<!-- table: written by `make matrix` -->"


def write_page(path: Path, found: Sequence[dict[str, Any]], wanted: int) -> None:
    """Put the table behind its mark, in place of what was there."""
    before, mark, _ = path.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{path} has no line {MARK!r}")
    path.write_text(f"{before}{MARK}\n\n{page(found, wanted)}\n", encoding="utf-8")


def page(found: Sequence[dict[str, Any]], wanted: int) -> str:
    """One row a mesh, one column a family: the largest error in floors, and how many models hold."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for case in found:
        family, _, _, *mesh = case["key"].split("/")
        cells[" × ".join(mesh).replace(",", " "), family].append(case)
    meshes = list(dict.fromkeys(mesh for mesh, _ in cells))
    families = list(dict.fromkeys(family for _, family in cells))
    defects = [value for case in found for value in case["mutants"].values()]
    names = sorted({name for case in found for name in case["mutants"]})
    right = sum(case["is_right"] for case in found)
    lines = [
        f"{date.today():%Y-%m-%d}, torch {torch.__version__}, transformers {transformers.__version__}: "
        f"{len(found)} of {wanted} cases were run, {right} are right. {len(defects)} defects were planted, "
        f"{len(defects) - defects.count('not caught')} were caught: {', '.join(names) or 'none'}.",
        "",
        "| mesh | " + " | ".join(families) + " |",
        "|---|" + "---|" * len(families),
    ]
    for mesh in meshes:
        row = (_cell(cells.get((mesh, family), [])) for family in families)
        lines.append(f"| {mesh or 'one process'} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _cell(cases: Sequence[dict[str, Any]]) -> str:
    if not cases:
        return ""
    held = [case["ratio"] for case in cases if case["holds"]]
    wrong = len(cases) - sum(case["is_right"] for case in cases)
    worst = f"{max(held):.1f}" if held else "–"
    return f"{worst} ({len(cases)})" if not wrong else f"**{wrong} of {len(cases)} wrong**"
