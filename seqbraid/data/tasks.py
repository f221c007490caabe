"""What is done with a sample in a worker: it is measured, and later encoded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..layout.streaming import truncate_sample
from .plan import BAD, Draw, Measured

if TYPE_CHECKING:
    from .source import Source

LONGEST = 2**31 - 1


class Encoder(Protocol):
    """What turns a record into a sample; it raises `ValueError` for a bad one."""

    def length(self, record: Any) -> int: ...

    def encode(self, record: Any) -> Mapping[str, Any]: ...


class Refused(NamedTuple):
    """In place of a sample: why there is none."""

    reason: str


class Tasks:
    """What workers do: measure and encode samples of a source."""

    def __init__(self, source: Source, make_encoder: Callable[[], Encoder], row_tokens: int) -> None:
        self.source = source
        self.make_encoder = make_encoder
        self.row_tokens = row_tokens

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of this process, made on first use."""
        return self.make_encoder()

    def measure(self, samples: Sequence[int]) -> list[Measured]:
        """Lengths of samples, or why they are bad."""
        lengths = [self._try(sample, self._length, sample) for sample in samples]
        return [
            Measured(sample, BAD, length.reason) if isinstance(length, Refused) else Measured(sample, length)
            for sample, length in zip(samples, lengths, strict=True)
        ]

    def encode(self, draws: Sequence[Draw]) -> list[dict[str, Any] | Refused]:
        """Samples as they go into a row, or why they cannot."""
        return [self._try(draw.sample, self._encoded, draw) for draw in draws]

    def _try(self, sample: int, function: Callable[[Any], Any], argument: Any) -> Any:
        encoder = self.encoder  # an error while it is made is none of the sample
        assert encoder is not None
        try:
            return function(argument)
        except ValueError as error:
            return Refused(str(error))
        except Exception as error:
            raise RuntimeError(f"{self.source.where(sample)}: {type(error).__name__}: {error}") from error

    def _length(self, sample: int) -> int:
        length = operator.index(self.encoder.length(self.source[sample]))
        if not 1 <= length <= LONGEST:
            raise ValueError(f"length() gave {length}; a sample has 1 to {LONGEST} tokens")
        return length

    def _encoded(self, draw: Draw) -> dict[str, Any]:
        sample = dict(self.encoder.encode(self.source[draw.sample]))
        length = len(sample["input_ids"])
        if length != draw.length:
            raise ValueError(f"length() said {draw.length}, encode() gave {length}")
        return truncate_sample(sample, self.row_tokens) if length > self.row_tokens else sample
