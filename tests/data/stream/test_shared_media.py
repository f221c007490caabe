"""Ranks that share a row decode each medium once, and train on the same samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import seqbraid as sb
from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.pack import build_row
from seqbraid.data.stream.loader import Loader
from seqbraid.data.tiny import tiny_training_model
from seqbraid.models.media import MediaInput
from seqbraid.models.tiny.media import MEDIA_FAMILIES
from tests.helpers import ranks
from tests.helpers.media import write_good
from tests.helpers.toy import ListSource, make_loader

pytest.importorskip("PIL")
pytest.importorskip("soundfile")
pytest.importorskip("av")

NUM_RANKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    write_good(root)
    return root


def encoder_for(family: str, root: Path) -> SampleEncoder:
    model, processor = tiny_training_model(family)
    pixels = {"video_min_pixels": 8 * 8, "video_max_pixels": 32 * 32}
    return SampleEncoder(processor, model.config, MediaFiles(root), **pixels)


def record(*files: str) -> dict[str, Any]:
    """A conversation about these files."""
    kinds = {"wav": "audio", "flac": "audio", "mp4": "video"}
    parts = [(kinds.get(file.rpartition(".")[2], "image"), file) for file in files]
    content = [{"type": kind, kind: file} for kind, file in parts]
    answer = {"role": "assistant", "content": "42"}
    return {
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}, answer],
        "fate": "",
    }


def media_of(sample: dict[str, Any], config: Any, rank: int = 0) -> tuple[MediaInput, ...]:
    return build_row([sample], config, rank=rank).media or ()


@pytest.mark.parametrize("family", MEDIA_FAMILIES)
def test_the_parts_of_all_ranks_are_the_sample(family: str, folder: Path) -> None:
    encoder = encoder_for(family, folder)
    files = ["good.png", "good.mp4", "good.jpg", "good.webp"]
    files += ["good.wav", "good.flac", "good.wav"] if "audio" in encoder.media.kinds else []
    whole = encoder.encode(record(*files))
    length, costs = encoder.measure(record(*files))
    wanted = media_of(whole, encoder.config)
    assert length == len(whole["input_ids"]) and costs == [media.item.cost for media in wanted]

    encoders = [index * 2 % NUM_RANKS for index in range(len(files))]
    for rank in range(NUM_RANKS + 1):  # the last one has nothing to encode
        part = encoder.encode(record(*files), encoders, rank)
        for key in ("input_ids", "labels", "image_grid_thw", "video_grid_thw"):
            assert torch.equal(part[key], whole[key])
        found = media_of(part, encoder.config, rank)
        for media, expected, encoding in zip(found, wanted, encoders, strict=True):
            assert media.item == expected.item._replace(rank=encoding)
            if encoding == rank:
                assert expected.payload.numel() and torch.equal(media.payload, expected.payload)
            else:
                assert not media.payload.numel()
        num_patches = len(part.get("pixel_values", ())) + len(part.get("pixel_values_videos", ()))
        pictures = [m.grid for m, e in zip(found, encoders, strict=True) if m.grid and e == rank]
        assert num_patches == sum(map(math.prod, pictures))


def test_wrong_ranks_are_refused(folder: Path) -> None:
    encoder = encoder_for("qwen3_vl", folder)
    files = record("good.png", "good.jpg")
    with pytest.raises(ValueError, match="2 images, videos and clips, 3 before"):
        encoder.encode(files, [0, 1, 0], 0)
    part = encoder.encode(files, [0, 1], 0)
    with pytest.raises(ValueError, match="1 media_ranks for 2 images, videos and clips"):
        sb.pack([{**part, "media_ranks": [0]}], encoder.config)
    with pytest.raises(ValueError, match="image 1 of sample 0 is to be encoded by rank 1, but there are 1"):
        sb.pack([part], encoder.config)
    with pytest.raises(
        ValueError, match="of sample 1 has no rank that encodes it, but other items of the row"
    ):
        sb.pack([encoder.encode(files, [0, 0], 0), encoder.encode(files)], encoder.config)
    with pytest.raises(ValueError, match="pixel_values has 48 patches, but this rank's media have 96"):
        sb.pack([{**part, "media_ranks": [0, 0]}], encoder.config)
    with pytest.raises(ValueError, match="no pixel_values, though this rank encodes some of its media"):
        sb.pack([{k: x for k, x in part.items() if k != "pixel_values"}], encoder.config)


def load(root: Path, sizes: dict[str, int], family: str, files: list[tuple[str, ...]]) -> list[Any]:
    """On one rank: what was decoded, and what each batch has this rank encode."""
    mesh, encoder = sb.Mesh(**sizes), encoder_for(family, root)
    decoded: list[str] = []
    for kind in ("image", "video", "audio"):
        right = getattr(MediaFiles, kind)

        def noted(ref: Any, *rest: Any, right: Any = right) -> Any:
            decoded.append(ref.source)
            return right(encoder.media.files, ref, *rest)

        object.__setattr__(encoder.media.files, kind, noted)
    source = ListSource([record(*names) for names in files])
    loader = make_loader(
        source, lambda: encoder, mesh, row_tokens=512, rows_per_step=1, shuffle=False, epochs=1
    )
    batches = [sb.pack(row, encoder.config, mesh) for step in loader for row in step.rows if row]
    own = [[media.item[:3] for media in batch.media.own] for batch in batches if batch.media is not None]
    return [decoded, own, [batch.fingerprint for batch in batches]]


@pytest.mark.parametrize(
    "sizes", [{"ring": 2}, {"ulysses": 2}, {"ring": 2, "ulysses": 2}, {"pp": 2, "tp": 2}]
)
def test_each_medium_is_decoded_by_one_rank(folder: Path, sizes: dict[str, int]) -> None:
    files = [
        ("good.png", "good.jpg"),
        (),
        ("good.mp4",),
        ("good.webp", "good.bmp", "good.tif"),
        ("good.gif",),
    ]
    found = ranks.run(load, math.prod(sizes.values()), folder, sizes, "qwen3_vl", files)
    decoded = [name for names, _, _ in found for name in names]
    assert sorted(decoded) == sorted(name for names in files for name in names)
    of_first_stage = len(found) // sizes.get("pp", 1)
    assert [bool(names) for names, _, _ in found] == [rank < of_first_stage for rank in range(len(found))]
    assert all(prints == found[0][2] for _, _, prints in found)
    assert [len(names) for names, _, _ in found] == [sum(map(len, own)) for _, own, _ in found]


def load_in_two_runs(root: Path, files: list[tuple[str, ...]], stop: int) -> list[Any]:
    """On one rank: the rows of a run that goes on after some steps, and how many media each has it encode."""
    mesh, encoder = sb.Mesh(ring=2), encoder_for("qwen3_vl", root)
    source = ListSource([record(*names) for names in files])

    def loader() -> Loader:
        settings = {"row_tokens": 100, "rows_per_step": 1, "buffer_size": 6, "epochs": 1}
        return make_loader(source, lambda: encoder, mesh, **settings)  # type: ignore[arg-type]

    first, second = loader(), loader()
    rows = [row for _ in range(stop) for row in next(first).rows]
    if stop:
        second.load_state_dict(first.state_dict())
    rows += [row for step in second for row in step.rows]
    batches = [sb.pack(row, encoder.config, mesh) for row in rows]
    own = [len(batch.media.own) for batch in batches if batch.media is not None]
    return [[sample["input_ids"].tolist() for row in rows for sample in row], own]


def test_a_run_that_goes_on_knows_samples_that_it_did_not_measure(folder: Path) -> None:
    """Those at hand for the packer were measured in the run before; a row may have some of them."""
    files = 3 * [("good.png",), ("good.jpg", "good.webp"), (), ("good.bmp",), ("good.tif", "good.gif")]
    whole = ranks.run(load_in_two_runs, 2, folder, files, 0)
    for stop in (1, 2, 3):
        found = ranks.run(load_in_two_runs, 2, folder, files, stop)
        for (samples, own), (wanted, wanted_own) in zip(found, whole, strict=True):
            assert samples == wanted and len(own) == len(wanted_own)
        assert sum(sum(own) for _, own in found) == sum(map(len, files))


def test_clips_of_a_sample_are_decoded_together(folder: Path) -> None:
    """A clip is padded to the longest of its sample before it becomes mel frames."""
    files = [("good.wav", "good.flac"), ("good.png",)]
    found = ranks.run(load, 2, folder, {"ring": 2}, "qwen3_omni", files)
    for names, own, _ in found:
        kinds = [kind for of_batch in own for kind, *_ in of_batch]
        assert ("audio" in kinds) == ("good.wav" in names) == ("good.flac" in names)
    assert sum("good.png" in names for names, _, _ in found) == 1
