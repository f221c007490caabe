"""A conversation with a trained model: the chat template, media, and the stock model's `generate`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ...data.chat.special import special_pattern
from ...data.media.files import MediaFiles
from .load import Usable

MARK = "qzaqza"
"""A word that no template says by itself."""
HALF = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer gives for bytes that are no whole character."""


@dataclass(frozen=True)
class ChatOptions:
    """How answers are made."""

    max_new_tokens: int = 512
    temperature: float | None = None
    """0 takes the most likely token; as the model's generation config has it when left out."""
    system: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a finite number of at least 0")


@dataclass
class Attachments:
    """What is shown with the next message."""

    images: list[Any] = field(default_factory=list)
    clips: list[Any] = field(default_factory=list)


class Chat:
    """The turns so far, and the model that answers them."""

    def __init__(self, usable: Usable, options: ChatOptions) -> None:
        self.model, self.processor, self.options = usable.model, usable.processor, options
        self.image_options = usable.image_options
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if not (getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template):
            raise ValueError(
                f"{usable.name} has no chat template, so it cannot be talked to; train with "
                "data.chat_template, or set tokenizer.chat_template before it is saved"
            )
        self.ends = self._ends()
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.turns: list[dict[str, Any]] = []
        if self.options.system is not None:
            self.turns.append({"role": "system", "content": self.options.system})
        self.images: list[Any] = []
        self.clips: list[Any] = []
        torch.manual_seed(self.options.seed)

    def load_image(self, path: Path) -> Any:
        """A picture, upright and in RGB; ValueError where the model has no image encoder."""
        if not hasattr(self.processor, "image_processor"):
            raise ValueError(f"{path}: {type(self.model).__name__} has no image encoder; leave the image out")
        return _files(path).image(path.name)

    def load_audio(self, path: Path) -> Any:
        """A sound at the model's rate; ValueError where the model has no audio encoder."""
        extractor = getattr(self.processor, "feature_extractor", None)
        if extractor is None:
            raise ValueError(f"{path}: {type(self.model).__name__} has no audio encoder; leave the audio out")
        return _files(path).audio(path.name, extractor.sampling_rate)

    def ask(self, text: str, media: Attachments, says: Callable[[str], None]) -> str:
        """The answer to a message, told piece by piece; a Ctrl-C ends it, and what was said is kept.

        Where anything goes wrong before the first piece, the message is as if it had not been said.
        """
        parts: list[dict[str, Any]] = [{"type": "image"} for _ in media.images]
        parts += [{"type": "audio"} for _ in media.clips]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        turns = [*self.turns, {"role": "user", "content": content}]
        images, clips = [*self.images, *media.images], [*self.clips, *media.clips]
        inputs = self._inputs(self._rendered(turns), images, clips)
        pieces: list[str] = []

        def hear(piece: str) -> None:
            pieces.append(piece)
            says(piece)

        try:
            with torch.inference_mode(), _AskedToStop() as asked:
                self.model.generate(
                    **inputs,
                    **self._settings(inputs),
                    streamer=_Pieces(self.tokenizer, hear),
                    stopping_criteria=StoppingCriteriaList([asked]),
                )
            if asked.once:
                hear(" …")
        except KeyboardInterrupt:  # the second, which does not wait for a token
            hear(" …")
        answer = "".join(pieces).strip()
        self.turns = [*turns, {"role": "assistant", "content": answer}]
        self.images, self.clips = images, clips
        return answer

    def _rendered(self, turns: Sequence[Mapping[str, Any]], prompt: bool = True) -> str:
        template = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        try:
            text: str = template.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program of the checkpoint's
            raise ValueError(
                f"the chat template cannot render this: {type(error).__name__}: {error}"
            ) from None
        return text

    def _inputs(self, text: str, images: list[Any], clips: list[Any]) -> dict[str, Any]:
        options: dict[str, Any] = {
            "return_tensors": "pt",
            "add_special_tokens": False,
        }  # the template has them
        if self.processor is self.tokenizer:
            found = self.tokenizer(text, **options)
        else:
            media = {"images": images} if images else {}
            media |= {"audio": clips} if clips else {}
            found = self.processor(text=[text], **media, **options, **(self.image_options if images else {}))
        device, dtype = self.model.device, self.model.dtype
        return {
            key: x.to(device, dtype) if x.is_floating_point() else x.to(device)
            for key, x in found.items()
            if isinstance(x, torch.Tensor)
        }

    def _settings(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        number, most = inputs["input_ids"].shape[1], self.options.max_new_tokens
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and number >= positions:
            raise ValueError(
                f"the conversation has {number:,} tokens and the model {positions:,} positions; /reset "
                "begins a new one"
            )
        most = most if positions is None else min(most, positions - number)
        pad = self.tokenizer.pad_token_id
        found: dict[str, Any] = {"max_new_tokens": most, "eos_token_id": self.ends}
        found["pad_token_id"] = self.ends[0] if pad is None and self.ends else pad
        temperature = self.options.temperature
        if temperature is not None:
            sampled = {"do_sample": True, "temperature": temperature}
            found |= sampled if temperature else {"do_sample": False}
        return found

    def _ends(self) -> list[int]:
        """Tokens that end a turn: those of the generation config and the tokenizer, and what the template
        writes behind an answer.
        """
        given = getattr(self.model.generation_config, "eos_token_id", None)
        ends = given if isinstance(given, list) else [given]
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
        behind = self._rendered(turns, prompt=False).rpartition(MARK)[2]
        special = special_pattern(self.tokenizer).match(behind.lstrip())
        if special:
            ends = [*ends, self.tokenizer.convert_tokens_to_ids(special[0])]
        return [end for end in dict.fromkeys([*ends, self.tokenizer.eos_token_id]) if end is not None]


class _AskedToStop(StoppingCriteria):
    """A Ctrl-C, which ends an answer behind a token: as an exception it may come up where it is swallowed (in
    a finalizer, say). The second one is the exception that it always is.
    """

    def __init__(self) -> None:
        self.once = False

    def __enter__(self) -> _AskedToStop:
        self.here = threading.current_thread() is threading.main_thread()  # others cannot
        if self.here:
            self.before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        if self.here:
            signal.signal(signal.SIGINT, self.before)

    def _heard(self, *_: object) -> None:
        self.once = True
        signal.signal(signal.SIGINT, self.before)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Whether each answer ends here."""
        return torch.full((len(input_ids),), self.once, dtype=torch.bool, device=input_ids.device)


class _Pieces(BaseStreamer):
    """Hands text on token by token, but for a character that only the next tokens make whole."""

    def __init__(self, tokenizer: Any, hear: Callable[[str], None]) -> None:
        self.tokenizer, self.hear = tokenizer, hear
        self.ids: list[int] | None = None
        """Of the answer; None before the prompt, which comes first."""
        self.before, self.told = 0, 0
        """The tokens from `before` up to `told` are told, and say how those behind them are spelled."""

    def put(self, value: torch.Tensor) -> None:
        """The prompt, and then token by token."""
        if self.ids is None:
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        self._tell(HALF)

    def end(self) -> None:
        """Nothing more comes."""
        self._tell(None)

    def _tell(self, waits_for: str | None) -> None:
        ids = self.ids or []
        known = self._text(ids[self.before : self.told])
        text = self._text(ids[self.before :])
        if len(text) > len(known) and not (waits_for and text.endswith(waits_for)):
            self.before, self.told = self.told, len(ids)
            self.hear(text[len(known) :])

    def _text(self, ids: list[int]) -> str:
        found: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return found


def _files(path: Path) -> MediaFiles:
    """The folder of a file that the user names; what is in it is trusted no more than media of a data set."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    return MediaFiles(path.absolute().parent)
