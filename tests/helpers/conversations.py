"""Conversations with media, and what the stock processor makes of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import AudioInfo, MediaFiles

FRAMES, FPS, FRAME = 21, 8, (24, 40)


CLIPS = {"short.wav": (700, 16000), "long.flac": (16333, 8000), "even.wav": (3200, 16000)}


WORDS = ("what", "is", "it", "?", "a", "the number", "42", "naïve", "<b>", "é\n\n", "{x}", "日本")


END = "<|im_end|>"


def random_record(chance: random.Random, kinds: Sequence[str], rounds: int) -> dict[str, Any]:
    """A conversation with media of these kinds among its words."""
    files = {"image": ["wide.png", "tall.jpg", "dot.png"], "audio": list(CLIPS), "video": ["ball.mp4"]}

    def words() -> str:
        return " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 6)))

    messages: list[dict[str, Any]] = []
    if chance.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for _ in range(rounds):
        parts: list[dict[str, Any]] = [{"type": "text", "text": words()}]
        for _ in range(chance.randint(0, 3) if kinds else 0):
            kind = chance.choice(kinds)
            parts.insert(chance.randint(0, len(parts)), {"type": kind, kind: chance.choice(files[kind])})
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": words(), "loss": chance.random() < 0.7})
    messages[-1]["loss"] = True
    return {"messages": messages}


def as_string(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def parts_of(record: dict[str, Any], kind: str) -> list[str]:
    return [
        part[kind]
        for message in record["messages"]
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == kind
    ]


def stock_sample(processor: Any, record: dict[str, Any], media: MediaFiles, **options: Any) -> Any:
    """What the stock processor gives for the whole conversation."""
    text = processor.apply_chat_template(copy.deepcopy(record["messages"]), tokenize=False)
    images = [media.image(source) for source in parts_of(record, "image")]
    sounds = [media.audio(source, 16000) for source in parts_of(record, "audio")]
    given = {key: value for key, value in {"images": images, "audio": sounds}.items() if value}
    return processor(text=[text], **given, **options, return_tensors="pt")


def check_labels(encoder: SampleEncoder, sample: dict[str, Any], record: dict[str, Any]) -> None:
    """Learnt are the assistant's words and the end of its turns, token by token, and nothing else."""
    ids, labels = sample["input_ids"], sample["labels"]
    learnt = labels != -100
    assert torch.equal(labels[learnt], ids[learnt])
    edges = learnt.int().diff(prepend=torch.zeros(1, dtype=torch.int)).eq(1).cumsum(0)
    texts = [
        encoder.tokenizer.decode(ids[learnt & (edges == number)]) for number in range(1, int(edges.max()) + 1)
    ]
    spoken = [m["content"] + END for m in record["messages"] if m["role"] == "assistant" and m["loss"]]
    assert texts == spoken


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def ask(part: dict[str, Any] | str, answer: Any = "ok") -> dict[str, Any]:
    content = part if isinstance(part, str) else [part]
    return {"messages": [said("user", content), said("assistant", answer)]}


class Sounding(MediaFiles):
    """Where videos have a sound."""

    def audio_info(self, ref: Any) -> AudioInfo:
        return AudioInfo(50000, 16000, 1) if ref.kind == "video" else super().audio_info(ref)

    def audio(self, ref: Any, sampling_rate: int) -> Any:
        if isinstance(ref, str) or ref.kind != "video":
            return super().audio(ref, sampling_rate)
        return np.sin(np.arange(50000, dtype=np.float32) / 9)
