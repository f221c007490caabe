"""Files, functions and calls that are small enough to be read at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 80, 10
LOADER_PARAMETERS = 6
CODE = ("seqbraid", "benchmarks", "examples", "docs")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def num_parameters(function: Function) -> int:
    """Those that a caller gives: neither `self` nor the `ctx` of an autograd function."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def is_kernel(function: Function) -> bool:
    """Whether Triton compiles it: kernels take every pointer, stride and size by itself."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in files(*CODE, "tests")}
    assert len(lengths) > 300
    assert not {str(path): n for path, n in lengths.items() if n > FILE_LINES}


def test_no_function_has_more_than_80_lines() -> None:
    found = {
        f"{path}:{function.lineno} {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for path in files(*CODE, "tests")
        for function in functions(path)
    }
    assert max(found.values()) > 40
    assert not {name: lines for name, lines in found.items() if lines > FUNCTION_LINES}


def test_no_function_takes_more_than_10_parameters() -> None:
    found = {
        f"{path}:{function.lineno} {function.name}": num_parameters(function)
        for path in files(*CODE)
        for function in functions(path)
        if not is_kernel(function)
    }
    assert max(found.values()) > 5
    assert not {name: count for name, count in found.items() if count > PARAMETERS}


def test_the_loader_takes_a_handful_of_parameters() -> None:
    (init,) = (node for node in functions(ROOT / "seqbraid/data/stream/loader.py") if node.name == "__init__")
    assert num_parameters(init) <= LOADER_PARAMETERS


def test_the_slice_for_other_machines_names_tests_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^SLICE = (.+)$", makefile, re.MULTILINE)
    paths = line.split()
    assert len(paths) > 5
    assert not [path for path in paths if not ((ROOT / path).is_dir() or (ROOT / path).is_file())]
