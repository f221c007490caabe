"""Malformed records and media, each with the reason for which it must be refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.helpers.media import write_media

from .case import ANSWER, QUESTION, Case, media_root, part
from .files import files, paths
from .formats import wrong_calls, wrong_formats
from .records import not_json, wrong_media, wrong_turns, wrong_types


def make_corpus(folder: Path, seed: int = 0) -> list[Case]:
    """Write the media below `folder` and give the cases, whose names are unique."""
    random_ = random.Random(seed)
    root = media_root(folder)
    root.mkdir(parents=True)
    write_media(root)
    cases = [
        *not_json(random_),
        *wrong_types(),
        *wrong_turns(),
        *wrong_formats(),
        *wrong_calls(),
        *wrong_media(),
        *paths(folder),
        *files(root, random_),
    ]
    assert len({case.name for case in cases}) == len(cases), "two cases share a name"
    assert not any(b"\n" in case.record_line or not case.record_line.strip() for case in cases)
    return cases


def good_records() -> list[dict[str, Any]]:
    """Records of every style with every kind of media, all of which must be read."""
    return [
        {"messages": [QUESTION, ANSWER]},
        {"messages": [{"role": "user", "content": "<image>What?"}, ANSWER], "images": ["good.png"]},
        {
            "messages": [QUESTION, ANSWER],
            "images": ["good.jpg"],
            "audios": ["good.wav"],
            "videos": "good.mp4",
        },
        {
            "conversations": [{"from": "human", "value": "<audio>?"}, {"from": "gpt", "value": "x"}],
            "audios": "good.wav",
        },
        {"query": "<video>?", "response": "x", "videos": [{"path": "good.mp4", "fps": 2}]},
        {
            "messages": [
                {"role": "user", "content": [part("image", "good.webp"), {"type": "text", "text": "?"}]},
                ANSWER,
            ]
        },
        {"text": "A cat."},
        {"prompt": "A", "completion": " cat."},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"instruction": "<image>?", "input": "What?", "output": "A cat.", "images": ["good.png"]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    ]
