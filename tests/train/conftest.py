"""Conversations, some about pictures, that short runs learn."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.runs import said, shown, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts; and eight pictures, then enough text for whole steps of it, again and again."""
    found = tmp_path_factory.mktemp("data")
    for number in range(4):
        Image.new("RGB", (32 + 16 * number, 48), (60 * number, 90, 10)).save(found / f"{number}.png")
    (found / "cut.png").write_bytes((found / "3.png").read_bytes()[:-40])
    write(found / "text.jsonl", [said(number) for number in range(40)])
    write(found / "eval.jsonl", [said(number) for number in range(50, 57)])
    write(
        found / "mixed.jsonl",
        [shown(number, f"{number % 4}.png") if number % 32 < 8 else said(number) for number in range(96)],
    )
    return found
