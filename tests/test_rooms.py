"""Lower rooms never import higher ones."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "seqbraid"

ALLOWED = {
    "layout": set(),
    "ops": set(),
    "comm": set(),
    "printable": set(),
    "mesh": {"comm"},
    "sequence_parallel": {"layout", "ops", "comm", "mesh"},
    "models": {"sequence_parallel", "layout", "ops", "comm", "mesh"},
    "data": {"layout", "models", "mesh", "comm", "printable"},
    "distributed": {"models", "sequence_parallel", "layout", "ops", "comm", "mesh"},
    "train": {
        "data",
        "distributed",
        "models",
        "sequence_parallel",
        "layout",
        "ops",
        "comm",
        "mesh",
        "verify",
        "printable",
    },
    "verify": {"data", "distributed", "models", "sequence_parallel", "layout", "ops", "comm", "mesh"},
    "plan": {"layout", "mesh"},
    "doctor": {"ops"},
}
"""Room to the rooms it may import, as the design has it; the package's front and `cli` may import all."""


def imported_rooms(path: Path, package: Path = PACKAGE) -> set[str]:
    """The rooms of this package that a file imports, wherever in the file."""
    parts = path.relative_to(package).with_suffix("").parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            if node.level:
                base = list(parts[: len(parts) - node.level])
                targets = [[*base, *module, alias.name] for alias in node.names]
            elif module[:1] == ["seqbraid"]:
                targets = [[*module[1:], alias.name] for alias in node.names]
            else:
                continue
        elif isinstance(node, ast.Import):
            targets = [a.name.split(".")[1:] for a in node.names if a.name.split(".")[0] == "seqbraid"]
        else:
            continue
        found |= {target[0] for target in targets if target}
    return found


def test_every_room_keeps_to_what_it_may_import() -> None:
    seen = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room in ("__init__", "__main__", "cli"):
            continue
        assert room in ALLOWED, f"{path} is in no room of the design"
        seen.add(room)
        wrong = imported_rooms(path) - ALLOWED[room] - {room}
        assert not wrong, f"{path.relative_to(PACKAGE)} imports {wrong}; {room} may import {ALLOWED[room]}"
    assert {"layout", "ops", "mesh", "models", "data", "distributed", "verify"} <= seen


def test_the_rule_sees_imports_of_every_form(tmp_path: Path) -> None:
    room = tmp_path / "layout"
    room.mkdir()
    file = room / "bad.py"
    file.write_text(
        "from ..models.batch import Row\nfrom .. import train\nimport seqbraid.verify.run\n"
        "def f():\n    from seqbraid.data import pack\nfrom .dense import x\n"
    )
    assert imported_rooms(file, tmp_path) == {"models", "train", "verify", "data", "layout"}
