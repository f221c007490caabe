"""What needs no chat template: documents, plain prompts and completions, and tokens as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layout.labels import IGNORE
from ..models.media_tokens import Ints
from .chat.spans import Span
from .chat.special import special_pattern
from .records.documents import Document
from .records.prompt_completion import Completion
from .records.tokens import Tokens

SHOWN = 20
"""Characters of a text that a refusal quotes."""


class PlainText:
    """Makes ids and labels of records without turns.

    Args:
        processor: of the model, or its tokenizer.
        vocabulary: the model's number of tokens.
        media_ids: of placeholders, which no text may hold.
        end: the token after each document and completion; the tokenizer's `eos_token` when left out.
    """

    def __init__(
        self, processor: Any, vocabulary: int, media_ids: Sequence[int] = (), end: str | None = None
    ) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.vocabulary, self.media_ids = vocabulary, media_ids
        if end is not None and end not in self.tokenizer.get_vocab():
            raise ValueError(f"data.end_of_document={end!r} is no token of the model's tokenizer")
        self.end = self.tokenizer.eos_token if end is None else end
        template = getattr(processor, "chat_template", None) or self.tokenizer.chat_template
        self.template = template if isinstance(template, str) else ""

    def __call__(self, parsed: Document | Completion | Tokens) -> tuple[Ints, Ints]:
        """Ids and labels."""
        if isinstance(parsed, Document):
            return self._document(parsed.text)
        if isinstance(parsed, Completion):
            return self._completion(parsed.prompt, parsed.completion)
        ids_T = parsed.ids_T
        wrong = np.flatnonzero((ids_T < 0) | (ids_T >= self.vocabulary))
        if len(wrong):
            raise ValueError(
                f"input_ids[{wrong[0]}] is {ids_T[wrong[0]]}, but the model has tokens 0 to "
                f"{self.vocabulary - 1}; the record was made with another tokenizer"
            )
        self._check_media(ids_T)
        return ids_T, parsed.labels_T

    def _document(self, text: str) -> tuple[Ints, Ints]:
        text = text.removesuffix(self.end or "")
        known = {self.tokenizer.bos_token, self.tokenizer.eos_token, self.tokenizer.pad_token, self.end}
        for token in self._special.findall(text):
            if token in known or token in self.template:
                raise ValueError(
                    f"the text has {token!r}, which the tokenizer reads as a special token; take it out, or "
                    "cut the text there into several records"
                )
        ids_T = self._ended(self._tokens(text)[0])
        self._check_media(ids_T)
        return ids_T, ids_T.copy()

    def _completion(self, prompt: str, completion: str) -> tuple[Ints, Ints]:
        completion = completion.removesuffix(self.end or "")
        ids_T, offsets_T2 = self._tokens(prompt + completion)
        starts, stops = true_starts(offsets_T2), offsets_T2[:, 1]
        torn = np.flatnonzero((starts < len(prompt)) & (stops > len(prompt)))
        if len(torn) and prompt:
            start, stop = int(starts[torn[0]]), int(stops[torn[0]])
            raise ValueError(
                f"one token, {(prompt + completion)[start:stop][:SHOWN]!r}, has the end of the prompt and "
                "the beginning of the completion, so it is not clear what the model would generate; end the "
                "prompt without white space and begin the completion with it"
            )
        labels_T = np.where(within(offsets_T2, [(len(prompt), len(prompt + completion))]), ids_T, IGNORE)
        ended_T = self._ended(ids_T)
        self._check_media(ended_T)
        labels_T = np.append(labels_T[: len(ended_T) - 1], ended_T[-1])
        return ended_T, labels_T

    def _tokens(self, text: str) -> tuple[Ints, NDArray[np.int64]]:
        bos = self.tokenizer.bos_token
        tokens = self.tokenizer(
            text,
            # A text written for the model by hand may have it already.
            add_special_tokens=not (bos and text.startswith(bos)),
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        offsets_T2 = np.asarray(tokens["offset_mapping"], np.int64).reshape(-1, 2)
        return np.asarray(tokens["input_ids"], np.int64), offsets_T2

    def _ended(self, ids_T: Ints) -> Ints:
        """With the end token behind, once, though some tokenizers write their own."""
        if len(ids_T) and ids_T[-1] in (self.tokenizer.eos_token_id, self._end_id):
            ids_T = ids_T[:-1]
        return np.append(ids_T, self._end_id)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return special_pattern(self.tokenizer)

    @cached_property
    def _end_id(self) -> int:
        if self.end is None:
            raise ValueError(
                "the tokenizer has no eos_token; name the token that ends a text as data.end_of_document"
            )
        return int(self.tokenizer.convert_tokens_to_ids(self.end))

    def _check_media(self, ids_T: Ints) -> None:
        found = ids_T[np.isin(ids_T, self.media_ids)]
        if len(found):
            raise ValueError(
                f"the record has the token {self.tokenizer.convert_ids_to_tokens(int(found[0]))!r}, which "
                "stands for media; media are given in conversations alone"
            )


def true_starts(offsets_T2: Ints) -> Ints:
    """Where tokens start: some tokenizers leave the white space that a token begins with out of it, though it
    is all there is.
    """
    starts, stops = offsets_T2.T
    ends_before = np.maximum.accumulate(np.concatenate([[0], stops[:-1]])) if len(stops) else stops
    return np.minimum(starts, ends_before)


def within(offsets_T2: Ints, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens lie whole in one of some spans, which are in order; one of no characters lies in none."""
    if not spans:
        return np.zeros(len(offsets_T2), bool)
    starts, stops = true_starts(offsets_T2), offsets_T2[:, 1]
    begins, ends = np.asarray(spans, np.int64).T
    # Of spans in order, only the last one that begins before a token can hold it.
    nearest = np.searchsorted(begins, starts, side="right") - 1
    return (nearest >= 0) & (stops <= ends[nearest]) & (stops > starts)
