"""Records are found by number, wherever in which file they are."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.data.records import jsonl
from seqbraid.data.records.jsonl import JsonlSource
from seqbraid.data.records.source import DatasetSource, open_source


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from([b"", b" ", b"\t ", b"{}", b"17", b' "\xc3\xa9"', b"[1, 2]", b"  \x0b3"]), max_size=12
    ),
    end=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
    mark=st.booleans(),
    scan=st.integers(1, 9),
)
def test_lines_are_found_as_python_finds_them(
    tmp_path_factory: Any, lines: list[bytes], end: bytes, last: bool, mark: bool, scan: int
) -> None:
    if mark and not (lines and lines[0].strip()):
        mark = False
    data = (jsonl.BOM if mark else b"") + end.join(lines) + (end if last else b"")
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "SCAN_BYTES", scan)
        source = JsonlSource(path)
        expected = [(number, line) for number, line in enumerate(lines, 1) if line.strip(b" \t\r\n\x0b\x0c")]
        assert len(source) == len(expected)
    for index, (number, line) in enumerate(expected):
        assert source.where(index) == f"a.jsonl:{number}"
        try:
            wanted = json.loads(line)
        except ValueError:
            with pytest.raises(ValueError, match="not JSON"):
                source[index]
        else:
            assert source[index] == wanted
    with pytest.raises(IndexError):
        source[len(expected)]


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_several_files_and_patterns_are_one_source(tmp_path: Path) -> None:
    for name, numbers in (("b-2", [2, 3]), ("b-1", [0, 1]), ("a", [9])):
        write(tmp_path / f"{name}.jsonl", *numbers)
    source = open_source([str(tmp_path / "b-*.jsonl"), str(tmp_path / "a.jsonl")])
    assert [source[index] for index in range(len(source))] == [0, 1, 2, 3, 9]
    assert [source.where(index) for index in (1, 2, 4)] == ["b-1.jsonl:2", "b-2.jsonl:1", "a.jsonl:1"]
    again = pickle.loads(pickle.dumps(source))
    assert again[3] == 3 and again.fingerprint == source.fingerprint
    with pytest.raises(IndexError):
        source[-1]


def test_files_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "train.jsonl", 1)
    source = open_source(str(tmp_path / "**" / "train.jsonl"))
    assert source.where(0).endswith("x/train.jsonl:1") and source.where(1).endswith("y/train.jsonl:1")


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *range(1000))
    prints = {open_source(first).fingerprint}
    assert open_source(write(tmp_path / "b.jsonl", *range(1000))).fingerprint in prints
    for change in (0, 1_000, -2):
        data = bytearray((tmp_path / "a.jsonl").read_bytes())
        data[change] ^= 1
        (tmp_path / "c.jsonl").write_bytes(data)
        prints.add(open_source(str(tmp_path / "c.jsonl")).fingerprint)
    assert len(prints) == 4
    joined = [
        open_source([first, str(tmp_path / "c.jsonl")]),
        open_source([str(tmp_path / "c.jsonl"), first]),
    ]
    assert joined[0].fingerprint != joined[1].fingerprint


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *range(1000))
    source = open_source(path)
    copy = pickle.dumps(source)
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes()[:100])
    with pytest.raises(ValueError, match="became shorter"):
        source[999]
    with pytest.raises(ValueError, match="changed while"):
        pickle.loads(copy)[0]


def test_a_line_without_end_is_refused_when_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 20)
    source = open_source(write(tmp_path / "a.jsonl", 1, " " * 30, 2))
    assert (source[0], source[2], source.where(1)) == (1, 2, "a.jsonl:2")
    with pytest.raises(ValueError, match="33 bytes; at most 20"):
        source[1]


def test_what_is_no_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("[\n{\n")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.parquet").touch()
    cases = {
        "missing.jsonl": "does not exist",
        "*.nothing": "no file matches",
        "a.json": "not JSON",
        "empty.jsonl": "holds no records",
        "folder": r"of a folder of files, give a pattern such as .*folder/\*\.jsonl",
    }
    for name, reason in cases.items():
        with pytest.raises(ValueError, match=reason):
            open_source(str(tmp_path / name))
    with pytest.raises(ValueError, match="no data source is given"):
        open_source([])
    with pytest.raises(ValueError, match="hf:owner/name"):
        open_source("hf:../../etc")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'seqbraid\[datasets\]'"):
        open_source(str(tmp_path / "a.parquet"))


def test_datasets_give_the_rows_undecoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "images": None},
        {"messages": [], "images": ["x.png"]},
    ]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(tmp_path / "disk")
    whole.to_parquet(tmp_path / "a.parquet")
    for path in (tmp_path / "disk", tmp_path / "a.parquet"):
        source = open_source(str(path))
        assert isinstance(source, DatasetSource)
        assert [source[index] for index in range(2)] == rows
        assert source.where(1) == f"{path.name}[1]"
        assert pickle.loads(pickle.dumps(source))[1] == rows[1]
        assert source.fingerprint == open_source(str(path)).fingerprint
    whole.select([0]).save_to_disk(tmp_path / "other")
    assert open_source(str(tmp_path / "other")).fingerprint != open_source(str(tmp_path / "disk")).fingerprint
    pictures = datasets.Dataset.from_dict({"images": [["a.png"]]})
    pictures = pictures.cast_column("images", datasets.List(datasets.Image()))
    assert DatasetSource(pictures, "x", "")[0] == {"images": [{"bytes": None, "path": "a.png"}]}
    datasets.DatasetDict(train=whole).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"has splits; give one of .*splits/train"):
        open_source(str(tmp_path / "splits"))
