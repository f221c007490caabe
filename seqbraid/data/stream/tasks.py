"""What is done with a sample in a worker: it is measured, and later encoded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...layout.labels import num_targets
from .plan import BAD, Draw, Measured, OverLong
from .texts import compact
from .token_cache import TokenCache, Tokenized

if TYPE_CHECKING:
    from ..records.source import Source

LONGEST = 2**31 - 1
CAN_BE_CUT = ("input_ids", "labels", "attention_mask", "fields")


class Encoder(Protocol):
    """What turns a record into a sample; it raises `ValueError` for a bad one."""

    def length(self, record: Any) -> int: ...

    def encode(self, record: Any) -> Mapping[str, Any]: ...


@runtime_checkable
class SharesMedia(Protocol):
    """An encoder that can leave the media of other ranks undecoded; see `SampleEncoder`."""

    def measure(self, record: Any) -> tuple[int, list[float]]: ...

    def encode(self, record: Any, media_ranks: Sequence[int] | None, rank: int) -> Mapping[str, Any]: ...


@runtime_checkable
class KeepsText(Protocol):
    """An encoder that need not be asked twice for a sample without media."""

    def encode_text(self, record: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """All that `encode` gives of it, `input_ids` and `labels`; None if it has media."""
        ...


@runtime_checkable
class Fingerprinted(Protocol):
    """An encoder whose texts may be kept for other runs."""

    @property
    def fingerprint(self) -> str:
        """Changes with whatever decides which tokens and labels a text has."""
        ...


class Unmeasured(NamedTuple):
    """Samples to be measured together."""

    samples: Sequence[int]
    text_bytes: int = 0
    """How much of their texts is to be kept."""


class Wanted(NamedTuple):
    """A sample to be encoded."""

    draw: Draw
    media_ranks: tuple[int, ...] = ()
    """Which rank of the sequence group encodes each of its media; nothing where all are decoded here."""


class Refused(NamedTuple):
    """In place of a sample: why there is none."""

    reason: str
    cut_short: bool = False
    """Nothing is wrong with it, but the part of it that a row holds has no label."""


class Tasks:
    """What workers do: measure and encode samples of a source, for this rank of so many that share a row.

    Of samples longer than a row the text is kept where they are truncated or split.
    """

    def __init__(
        self,
        source: Source,
        make_encoder: Callable[[], Encoder],
        row_tokens: int,
        rank: int = 0,
        num_ranks: int = 1,
        over_long: OverLong = "error",
        planner: Callable[[Sequence[int]], Any] | None = None,
        tokens: TokenCache | None = None,
    ) -> None:
        self.source = source
        self.make_encoder = make_encoder
        self.row_tokens = row_tokens
        self.rank = rank
        self.num_ranks = num_ranks
        self.over_long = over_long
        self._latest: tuple[int, dict[str, Any]] | None = None  # a document, of which more pieces may come
        self.plan = planner
        """What is made of a row's lengths alone."""
        self.tokens = tokens
        """What earlier runs have tokenized."""
        self.at: Callable[[int], None] | None = None
        """Is told which sample is next, by the process that does the tasks."""

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of this process, made on first use."""
        encoder = self.make_encoder()
        if self.tokens is not None and isinstance(encoder, Fingerprinted):
            self.tokens.open(self.source.fingerprint, encoder.fingerprint, len(self.source))
        return encoder

    def measure(self, unmeasured: Unmeasured) -> list[Measured]:
        """Lengths of samples, or why they are bad; with what their media cost, if ranks share them, and with
        as many of their texts as may be kept.
        """
        found: list[Measured] = []
        space = unmeasured.text_bytes
        for sample in unmeasured.samples:
            measured = self._try(sample, self._measured, sample)
            if isinstance(measured, Refused):
                measured = Measured(sample, BAD, measured.reason)
            elif measured.text is not None and measured.text.nbytes > space:
                measured = measured._replace(text=None)
            elif measured.text is not None:
                space -= measured.text.nbytes
            found.append(measured)
        if self.tokens is not None:
            self.tokens.flush()
        return found

    def encode(self, samples: Sequence[Wanted]) -> list[dict[str, Any] | Refused]:
        """Samples as they go into a row, or why they cannot."""
        return [self._try(wanted.draw.sample, self._encoded, wanted) for wanted in samples]

    def _try(self, sample: int, function: Callable[[Any], Any], argument: Any) -> Any:
        encoder = self.encoder  # an error while it is made is none of the sample
        assert encoder is not None
        if self.at is not None:
            self.at(sample)
        try:
            return function(argument)
        except ValueError as error:
            return Refused(str(error))
        except Exception as error:
            raise RuntimeError(f"{self.source.where(sample)}: {type(error).__name__}: {error}") from error

    def _measured(self, sample: int) -> Measured:
        record, costs = self.source[sample], list[float]()
        text = self._tokenized(sample, record)
        if text is not None:
            length = len(text.ids_T)
        elif self.num_ranks > 1 and isinstance(self.encoder, SharesMedia):
            length, costs = self.encoder.measure(record)
        else:
            length = operator.index(self.encoder.length(record))
        if not 1 <= length <= LONGEST:
            raise ValueError(f"length() gave {length}; a sample has 1 to {LONGEST} tokens")
        lost: int = text.without_reasoning if text else getattr(self.encoder, "without_reasoning", 0)
        splits = self.over_long == "split"
        if splits:
            check_split(length, self.row_tokens, text is not None and text.all_labelled)
        if text is None or (length > self.row_tokens and self.over_long not in ("truncate", "split")):
            return Measured(sample, length, media_costs=tuple(costs), without_reasoning=lost)
        kept = compact(text.ids_T, text.labels_T, length if splits else self.row_tokens)
        return Measured(sample, length, text=kept, without_reasoning=lost)

    def _tokenized(self, sample: int, record: Any) -> Tokenized | None:
        """A sample without media; None for one with media, and where the encoder does not tell them apart."""
        if not isinstance(self.encoder, KeepsText):
            return None
        found = None if self.tokens is None else self.tokens.get(sample, record)
        if found is not None:
            return found
        text = self.encoder.encode_text(record)
        if text is None:
            return None
        about = getattr(self.encoder, "without_reasoning", 0), getattr(self.encoder, "all_labelled", False)
        made = Tokenized(*text, *about)
        if self.tokens is not None:
            self.tokens.put(sample, record, made)
        return made

    def _whole(self, sample: int, record: Any) -> dict[str, Any]:
        """A sample as its encoder makes it, or as it made it before."""
        found = None if self.tokens is None else self.tokens.get(sample, record)
        if found is None:
            return dict(self.encoder.encode(record))
        return {"input_ids": torch.from_numpy(found.ids_T), "labels": torch.from_numpy(found.labels_T)}

    def _encoded(self, wanted: Wanted) -> dict[str, Any] | Refused:
        draw, media_ranks = wanted
        if draw.whole:
            sample = self._document(draw)
            stop = draw.start + draw.length
            return {key: value[draw.start : stop].clone() for key, value in sample.items()}
        record = self.source[draw.sample]
        if media_ranks:
            assert isinstance(self.encoder, SharesMedia)
            sample = dict(self.encoder.encode(record, media_ranks, self.rank))
        else:
            sample = self._whole(draw.sample, record)
        check_finite(sample)
        length = len(sample["input_ids"])
        if length != draw.length:
            raise ValueError(f"length() said {draw.length}, encode() gave {length}")
        return sample if length <= self.row_tokens else _cut(sample, self.row_tokens)

    def _document(self, draw: Draw) -> dict[str, Any]:
        """The whole document of a piece, which is kept for its other pieces."""
        if self._latest is None or self._latest[0] != draw.sample:
            sample = self._whole(draw.sample, self.source[draw.sample])
            self._latest = draw.sample, sample
        sample = self._latest[1]
        if len(sample["input_ids"]) != draw.whole:
            raise ValueError(f"length() said {draw.whole}, encode() gave {len(sample['input_ids'])}")
        return sample


def check_split(length: int, row_tokens: int, all_labelled: bool) -> None:
    """Refuse to split what is no plain text."""
    if length > row_tokens and not all_labelled:
        raise ValueError(
            f"{length} tokens, but a row holds {row_tokens}, and over_long='split' cuts only text of which "
            f"every token is a label; leave the sample out, or use row_tokens >= {length}"
        )


def check_finite(sample: Mapping[str, Any]) -> None:
    """Refuse pixels and audio with NaN or infinity, in one pass, where they were decoded."""
    for key in ("pixel_values", "pixel_values_videos", "input_features"):
        payload = sample.get(key)
        if isinstance(payload, Tensor) and payload.numel() and payload.is_floating_point():
            smallest, largest = payload.aminmax()  # both are NaN where any number is
            if not (smallest.isfinite() and largest.isfinite()):
                raise ValueError(f"its {key} hold NaN or infinity; leave the sample out, or decode it again")


def text_sample(text_2T: Tensor, length: int, row_tokens: int) -> dict[str, Any] | Refused:
    """The sample of a text that was kept, as `Tasks.encode` gives it; `length` is that of before any cut."""
    ids_T, labels_T = text_2T.to(torch.int64, copy=True)
    sample = {"input_ids": ids_T, "labels": labels_T}
    return sample if length <= row_tokens else _cut(sample, row_tokens)


def _cut(sample: dict[str, Any], row_tokens: int) -> dict[str, Any] | Refused:
    for key in sample:
        if key not in CAN_BE_CUT:
            raise ValueError(
                f"cannot truncate a sample with the key {key!r}, only {', '.join(CAN_BE_CUT)}: a cut could "
                "take placeholders and leave their media; use over_long='drop'"
            )
    fields = {name: value[:row_tokens] for name, value in sample.get("fields", {}).items()}
    sample = {key: value[:row_tokens] for key, value in sample.items() if key != "fields"}
    if fields:
        sample["fields"] = fields
    if not num_targets(sample.get("labels", sample["input_ids"])):
        return Refused(f"no label is among its first {row_tokens} tokens", cut_short=True)
    return sample
