"""Every malformed record is refused with its reason, quickly, and opens nothing outside the media folder."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.records.conversation import Conversation, MediaRef
from seqbraid.data.records.formats import parse_record
from seqbraid.data.records.source import JsonlSource, Source, open_source
from seqbraid.data.stream.loader import Loader
from seqbraid.data.tiny import tiny_training_model
from seqbraid.mesh import Mesh
from tests.helpers import ranks
from tests.helpers.toy import make_loader

from .fuzz import Case, good_records, make_corpus, media_root

pytest.importorskip("PIL")
pytest.importorskip("soundfile")
pytest.importorskip("av")

SLOWEST_S = 5.0
"""Of processor time, which other work on the machine does not lengthen."""


class Watch:
    """Notes what the process opens and connects to, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.opened: list[str] = []
        self.connected: list[str] = []
        sys.addaudithook(self._note)  # a hook cannot be taken back, hence the switch

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            self.opened.append(os.path.realpath(os.fsdecode(args[0])))
        if event in (
            "socket.connect",
            "socket.getaddrinfo",
            "urllib.Request",
            "subprocess.Popen",
            "os.system",
        ):
            self.connected.append(f"{event} {args}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    return make_corpus(folder / "corpus")


def read_all(source: Source, index: int, media: MediaFiles) -> Iterator[tuple[MediaRef, Any]]:
    """A record's media, decoded as training would; first and last frame of a video."""
    parsed = parse_record(source[index])
    for ref in parsed.media if isinstance(parsed, Conversation) else ():
        if ref.kind == "image":
            yield ref, media.image(ref)
        elif ref.kind == "audio":
            yield ref, media.audio(ref, 16_000)
        else:
            yield ref, media.video(ref, [0, media.video_info(ref).num_frames - 1])


def jsonl(path: Path, lines: list[bytes]) -> JsonlSource:
    path.write_bytes(b"\n".join(lines))
    return JsonlSource(path)


def test_good_records_are_read(cases: list[Case], folder: Path) -> None:
    source = jsonl(folder / "good.jsonl", [json.dumps(record).encode() for record in good_records()])
    media = MediaFiles(media_root(folder / "corpus"))
    kinds = [[ref.kind for ref, _ in read_all(source, index, media)] for index in range(len(source))]
    assert kinds == [
        *([], ["image"], ["image", "video", "audio"], ["audio"], ["video"], ["image"]),
        *([], [], [], ["image"], []),
    ]


def test_each_malformed_record_is_refused_with_its_reason(
    cases: list[Case], folder: Path, watch: Watch
) -> None:
    test_good_records_are_read(cases, folder)  # so that nothing is imported late while the watch is on
    root = media_root(folder / "corpus").resolve()
    source = jsonl(folder / "bad.jsonl", [case.record_line for case in cases])
    media = MediaFiles(root)
    assert len(source) == len(cases) >= 600
    wrong = []
    for index, case in enumerate(cases):
        began = time.process_time()
        watch.opened.clear()
        watch.on = True
        try:
            list(read_all(source, index, media))
            outcome = "was read"
        except ValueError as error:
            outcome = "" if re.search(case.expect, str(error)) else f"gave {error}"
            if len(str(error)) > 2000:
                outcome = f"gave a reason of {len(str(error))} characters"
        except BaseException as error:
            outcome = f"raised {type(error).__name__}: {error}"
        finally:
            watch.on = False
        took = time.process_time() - began
        outside = [p for p in watch.opened if not Path(p).is_relative_to(root) and p != str(source.path)]
        if took > SLOWEST_S:
            outcome += f" took {took:.1f} s"
        if outside:
            outcome += f" opened {outside}"
        if outcome:
            wrong.append(f"{case.name}: {outcome}; expected {case.expect}")
    assert not wrong, "\n".join(wrong)
    assert not watch.connected


def test_the_watch_sees_what_is_opened(folder: Path, watch: Watch) -> None:
    (folder / "seen").write_text("x")
    watch.opened.clear()
    watch.on = True
    os.close(os.open(folder / "seen", os.O_RDONLY))
    watch.on = False
    assert watch.opened == [str((folder / "seen").resolve())]


# The whole way: file, loader, encoder.


def encoder_for(root: Path) -> SampleEncoder:
    """The encoder of a model that sees, hears and watches."""
    model, processor = tiny_training_model("qwen3_omni")
    pixels = {"video_min_pixels": 8 * 8, "video_max_pixels": 32 * 32}
    return SampleEncoder(processor, model.config, MediaFiles(root), **pixels)


def loader_of(path: Path, encoder: SampleEncoder, mesh: Mesh, **options: Any) -> Loader:
    source = open_source(str(path))
    return make_loader(
        source, lambda: encoder, mesh, row_tokens=1024, rows_per_step=2, shuffle=False, **options
    )


def mixed(path: Path, cases: list[Case], every: int) -> tuple[dict[str, dict[str, Any]], dict[str, Case]]:
    """Write the cases with a good record before `every` few; the records and cases by `file:line`."""
    records = good_records()
    lines, good, bad = [], {}, {}
    for index, case in enumerate(cases):
        if index % every == 0:
            record = records[index // every % len(records)]
            lines.append(json.dumps(record).encode())
            good[f"{path.name}:{len(lines)}"] = record
        lines.append(case.record_line)
        bad[f"{path.name}:{len(lines)}"] = case
    path.write_bytes(b"\n".join(lines))
    return good, bad


def loaded(loader: Loader) -> list[tuple[str, dict[str, Any]]]:
    """All samples of a loader, each after its file and line."""
    return [
        pair
        for step in loader
        for where, row in zip(step.where, step.rows, strict=True)
        for pair in zip(where, row, strict=True)
    ]


def mismatches(reasons: dict[str, str], bad: dict[str, Case]) -> list[str]:
    assert reasons.keys() <= bad.keys()
    return [
        f"{bad[where].name}: gave {reason}; expected {bad[where].expect}"
        for where, reason in reasons.items()
        if not re.search(bad[where].expect, reason)
    ]


@pytest.fixture(scope="module")
def encoder(cases: list[Case], folder: Path) -> SampleEncoder:
    return encoder_for(media_root(folder / "corpus").resolve())


def test_a_run_skips_each_malformed_line_counts_and_lists_it_once(
    cases: list[Case], folder: Path, watch: Watch, encoder: SampleEncoder
) -> None:
    path, listed = folder / "all.jsonl", folder / "bad_samples.jsonl"
    good, bad = mixed(path, cases, every=30)
    assert len(good) > 2 * len(good_records())
    alone = {where: encoder.encode(record) for where, record in good.items()}
    mesh = Mesh(rank=0, world_size=1)
    # In two epochs, so that what is found in both must be counted once.
    loader = loader_of(path, encoder, mesh, epochs=2, on_bad_sample="skip", bad_file=listed)
    watch.opened.clear()
    watch.on = True
    began = time.process_time()
    try:
        samples = loaded(loader)
    finally:
        watch.on = False
    assert time.process_time() - began < 10 * SLOWEST_S
    root = media_root(folder / "corpus").resolve()
    allowed = {str(path.resolve()), str(listed.resolve())}
    assert not [p for p in watch.opened if not Path(p).is_relative_to(root) and p not in allowed]
    assert not watch.connected

    assert sorted(where for where, _ in samples) == sorted([*good, *good])
    for where, sample in samples:
        assert sample.keys() == alone[where].keys()
        assert sample["input_ids"].equal(alone[where]["input_ids"])
    found = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines()]
    assert loader.bad.count == len(found) == len(cases)
    reasons = {entry["where"]: entry["reason"] for entry in found}
    assert len(reasons) == len(cases)
    wrong = mismatches(reasons, bad)
    assert not wrong, "\n".join(wrong)


def some(cases: list[Case]) -> list[Case]:
    """A few of every sort, among them some that only decoding tells."""
    late = {"wav with nan", "wav with infinity", "avi promises more frames than it has"}
    return [case for index, case in enumerate(cases) if index % 60 == 30 or case.name in late]


def test_a_run_stops_at_the_first_malformed_line(
    cases: list[Case], folder: Path, encoder: SampleEncoder
) -> None:
    chosen = some(cases)
    assert len(chosen) >= 10
    for case in chosen:
        path = folder / "stops.jsonl"
        goods = [json.dumps(record).encode() for record in good_records()[:2]]
        path.write_bytes(b"\n".join([*goods, case.record_line, *goods]))
        loader = loader_of(path, encoder, Mesh(rank=0, world_size=1), epochs=1)
        with pytest.raises(ValueError, match=r"^stops\.jsonl:3: ") as error:
            loaded(loader)
        assert re.search(case.expect, str(error.value)), case.name


def load_on_ranks(path: Path, root: Path, mesh_sizes: dict[str, int], on_bad_sample: Any) -> Any:
    loader = loader_of(path, encoder_for(root), Mesh(**mesh_sizes), epochs=1, on_bad_sample=on_bad_sample)
    return [where for where, _ in loaded(loader)], loader.bad.count, loader.bad.first


@pytest.mark.parametrize("mesh_sizes", [{"dp_shard": 2}, {"ring": 2}])
def test_ranks_leave_out_and_refuse_the_same(
    cases: list[Case], folder: Path, mesh_sizes: dict[str, int]
) -> None:
    path, root = folder / "ranks.jsonl", media_root(folder / "corpus").resolve()
    chosen = sorted(some(cases), key=lambda case: not case.name.startswith(("wav", "avi")))[:10]
    good, bad = mixed(path, chosen, every=2)
    found = ranks.run(load_on_ranks, 2, path, root, mesh_sizes, "skip")
    seen = found[0][0] if "ring" in mesh_sizes else found[0][0] + found[1][0]
    assert sorted(seen) == sorted(good)
    for _, count, first in found:
        assert count == len(chosen) and first == found[0][2]
    wrong = mismatches({entry.where: entry.reason for entry in found[0][2]}, bad)
    assert not wrong, "\n".join(wrong)
    raised = ranks.errors(load_on_ranks, 2, path, root, mesh_sizes, "error")
    assert raised[0] == raised[1] and raised[0].kind == "ValueError"
    where, reason = raised[0].message.split(": ", 1)
    assert not mismatches({where: reason}, bad)
