"""One packed row, decoded to pieces of text and media."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ...data.encode import SampleEncoder
from ...data.records.parts import MediaRef
from ...data.stream.plan import Draw
from ...data.stream.tasks import Refused, Tasks, Wanted
from ...layout.labels import IGNORE
from ...models.batch import WEIGHTS
from .survey import Reader

THUMBNAIL = 96
"""Pixels of the longer side."""


@dataclass(frozen=True)
class TokenRun:
    """Tokens of a sample that follow each other and are alike."""

    text: str
    tokens: int
    labelled: bool
    media: str = ""
    """The kind of media whose placeholders these are."""
    ref: MediaRef | None = None
    """The item, with its first placeholders."""
    weight: float = 1.0
    """How much each of its labels counts in the loss."""


@dataclass(frozen=True)
class PackedSample:
    """A sample of a row, or a piece of one."""

    where: str
    tokens: int
    labels: int
    pieces: list[TokenRun]
    part: str = ""
    """Which tokens of the sample these are, where they are not all."""


@dataclass(frozen=True)
class PackedRow:
    """A row as a step computes it."""

    number: int
    samples: list[PackedSample]
    row_tokens: int
    refused: list[str]
    """Samples that were planned for the row, and cannot be encoded."""

    @property
    def title(self) -> str:
        """Its number, and how full it is."""
        tokens = sum(sample.tokens for sample in self.samples)
        return f"Row {self.number}: {len(self.samples)} samples, {tokens:,} of {self.row_tokens:,} tokens"

    @property
    def has_weights(self) -> bool:
        """Whether some labels count more or less than others."""
        return any(piece.weight != 1 for sample in self.samples for piece in sample.pieces)


def packed_row(reader: Reader, number: int) -> PackedRow:
    """The row of this number, from 0, of the first epoch, encoded by what the workers of a run do."""
    planner = reader.planner(reader.order)
    for _ in range(number + 1):
        step = planner.next_step()
        if step is None:
            raise ValueError(f"--row={number}: an epoch has no such row; the last one has a smaller number")
    assert step is not None
    draws = step.rows[0]
    rows = reader.rows
    tasks = Tasks(reader.source, lambda: reader.encoder, rows.row_tokens, over_long=rows.over_long)
    found = tasks.encode([Wanted(draw) for draw in draws])
    samples, refused = [], []
    for draw, sample in zip(draws, found, strict=True):
        where = reader.source.where(draw.sample)
        if isinstance(sample, Refused):
            refused.append(f"{where}: {sample.reason}")
        else:
            samples.append(_sample(reader, draw, where, sample))
    return PackedRow(number, samples, rows.row_tokens, refused)


def _sample(reader: Reader, draw: Draw, where: str, sample: dict[str, Any]) -> PackedSample:
    ids_T, labels_T = (sample[key].numpy() for key in ("input_ids", "labels"))
    refs = reader.encoder.look(reader.source[draw.sample]).media
    part = ""
    if draw.whole:
        part = f"tokens {draw.start:,} to {draw.start + len(ids_T):,} of {draw.whole:,}"
    elif draw.length > len(ids_T):
        part = f"the first {len(ids_T):,} tokens of {draw.length:,}"
    pieces = list(_pieces(reader.encoder, ids_T, labels_T, refs, sample))
    return PackedSample(where, len(ids_T), int((labels_T[1:] != IGNORE).sum()), pieces, part)


def _pieces(
    encoder: SampleEncoder, ids_T: Any, labels_T: Any, refs: Sequence[MediaRef], sample: dict[str, Any]
) -> Iterator[TokenRun]:
    kind_of = {
        int(encoder.tokenizer.convert_tokens_to_ids(token)): kind
        for kind, token in encoder.placeholders.token.items()
    }
    kinds = [kind_of.get(int(one), "") for one in ids_T]
    labelled_T = [bool(label != IGNORE) and not kind for kind, label in zip(kinds, labels_T, strict=True)]
    weights_T = sample.get("fields", {}).get(WEIGHTS)
    given_T = [1.0] * len(ids_T) if weights_T is None else weights_T.tolist()
    weight_T = [weight if has else 1.0 for weight, has in zip(given_T, labelled_T, strict=True)]
    alike = list(zip(kinds, labelled_T, weight_T, strict=True))
    edges = [0, *(n for n in range(1, len(alike)) if alike[n] != alike[n - 1]), len(alike)]
    spans = list(pairwise(edges))
    items = _items([alike[start][0] for start, _ in spans], refs, sample)
    decode = _decoder(encoder.tokenizer, ids_T)
    for (start, stop), ref in zip(spans, items, strict=True):
        kind, labelled, weight = alike[start]
        yield TokenRun("" if kind else decode(start, stop), stop - start, labelled, kind, ref, weight)


def _items(kinds: Sequence[str], refs: Sequence[MediaRef], sample: dict[str, Any]) -> list[MediaRef | None]:
    """For each run of placeholders the item that begins there: a video may have a run for each frame."""
    found: list[MediaRef | None] = [None] * len(kinds)
    for kind in {kind for kind in kinds if kind}:
        places = [place for place, one in enumerate(kinds) if one == kind]
        own = [ref for ref in refs if ref.kind == kind]
        counts = [1] * len(own)
        if kind == "video" and len(places) != len(own) and sample.get("video_grid_thw") is not None:
            counts = sample["video_grid_thw"][:, 0].tolist()
        if len(counts) == len(own) and sum(counts) == len(places):
            starts = np.cumsum([0, *counts])[: len(own)]
            for start, ref in zip(starts.tolist(), own, strict=True):
                found[places[start]] = ref
    return found


def _decoder(tokenizer: Any, ids_T: Any) -> Callable[[int, int], str]:
    """Decodes some of the tokens as they read behind the one before: some tokenizers drop the white space
    that a text begins with.
    """

    def text(start: int, stop: int) -> str:
        return str(
            tokenizer.decode(
                ids_T[start:stop].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def decode(start: int, stop: int) -> str:
        before = text(max(0, start - 1), start)
        both = text(max(0, start - 1), stop)
        return both[len(before) :] if both.startswith(before) else text(start, stop)

    return decode


def thumbnail(encoder: SampleEncoder, ref: MediaRef, side: int = THUMBNAIL) -> Any:
    """A small picture of an image or of a video's first frame; None of a sound and of what cannot be read."""
    files = encoder.media.files
    try:
        if ref.kind == "image":
            picture = files.image(ref)
        elif ref.kind == "video":
            from PIL import Image

            picture = Image.fromarray(files.video(ref, [0])[0])
        else:
            return None
    except ValueError:
        return None
    picture.thumbnail((side, side))
    return picture.convert("RGB")


def name_of(ref: MediaRef) -> str:
    """A source as a page may show it: of a `data:` URI the beginning alone."""
    return ref.source if len(ref.source) <= 60 else f"{ref.source[:40]}…{ref.source[-12:]}"
