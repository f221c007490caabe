"""What is streamed from the Hub is read once, and then at random; pictures are read from within tables."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from seqbraid import Mesh
from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.records.cache import RecordCache
from seqbraid.data.records.mix import open_mix
from seqbraid.data.records.source import open_source
from seqbraid.data.records.streamed import StreamedSource
from seqbraid.data.tiny import tiny_training_model
from tests.helpers.toy import make_loader

datasets = pytest.importorskip("datasets")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `me/data` is found as on the Hub."""
    (tmp_path / "me" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    write(tmp_path, 700)
    return tmp_path


def write(hub: Path, count: int) -> None:
    lines = (json.dumps({"text": f"page {n}", "when": None}) + "\n" for n in range(count))
    (hub / "me" / "data" / "train.jsonl").write_text("".join(lines))


def stream(hub: Path, **options: Any) -> Any:
    entry = {"path": "hf:me/data", "streaming": True, **options}
    return open_mix([entry], RecordCache(str(hub / "cache")))


def test_a_stream_is_read_once_and_then_at_random(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stream(hub)
    assert isinstance(source, StreamedSource)
    assert [source[n]["text"] for n in (699, 0, 300)] == ["page 699", "page 0", "page 300"]
    assert len(source) == 700 and source.where(5) == "hf:me/data[5]"
    part = stream(hub, take=300)
    assert len(part) == 300 and part[299]["text"] == "page 299" and part.fingerprint != source.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr("seqbraid.data.records.streamed._blocks", lambda dataset: pytest.fail("read again"))
        assert stream(hub).fingerprint == source.fingerprint
    write(hub, 699)  # another commit of the dataset
    assert len(stream(hub)) == 699


def test_a_run_on_a_stream_goes_on_bit_for_bit(hub: Path) -> None:
    model, tokenizer = tiny_training_model("llama")
    encoder = SampleEncoder(tokenizer, model.config, MediaFiles(hub))

    def loader() -> Any:
        source = stream(hub, take=60)
        rows = {"row_tokens": 64, "rows_per_step": 2, "buffer_size": 8, "epochs": 2}
        return make_loader(source, lambda: encoder, Mesh(), **rows)

    whole, first, second = loader(), loader(), loader()
    steps = [step.where for step in whole]
    assert steps[0] != sorted(steps[0]) and len({one for step in steps for row in step for one in row}) == 60
    for _ in range(3):
        next(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [step.where for step in second] == steps[3:]


def test_a_stream_that_does_not_fit_says_how_to_read_less(hub: Path) -> None:
    entry = {"path": "hf:me/data", "streaming": True}
    with pytest.raises(ValueError, match=r"hf:me/data unpacks to more .*or read less of it: .*`take`"):
        open_mix([entry], RecordCache(str(hub / "cache"), 1000))
    (hub / "me" / "empty").mkdir()
    with pytest.raises(ValueError, match="hf:me/empty cannot be opened"):
        open_mix([{**entry, "path": "hf:me/empty"}], RecordCache(str(hub / "cache")))
    with pytest.raises(ValueError, match="hf:owner/name"):
        open_mix([{**entry, "path": "hf:a/b/c"}], RecordCache(str(hub / "cache")))


@pytest.mark.parametrize("streamed", [False, True])
def test_pictures_within_tables_are_read_from_there(hub: Path, streamed: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("RGB", (24, 40), "red").save(buffer, "PNG")
    asked = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Red."}]
    rows = [{"messages": asked, "images": [{"bytes": buffer.getvalue(), "path": None}]}]
    table = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    (hub / "me" / "data" / "train.jsonl").unlink()
    path = hub / "me" / "data" / "train.parquet"
    table.to_parquet(path)
    source = stream(hub) if streamed else open_source(str(path))
    model, processor = tiny_training_model("qwen3_vl")
    sample = SampleEncoder(processor, model.config, MediaFiles(hub)).encode(source[0])
    (hub / "a.png").write_bytes(buffer.getvalue())
    same = {"messages": asked, "images": ["a.png"]}
    wanted = SampleEncoder(processor, model.config, MediaFiles(hub)).encode(same)
    assert sample["pixel_values"].equal(wanted["pixel_values"]) and len(sample["image_grid_thw"]) == 1
