"""Make the small data that the examples train on: python examples/make_data.py [FOLDER]

Pictures of shapes, long ledgers with a question at their end, and clips of beeps, each with conversations in
a JSONL file for training and one for evaluation. The same numbers come out every time.
"""

from __future__ import annotations

import json
import math
import random
import sys
import wave
from array import array
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {"red": (214, 48, 49), "green": (0, 148, 50), "blue": (9, 86, 191), "black": (20, 20, 20)}
SHAPES = ("square", "circle", "triangle")
GOODS = ("apples", "nails", "bricks", "candles", "barrels", "ropes")
RATE = 16000


def main(folder: Path) -> None:
    """Write all three sets."""
    for name, make in (("shapes", shapes), ("ledgers", ledgers), ("beeps", beeps)):
        chance = random.Random(name)
        for split, count in (("train", 96), ("eval", 16)):
            target = folder / name
            (target / "media").mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(make(target, f"{split}{i}", chance)) for i in range(count)]
            (target / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"wrote {folder / name}")


def shapes(folder: Path, name: str, chance: random.Random) -> dict[str, Any]:
    """One to three pictures and a question about each, turn by turn; ms-swift's way of naming media."""
    messages, images = [], []
    for number in range(chance.choice((1, 1, 2, 3))):
        colour, shape = chance.choice(list(COLOURS)), chance.choice(SHAPES)
        images.append(f"media/{name}_{number}.png")
        draw_shape(folder / images[-1], colour, shape, chance)
        messages += [
            {"role": "user", "content": "<image>What is in the picture?"},
            {"role": "assistant", "content": f"It is a {colour} {shape}."},
        ]
    return {"messages": messages, "images": images}


def draw_shape(path: Path, colour: str, shape: str, chance: random.Random) -> None:
    """A shape somewhere on white."""
    width, height = chance.choice((32, 48, 64)), chance.choice((32, 48, 64))
    image = Image.new("RGB", (width, height), "white")
    size = chance.randint(12, 24)
    x, y = chance.randint(0, width - size), chance.randint(0, height - size)
    pen = ImageDraw.Draw(image)
    if shape == "square":
        pen.rectangle((x, y, x + size, y + size), fill=COLOURS[colour])
    elif shape == "circle":
        pen.ellipse((x, y, x + size, y + size), fill=COLOURS[colour])
    else:
        pen.polygon(((x, y + size), (x + size, y + size), (x + size // 2, y)), fill=COLOURS[colour])
    image.save(path)


def ledgers(folder: Path, name: str, chance: random.Random) -> dict[str, Any]:
    """A long list of entries, and a question about one of them; OpenAI's way of writing messages."""
    count = int(2 ** chance.uniform(2, 6.5))
    entries = [(number, chance.randint(2, 99), chance.choice(GOODS)) for number in range(1, count + 1)]
    number, amount, goods = chance.choice(entries)
    text = "\n".join(f"Entry {n}: {a} {g}." for n, a, g in entries)
    return {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": f"{text}\nWhat was in entry {number}?"},
            {"role": "assistant", "content": f"There were {amount} {goods}."},
        ]
    }


def beeps(folder: Path, name: str, chance: random.Random) -> dict[str, Any]:
    """A clip of some beeps, and how many they are; OpenAI's content parts."""
    count, path = chance.randint(1, 4), f"media/{name}.wav"
    samples = array("h")
    for _ in range(count):
        tone, loudness = chance.choice((440, 660, 880)), chance.randint(4000, 12000)
        samples.extend(round(loudness * math.sin(2 * math.pi * tone * t / RATE)) for t in range(RATE // 8))
        samples.extend([0] * chance.randint(RATE // 20, RATE // 8))
    with wave.open(str(folder / path), "wb") as clip:
        clip.setparams((1, 2, RATE, len(samples), "NONE", ""))
        clip.writeframes(samples.tobytes())
    question = [{"type": "audio", "audio": path}, {"type": "text", "text": "How many are there?"}]
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"There are {count} of them."},
        ]
    }


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/examples"))
