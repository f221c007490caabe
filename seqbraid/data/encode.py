"""`SampleEncoder`: a record of a dataset in, a sample for `seqbraid.pack` out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray

from ..layout.labels import IGNORE
from ..models.batch import WEIGHTS
from ..models.families import family_of
from ..models.media import media_cost
from ..models.media_tokens import Ints, audio_tokens, media_config, num_media_tokens
from .chat.spans import Span
from .chat.template import ChatTemplate
from .media.files import MediaFiles
from .media.frames import Grid
from .media.items import ClipItem, MediaItems, MediaOptions, MediaReader, VideoItem
from .media.placeholders import Expanded, Placeholder, Placeholders
from .plain import PlainText, within
from .records.conversation import Conversation, Turn
from .records.formats import FormatName, Parsed, check_format, check_ignored, parse_record
from .records.jsonl import digest
from .records.mix import Described, RecordOptions
from .records.parts import MediaRef


class _Text(NamedTuple):
    ids_T: Ints
    labels_T: Ints
    weights_T: NDArray[np.float32] | None = None
    """What each label counts; None where each counts once."""


class Look(NamedTuple):
    """A sample before its media are decoded, and what its record holds."""

    ids_T: Ints
    labels_T: Ints
    media: list[MediaRef]
    """In the order of the text."""
    turns: int
    """Of the assistant; 0 of what is no conversation."""


class SampleEncoder:
    """Turns records into samples: conversations exactly as the model's own chat template and processor would,
    plain text as its tokenizer would.

    Args:
        processor: the stock processor of a media model, or the tokenizer of a text decoder; see
            `load_processor`.
        config: the model's config.
        media: where the images, videos and sounds lie.
        template_options: handed to the chat template, such as `enable_thinking`.
        ignore_keys: keys of a record or of a turn that may be there and are not read, such as ids.
        format: of the records; `auto` takes each for what its keys say.
        system: the system prompt of conversations that have none.
        end_of_document: the token after each document; the tokenizer's `eos_token` when left out.
        options: fields of `MediaOptions`.
    """

    def __init__(
        self,
        processor: Any,
        config: Any,
        media: MediaFiles,
        *,
        template_options: Mapping[str, Any] | None = None,
        ignore_keys: Iterable[str] = (),
        format: FormatName = "auto",
        system: str | None = None,
        end_of_document: str | None = None,
        **options: Any,
    ) -> None:
        self.processor, self.config = processor, config
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.family = family_of(config)
        self.template_options = template_options
        self.placeholders = Placeholders(processor)
        self.media_ids = self._checked_ids()
        check_format(format)
        self.format, self.ignored_keys = format, check_ignored(ignore_keys)
        self.system = system
        vocabulary = config.get_text_config().vocab_size
        self.plain = PlainText(processor, vocabulary, self.media_ids, end_of_document)
        self.media = MediaReader(processor, self.family, media, _media_options(options))
        self.without_reasoning = 0
        """Of the record that was encoded or measured last: turns that are trained without their reasoning,
        since the chat template leaves it out.
        """
        self.all_labelled = False
        """Of that record: every token is a label, so that it may be cut into pieces anywhere."""

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template, which a model of plain text need not have."""
        return ChatTemplate(self.processor, self.template_options)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with whatever decides which tokens and labels a text has: tokenizer, template, options, and
        the code that reads records.
        """
        tokenizer = self.tokenizer
        said = [
            tokenizer.special_tokens_map,
            self.template_options,
            sorted(self.ignored_keys),
            self.media_ids,
        ]
        said += [
            self.format,
            self.system,
            self.plain.end,
            self.plain.vocabulary,
            type(self.processor).__name__,
        ]
        template = getattr(self.processor, "chat_template", None) or tokenizer.chat_template
        rules = tokenizer.backend_tokenizer.to_str()
        return digest([code_digest(), rules, json.dumps([template, *said], default=str)])

    def length(self, record: Any) -> int:
        """How many tokens `encode` makes of a record; of its media only the headers are read."""
        return self.measure(record)[0]

    def measure(self, record: Any) -> tuple[int, list[float]]:
        """The length, and what encoding each of its images, videos and clips costs, in `pack`'s order."""
        parsed, items = self._read(record)
        length = len(self._text(parsed, items).ids_T)
        return length, [media_cost(size, self.config) for size in self.media.sizes(items)]

    def look(self, record: Any) -> Look:
        """What `encode` makes of a record but for its media, of which only the headers are read."""
        parsed, items = self._read(record)
        text = self._text(parsed, items)
        if not isinstance(parsed, Conversation):
            return Look(text.ids_T, text.labels_T, [], 0)
        return Look(
            text.ids_T, text.labels_T, parsed.media, sum(turn.role == "assistant" for turn in parsed.turns)
        )

    def encode_text(self, record: Any) -> tuple[Ints, Ints] | None:
        """Ids and labels of a record, where they are its whole sample: not with media, nor with weights."""
        parsed = self._parsed(record)
        if isinstance(parsed, Conversation) and (parsed.media or parsed.has_weights):
            return None
        return self._text(parsed, self.media.measure([]))[:2]

    def encode(self, record: Any, media_ranks: Sequence[int] | None = None, rank: int = 0) -> dict[str, Any]:
        """The sample of a record: `input_ids`, `labels` and what the encoders of its media take.

        With the ranks that encode its images, videos and clips, only those of `rank` are decoded.
        """
        parsed, items = self._read(record)
        text = self._text(parsed, items)
        sample: dict[str, Any] = {
            "input_ids": torch.from_numpy(text.ids_T),
            "labels": torch.from_numpy(text.labels_T),
        }
        if text.weights_T is not None:
            sample["fields"] = {WEIGHTS: torch.from_numpy(text.weights_T)}
        if media_ranks is None:
            return sample | self.media.decode(items)
        num_media = len(self.media.sizes(items))
        if len(media_ranks) != num_media:
            raise ValueError(
                f"the conversation has {num_media} images, videos and clips, {len(media_ranks)} before"
            )
        is_own = [encoder == rank for encoder in media_ranks]
        return sample | self.media.decode(items, is_own) | {"media_ranks": list(media_ranks)}

    def _parsed(self, record: Any) -> Parsed:
        """A record in the form of its format, read as its source asks."""
        options = RecordOptions()
        if isinstance(record, Described):
            record, options = record.record, record.options
        ignored = self.ignored_keys | options.ignore_keys
        parsed = parse_record(record, ignored, options.format or self.format)
        system = self.system if options.system is None else options.system
        if not system or not isinstance(parsed, Conversation) or parsed.turns[0].role == "system":
            return parsed
        return replace(parsed, turns=(Turn("system", (system,), False), *parsed.turns))

    def _read(self, record: Any) -> tuple[Parsed, MediaItems]:
        parsed = self._parsed(record)
        return parsed, self.media.measure(parsed.media if isinstance(parsed, Conversation) else [])

    def _text(self, parsed: Parsed, items: MediaItems) -> _Text:
        self.without_reasoning, self.all_labelled = 0, False
        if isinstance(parsed, Conversation):
            return self._said(parsed, items)
        text = _Text(*self.plain(parsed))
        self.all_labelled = bool((text.labels_T != IGNORE).all())
        return text

    def _said(self, conversation: Conversation, items: MediaItems) -> _Text:
        rendered = self.chat.render(conversation)
        self.without_reasoning = rendered.without_reasoning
        places = self.placeholders.find(rendered.text, [ref.kind for ref in conversation.media])
        expanded = self._expanded(rendered.text, places, items)
        tokens = self.tokenizer(
            expanded.text,
            add_special_tokens=self._adds_special(rendered.text),
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        ids_T = np.asarray(tokens["input_ids"], np.int64)
        offsets_T2 = np.asarray(tokens["offset_mapping"], np.int64).reshape(-1, 2)
        labelled_T = within(offsets_T2, [expanded.moved(span) for span in rendered.spans])
        # What the processor writes, also within a turn of the assistant's, is no text of the model's.
        labelled_T &= ~within(offsets_T2, expanded.new)
        labelled_T &= ~np.isin(ids_T, self.media_ids)
        if not labelled_T[1:].any():  # nothing comes before the first token that could predict it
            raise ValueError(
                "the label mask is empty: the chat template renders the assistant turns "
                "without text; leave the conversation out"
            )
        labels_T = np.where(labelled_T, ids_T, IGNORE)
        if not conversation.has_weights:
            return _Text(ids_T, labels_T)
        weights_T = np.ones(len(ids_T), np.float32)
        labelled = [turn for turn in conversation.turns if turn.loss]
        for turn, span in zip(labelled, rendered.spans, strict=True):
            weights_T[within(offsets_T2, [expanded.moved(span)])] = turn.weight
        return _Text(ids_T, labels_T, weights_T)

    def _adds_special(self, text: str) -> bool:
        """A tokenizer leaves special tokens to its template; a processor adds them where there is no BOS."""
        bos = self.tokenizer.bos_token
        return self.processor is not self.tokenizer and not (bos and text.startswith(bos))

    def _expanded(self, text: str, places: Sequence[Placeholder], items: MediaItems) -> Expanded:
        tokens = self.placeholders.token
        images, videos, clips = iter(items.images), iter(items.videos), iter(items.clips)
        replacements: list[tuple[Span, str]] = []
        for place in places:
            span = (place.start, place.stop)
            if place.kind == "image":
                new = tokens["image"] * self._num_tokens(next(images).grid)
            elif place.kind == "audio":
                new = tokens["audio"] * self._num_heard(next(clips))
            elif "audio" not in self.media.kinds:
                span, new = self._frames(text, place, next(videos))
            elif self.media.options.use_audio_in_video:
                span, new = self._with_sound(text, place, next(videos), next(clips))
            else:
                new = tokens["video"] * self._num_tokens(next(videos).grid)
            replacements.append((span, new))
        return self.placeholders.expand(text, replacements)

    def _frames(self, text: str, place: Placeholder, video: VideoItem) -> tuple[Span, str]:
        """A video of Qwen3-VL or Qwen3.5: its frames, each after its time."""
        stamps = video.rules.timestamps(video.indices, video.fps)
        new = self.placeholders.frames(stamps, self._num_tokens((1, *video.grid[1:])))
        if self.placeholders.keeps_brackets:
            return (place.start, place.stop), new
        return self.placeholders.around(text, place), new

    def _with_sound(
        self, text: str, place: Placeholder, video: VideoItem, clip: ClipItem
    ) -> tuple[Span, str]:
        """A video of Omni and its sound."""
        span = self.placeholders.around(text, place)
        if span == (place.start, place.stop):
            raise ValueError(
                "use_audio_in_video needs a chat template that writes start and end tokens around a video"
            )
        rate = media_config(self.config).position_id_per_seconds
        times = np.arange(video.grid[0]) * video.seconds_per_grid * rate
        frame = self._num_tokens((1, *video.grid[1:]))
        return span, self.placeholders.video_with_sound(times, frame, self._num_heard(clip))

    def _num_tokens(self, grid: Grid) -> int:
        return num_media_tokens(grid, media_config(self.config).vision_config.spatial_merge_size)

    def _num_heard(self, clip: ClipItem) -> int:
        return audio_tokens(clip.mel_frames, self.config)

    def _checked_ids(self) -> list[int]:
        """The ids of placeholders and of the brackets around them, about which processor and config agree."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(self.tokenizer).__name__} gives no character offsets for its tokens; use a fast "
                "tokenizer"
            )
        size = self.config.get_text_config().vocab_size
        largest = max(self.tokenizer.get_vocab().values(), default=-1)  # more than their number, with gaps
        if largest >= size:
            raise ValueError(
                f"the tokenizer has token ids up to {largest}, but the model's vocabulary is {size}; they "
                "belong to different models, or vocab_size in config.json is wrong"
            )
        name = type(self.processor).__name__
        if self.family is None:
            if self.processor is not self.tokenizer:
                raise ValueError(
                    f"{self.config.model_type} takes text only; pass its tokenizer instead of {name}"
                )
            return []
        if self.processor is self.tokenizer:
            raise ValueError(
                f"{self.config.model_type} takes images, videos or audio; pass its processor "
                f"instead of {name}"
            )
        config = media_config(self.config)
        wanted_ids = self.family.token_ids(config)
        for kind, wanted in wanted_ids.items():
            token = next((text for found, text in self.placeholders.token.items() if found == kind), None)
            found = None if token is None else self.tokenizer.convert_tokens_to_ids(token)
            if found != wanted:
                raise ValueError(
                    f"the config's {kind}_token_id is {wanted}, but {name} has {token!r} with id {found}; "
                    "use the model's own processor"
                )
        brackets = (f"{kind}_{end}_token_id" for kind in ("vision", "audio") for end in ("start", "end"))
        found_ids = (getattr(config, bracket, None) for bracket in brackets)
        return [*wanted_ids.values(), *(found for found in found_ids if found is not None)]


@cache
def code_digest() -> str:
    """Of the files that make samples of records, and of the versions of what they are made with."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return digest(
        [tokenizers.__version__, transformers.__version__, *(file.read_text("utf-8") for file in files)]
    )


def _media_options(options: Mapping[str, Any]) -> MediaOptions:
    known = [field.name for field in fields(MediaOptions)]
    for key in options:
        if key not in known:
            raise ValueError(f"unknown option {key!r}; known are {', '.join(known)}")
    return MediaOptions(**options)
