"""Files without random access give the records that they hold, from a folder that stays bounded."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.data.records import cache, unpack
from seqbraid.data.records.cache import RecordCache
from seqbraid.data.records.source import open_source
from tests.helpers import ranks

RECORDS: list[Any] = [
    {"text": 'a "b" [c], {d}\n', "n": -1.5e3},
    {"text": "日本"},
    {"n": [1, {"m": None}]},
    {},
    17,
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def packed(path: Path, data: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    elif path.suffix == ".zst":
        pyarrow = pytest.importorskip("pyarrow")
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(data)
    else:
        path.write_bytes(data)
    return path


def every(path: Path) -> list[Any]:
    source = open_source(str(path))
    return [source[index] for index in range(len(source))]


LINES = "\n\n".join(json.dumps(record) for record in RECORDS).encode()


@pytest.mark.parametrize(
    ("name", "data", "third"),
    [
        ("a.jsonl.gz", LINES, "a.jsonl.gz:5"),
        ("a.ndjson.zst", LINES, "a.ndjson.zst:5"),
        ("a.json", json.dumps(RECORDS, indent=2).encode(), "a.json[2]"),
        ("a.json.gz", json.dumps(RECORDS).encode(), "a.json.gz[2]"),
        ("a.json.zst", json.dumps(RECORDS, ensure_ascii=False).encode("utf-8-sig"), "a.json.zst[2]"),
        ("b.json", LINES, "b.json:5"),
    ],
)
def test_all_kinds_give_the_records(tmp_path: Path, name: str, data: bytes, third: str) -> None:
    path = packed(tmp_path / name, data)
    source = open_source(str(path))
    assert [source[index] for index in (4, 0, 3, 1, 2)] == [RECORDS[index] for index in (4, 0, 3, 1, 2)]
    assert source.where(2) == third
    assert pickle.loads(pickle.dumps(source))[1] == RECORDS[1]
    os.utime(path, (1, 1))  # what is in it counts for a run that goes on, not when it was written
    assert open_source(str(path)).fingerprint == source.fingerprint


def test_a_table_gives_rows_by_its_first_one(tmp_path: Path) -> None:
    rows = [{"prompt": 'a, "b"', "completion": "x\ny"}, {"prompt": "日本", "completion": ""}]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["prompt", "completion"])
    writer.writeheader()
    writer.writerows(rows)
    path = packed(tmp_path / "a.csv", text.getvalue().encode("utf-8-sig"))
    assert every(path) == rows and open_source(str(path)).where(1) == "a.csv[1]"
    assert every(packed(tmp_path / "a.csv.gz", path.read_bytes())) == rows
    assert every(packed(tmp_path / "a.tsv", b"text\tn\na,b\t5\n\n")) == [{"text": "a,b", "n": "5"}]
    long = packed(tmp_path / "long.csv", b"text\n" + b"x" * 200_000 + b"\n")
    assert every(long) == [{"text": "x" * 200_000}] and csv.field_size_limit() == 131_072


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(JSON, max_size=5), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_arrays_are_cut_where_json_cuts_them(
    values: list[Any], block: int, indent: int | None, ascii_: bool
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpack, "BLOCK", block)
        try:
            lines = b"".join(unpack._array(unpack._Text(io.BytesIO(text))))
        except ValueError:
            assert not ascii_
            return
    assert [json.loads(line) for line in lines.split(b"\n")[:-1]] == values


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.json", b'{"data": [\n1, 2]}', "array of records .* begins with '{\"data\""),
        ("a.json", b"[1, 2", "not JSON: a comma or the end of the array is missing at character 5"),
        ("a.json", b'[{"a": 1}, {"a" 2}]', "not JSON: Expecting ':' delimiter at character 16"),
        ("a.json", b"[1, 2,]", "a record is missing after a comma"),
        ("a.json", b"[1] [2]", "more follows after the array"),
        ("a.json", b"[" + b"[" * 10**5, "nested too deep|not JSON"),
        ("a.json", b"[]", "holds no records"),
        ("a.json", b"", "holds no records"),
        ("a.json", b'["\xff"]', "not UTF-8"),
        ("a.jsonl.gz", b"{}", "cannot be read: BadGzipFile"),
        ("a.jsonl.zst", b"{}", "cannot be read"),
        ("a.csv", b"a,a\n1,2\n", "each by another name"),
        ("a.csv", b"a,b\n1,2\n1\n", "line 3 has 1 values, but there are 2 columns"),
        ("a.csv", b'a,b\n1,"2"x\n', "no CSV on line 2"),
        ("a.gz", b"", "a.jsonl.gz"),
        ("a.parquet.gz", b"", "not a supported data source"),
    ],
)  # fmt: skip
def test_what_cannot_be_unpacked_is_refused(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    if name.endswith("zst"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=reason) as error:
        open_source(str(tmp_path / name))
    assert name in str(error.value)
    assert not list((tmp_path / "home").rglob("*.tmp"))


def test_a_cut_gzip_file_leaves_nothing(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.jsonl.gz", os.urandom(5000).hex().encode())
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz cannot be read: EOFError"):
        open_source(str(path))
    assert not list((tmp_path / "home").rglob("*.jsonl"))


def test_zst_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    for name in ("zstandard", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'seqbraid\[zstd\]'"):
        open_source(str(tmp_path / "a.jsonl.zst"))


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    options = RecordCache(str(folder), limit=2500)
    paths = [packed(tmp_path / f"{name}.jsonl.gz", json.dumps(name * 990).encode()) for name in "abc"]

    def held() -> set[str]:
        return {path.read_text()[1] for path in folder.glob("*.jsonl")}

    source = open_source(str(paths[0]), options)
    open_source(str(paths[1]), options)
    assert held() == {"a", "b"}
    for path in folder.glob("*.jsonl"):
        os.utime(path, (1, 1) if path.read_text()[1] == "a" else (2, 2))
    # What this process reads stays; after its end another may take the place.
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz unpacks to more than is left of data.cache_gib="):
        open_source(str(paths[2]), options)
    assert held() == {"a", "b"} and source[0] == "a" * 990
    for lock in cache._locks.values():
        lock.close()
    monkeypatch.setattr(cache, "_locks", {})
    open_source(str(paths[2]), options)
    assert held() == {"b", "c"}
    killed = folder / "0123.99.tmp"  # what a process that was killed has left goes, too
    killed.write_bytes(b"x" * 900)
    os.utime(killed, (1, 1))
    open_source(str(paths[0]), options)
    assert held() == {"a", "c"} and len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("harm", ["cut", "edited", "no record of it"])
def test_what_was_damaged_since_is_unpacked_again(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer records than the file has would be a run on other data, with status 0."""
    path, folder = packed(tmp_path / "a.json", json.dumps(RECORDS).encode()), tmp_path / "cache"
    assert read_on_rank(str(path), str(folder)) == (RECORDS[1], len(RECORDS)) and not caplog.text
    (found,) = folder.glob("*.jsonl")
    whole = found.read_bytes()
    if harm == "cut":
        found.write_bytes(whole[: whole.index(b"\n") + 1])
    elif harm == "edited":
        found.write_bytes(whole.replace(b"1", b"2"))
    else:
        found.with_suffix(".lock").unlink()
    for lock in cache._locks.values():  # another run
        lock.close()
    monkeypatch.setattr(cache, "_locks", {})
    assert read_on_rank(str(path), str(folder)) == (RECORDS[1], len(RECORDS))
    assert found.read_bytes() == whole and "is damaged: it is unpacked again" in caplog.text
    monkeypatch.setattr(cache, "_locks", {})
    caplog.clear()
    assert read_on_rank(str(path), str(folder))[1] == len(RECORDS) and not caplog.text


def read_on_rank(path: str, folder: str) -> tuple[Any, int]:
    source = open_source(path, RecordCache(folder))
    return source[1], len(source)


def test_ranks_unpack_a_file_once(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.json", json.dumps(RECORDS).encode())
    assert ranks.run(read_on_rank, 4, str(path), str(tmp_path / "cache")) == [(RECORDS[1], len(RECORDS))] * 4
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_who_waited_for_another_process_does_not_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process keeps its lock, as a reader; the file comes while we look for it."""
    fcntl = pytest.importorskip("fcntl")
    path, folder = packed(tmp_path / "a.json", json.dumps(RECORDS).encode()), tmp_path / "cache"
    read_on_rank(str(path), str(folder))
    monkeypatch.setattr(cache, "_locks", {})
    (found,) = folder.glob("*.jsonl")
    found.rename(tmp_path / "kept")
    with cache._lock_file(found).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        waiting = threading.Thread(target=read_on_rank, args=(str(path), str(folder)), daemon=True)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not found.exists()
        (tmp_path / "kept").rename(found)
        waiting.join(20)
        assert not waiting.is_alive()
