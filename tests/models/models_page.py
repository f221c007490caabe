"""The table of docs/models.md, from what `tests.models.table` found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.models.table import Line

START, END = "<!-- table: written by `make models` -->", "<!-- end of the table -->"


def write_table(page: Path, lines: Sequence[Line]) -> None:
    """Write the table anew; what stands around it stays."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    page.write_text(f"{before}{START}\n\n{table(lines)}\n{END}{after}", encoding="utf-8")


def table(lines: Sequence[Line]) -> str:
    """One row per type: those that are exact first."""
    exact = [line for line in lines if line.status == "exact"]
    others = [line for line in lines if line.status != "exact"]
    rows = [
        f"Transformers {version('transformers')}: {len(lines)} types, of which {len(exact)} are exact.",
        "",
    ]
    rows += [f"## Exact ({len(exact)})", "", "| type | class | `tp=2` | notes |", "|---|---|---|---|"]
    rows += [
        f"| {line.model_type} | {line.class_name} | {_tensor(line)} | {_notes(line)} |" for line in exact
    ]
    rows += ["", f"## Refused ({len(others)})", "", "| type | class | why |", "|---|---|---|"]
    for line in others:
        why = _short(line.detail, line.class_name)
        if line.status != "refused":
            why = f"{line.status}: {why}"
        rows.append(
            f"| {line.model_type} | {line.class_name} | {'; '.join(filter(None, [why, _notes(line)]))} |"
        )
    return "\n".join(rows) + "\n"


def statuses(page: Path) -> dict[str, str]:
    """What a page says of each type: exact or not."""
    found, status = {}, ""
    for row in page.read_text(encoding="utf-8").split(START)[1].split(END)[0].splitlines():
        if row.startswith("## "):
            status = row.split()[1].lower()
        elif row.startswith("| ") and not row.startswith("| type"):
            found[row.split("|")[1].strip()] = status
    return found


def _tensor(line: Line) -> str:
    status, detail = line.tensor
    if status != "refused":
        return status
    why = re.sub(rf" of layer \d+ of {line.class_name}", "", _short(detail, line.class_name))
    return f"refused: {why}"


def _notes(line: Line) -> str:
    notes = ["sliding windows"] if line.windowed and line.status == "exact" else []
    for variant, (status, detail) in line.variants.items():
        if status not in ("exact", "refused"):  # the family does not know the switch after all
            continue
        name = f"`{variant}`" if re.fullmatch(r"[a-zN_=0-9.]+", variant) else variant
        notes.append(
            f"{name}: " + (status if status == "exact" else f"refused, {_short(detail, line.class_name)}")
        )
    return "; ".join(notes)


def _short(detail: str, class_name: str) -> str:
    """The reason of a refusal, without the name that stands beside it and the advice behind it."""
    text = re.split(r"; |\. ", re.sub(r"^(ring|ulysses|tp)=2: ", "", detail))[0]
    text = re.sub(rf"^{class_name}( \(model_type '[^']*'\))? ", "", text)
    text = re.sub(
        r", (so (a )?packed|so its attention|so its router|so it would|which would|and ranks that share).*",
        "",
        text,
    )
    return text.replace("|", "/").replace("has output_router_logits=True, but ", "")
