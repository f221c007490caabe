"""What the runs train, and what on."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import torch
from PIL import Image

from seqbraid.data.tiny import tiny_training_model

SAMPLES = 48
ENLARGED = 12
"""Pictures are this much larger than the examples', so that workers have something to do."""
VOCABULARY = 8192
"""Rows of the embedding: most of a checkpoint, so that a save lasts, and little of a step."""


def make_data(folder: Path) -> None:
    """The examples' pictures with questions, enlarged, and three records that cannot be used."""
    path = Path(__file__).parents[3] / "examples" / "make_data.py"
    spec = importlib.util.spec_from_file_location("make_data", path)
    assert spec is not None and spec.loader is not None
    examples = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(examples)
    (folder / "media").mkdir(parents=True)
    chance = random.Random("chaos")
    records = [examples.shapes(folder, f"sample{number}", chance) for number in range(SAMPLES)]
    for picture in (folder / "media").iterdir():
        with Image.open(picture) as small:
            large = small.resize((small.width * ENLARGED, small.height * ENLARGED))
        large.save(picture)
    lines = [json.dumps(record) for record in records]
    whole = (folder / "media" / "sample0_0.png").read_bytes()
    # Its size can be read, its pixels cannot.
    (folder / "media" / "torn.png").write_bytes(whole[: len(whole) // 2])
    for place, name in ((10, "media/missing.png"), (30, "media/torn.png")):
        lines.insert(place, json.dumps({**records[0], "images": [name] * len(records[0]["images"])}))
    lines.insert(20, lines[20][:40])
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(map(json.dumps, records[:8])) + "\n")


def make_model(folder: Path) -> None:
    """The tiny Qwen3-VL with more words than it has tokens for."""
    model, processor = tiny_training_model("qwen3_vl", seed=0)
    torch.manual_seed(0)
    model.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
