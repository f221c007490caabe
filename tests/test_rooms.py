"""Lower rooms never import higher ones, and no late import hides that they do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "seqbraid"

STEP = {"layout", "ops", "comm", "mesh"}
MODEL = STEP | {"sequence_parallel", "models"}
DATA = {"data", "data/records", "data/chat", "data/media", "data/stream"}
BELOW = MODEL | DATA | {"models/tiny", "data/tiny", "plan", "distributed", "printable"}

ALLOWED: dict[str, set[str]] = {
    "layout": set(),
    "ops": {"layout"},
    "comm": set(),
    "printable": set(),
    "mesh": {"comm"},
    "sequence_parallel": STEP,
    "models": STEP | {"sequence_parallel"},
    "models/tiny": {"models", "layout"},
    "data/records": set(),
    "data/chat": {"data/records"},
    "data/media": {"data/records", "data/chat", "models"},
    "data/stream": {"data/records", "layout", "comm", "mesh", "models", "printable"},
    "data": {
        "data/records",
        "data/chat",
        "data/media",
        "layout",
        "comm",
        "mesh",
        "sequence_parallel",
        "models",
    },
    "data/tiny": {"data/media", "models/tiny"},
    "plan": {"layout", "mesh", "models", "ops"},
    "distributed": MODEL | {"plan"},
    "train": BELOW,
    "train/report": {"train"},
    "train/inspect": BELOW | {"train", "train/report"},
    "train/after": BELOW | {"train", "train/report"},
    "train/demo": BELOW | {"train", "train/report"},
    "bench": BELOW | {"train"},
    "verify": BELOW - {"printable"},
    "integrations": BELOW | {"train"},
    "doctor": {"ops"},
}
"""Room to the rooms it may import beside itself, as the design has it; the package's front and `cli` may
import all. A file or folder within a room may be a room of its own, and then is not of the one around it."""

OPTIONAL = {
    *("PIL", "av", "soundfile"),  # media
    *("datasets", "peft", "sklearn", "fla", "flash_qla"),
    *("jsonargparse", "yaml", "torch.utils.tensorboard", "wandb", "mlflow", "trackio"),  # runs
    *("zstandard", "pyarrow"),  # compressed records
    *("resource", "fcntl"),  # not on Windows
}
"""Packages that may be absent, and so may be imported within a function."""

SLOW = {"torch", "transformers", "rich", "huggingface_hub"}
"""Packages that take long to import, and are imported within a function where many callers do without."""

LATE = {
    *("ops.merge_triton", "ops.cross_entropy_triton", "ops.gated_delta_triton"),
    *("ops.rows_triton", "ops.swiglu_triton"),
}
"""Files of ours that need an optional package to be imported at all. No other file of ours is imported late,
but by the package's front and by `cli`, whose commands import what they run."""

FRONT = ("__init__", "__main__", "cli")


class Import(NamedTuple):
    """What a file imports: a module of ours by its name below the package, or another's package."""

    ours: bool
    target: str
    line: int
    late: bool
    """Within a function."""


def module_of(path: Path, package: Path = PACKAGE) -> str:
    """`ops.conv` for a file, `ops` for the `__init__` of a folder."""
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, package: Path = PACKAGE) -> list[Import]:
    """All imports of a file: of every form, wherever they stand, and by name through `import_module`."""
    parts = path.relative_to(package).with_suffix("").parts
    found = []
    for node, late in _nodes(ast.parse(path.read_text(encoding="utf-8")), False):
        for name in _imported(node, parts):
            ours = name.split(".")[0] == "seqbraid"
            found.append(Import(ours, name.removeprefix("seqbraid.") if ours else name, node.lineno, late))
    return found


def _nodes(node: ast.AST, late: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.expr):
            yield child, late
        yield from _nodes(
            child, late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )


def _imported(node: ast.stmt | ast.expr, parts: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = ["seqbraid", *parts[: len(parts) - node.level]] if node.level else []
        base += node.module.split(".") if node.module else []
        return [".".join([*base, alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = str(node.args[0].value)
        if function in ("import_module", "__import__"):
            assert not name.startswith("."), "name the module in full"
            return [name]
    return []


def room_of(module: str) -> str:
    """The innermost room that a module or a name in one is in."""
    parts = module.split(".")
    rooms = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((room for room in rooms if room in ALLOWED), parts[0])


def files() -> list[Path]:
    """All files below the package's front."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if module_of(path).split(".")[0] not in FRONT]


def test_every_room_keeps_to_what_it_may_import() -> None:
    seen = set()
    for path in files():
        room = room_of(module_of(path))
        assert room in ALLOWED, f"{path} is in no room of the design"
        seen.add(room)
        for found in imports(path):
            other = room_of(found.target)
            assert not found.ours or other == room or other in ALLOWED[room], (
                f"{path}:{found.line} imports {found.target}; {room} may import {sorted(ALLOWED[room])}"
            )
    assert seen == ALLOWED.keys()


def test_late_imports_are_of_what_may_be_absent_or_takes_long() -> None:
    for path in files():
        for found in imports(path):
            if not found.late:
                continue
            if found.ours:
                fits = any(f"{found.target}.".startswith(f"{module}.") for module in LATE)
            else:
                fits = any(f"{found.target}.".startswith(f"{package}.") for package in OPTIONAL | SLOW)
            assert fits, f"{path}:{found.line} imports {found.target} within a function; why not at the top?"


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves in the end, through others."""
    left = {module: others & graph.keys() for module, others in graph.items()}
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    while free := [m for m in left if not any(m in others for others in left.values())]:
        for module in free:
            del left[module]
    return sorted(left)


def test_no_files_import_each_other() -> None:
    modules = {module_of(path): path for path in files()}
    graph = {
        module: {
            found.target if found.target in modules else found.target.rpartition(".")[0]
            for found in imports(path)
            if found.ours
        }
        for module, path in modules.items()
    }
    assert graph["data.stream.loader"] >= {"data.stream.plan", "data.records.source", "mesh"}
    assert not cycles(graph), "these import each other"


def test_a_cycle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "d"}}
    assert cycles(graph) == ["b", "c"]


def test_every_room_says_in_two_sentences_what_lives_there() -> None:
    for room in sorted({path.parent for path in files()} - {PACKAGE}):
        words = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
        assert words and len(re.findall(r"\.(?=\s|$)", words)) >= 2, f"{room}: {words}"


def test_imports_of_every_form_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "layout"
    folder.mkdir()
    file = folder / "bad.py"
    file.write_text(
        "from ..models.batch import Row\nfrom .. import train\nimport seqbraid.verify.run\n"
        "def f():\n    from seqbraid.data import pack\n    import_module('seqbraid.data.stream')\n"
        "from .dense import x\nimport numpy.linalg\n"
    )
    found = imports(file, tmp_path)
    early = [one.target for one in found if one.ours and not one.late]
    assert early == ["models.batch.Row", "train", "verify.run", "layout.dense.x"]
    assert [one.target for one in found if one.ours and one.late] == ["data.pack", "data.stream"]
    assert [one.target for one in found if not one.ours] == ["numpy.linalg"]
    assert [room_of(one.target) for one in found if one.late] == ["data", "data/stream"]


SAME_ON_PURPOSE = {
    "BraidedModel": {
        "models.braided",
        "models.values",
    },  # the class, and the protocol that a file below it needs
    "Trainer": {
        "train.trainer",
        "integrations.transformers",
    },  # of `seqbraid train`, and in place of the stock one
}
"""Names that two modules define, by where they may."""


def definitions(path: Path) -> Iterator[tuple[str, str]]:
    """The classes, functions and types that a module defines, each with what it is another name for."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, ""
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z]+[a-z]\w+", target.id):
                    yield target.id, ast.unparse(node.value)


def named_twice(paths: Iterable[Path], package: Path = PACKAGE) -> dict[str, set[str]]:
    """Public names of two modules that do not mean the same. Triton kernels are called as those in torch."""
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        for name, value in definitions(path):
            if not name.startswith("_") and not path.stem.endswith("_triton"):
                found.setdefault(name, {})[module_of(path, package)] = value
    return {
        name: set(where)
        for name, where in found.items()
        if len(where) > 1 and (len(set(where.values())) > 1 or "" in where.values())
    }


def test_no_two_modules_give_two_things_one_name() -> None:
    assert named_twice(PACKAGE.rglob("*.py")) == SAME_ON_PURPOSE


def test_a_name_of_two_things_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Cut: ...\nGrid = tuple[int, int]\nRow = int\n_Own = int\n")
    (tmp_path / "b.py").write_text("class Cut: ...\nGrid = tuple[int, int]\nRow = str\n_Own = str\nMAX = 1\n")
    (tmp_path / "b_triton.py").write_text("def add(): ...\n")
    (tmp_path / "c.py").write_text("def add(): ...\nclass Row: ...\n")
    assert named_twice(tmp_path.glob("*.py"), tmp_path) == {"Cut": {"a", "b"}, "Row": {"a", "b", "c"}}
