"""What a run that was killed on its way must have in common with one that was not: everything."""

from __future__ import annotations

import filecmp
import json
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from seqbraid.train.after.export import export_checkpoint
from seqbraid.train.checkpoint.files import check_file, read_manifest
from seqbraid.train.config_file import load_config
from seqbraid.train.log import current_records

SAME = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "label_tokens",
    "padding",
    "fill",
    "accuracy",
    "epoch",
    "eval_loss",
    "eval_accuracy",
)
"""Numbers of a step that do not depend on the clock."""


def differences(run: Path, reference: Path) -> list[str]:
    """All that is not as in the uninterrupted run; empty where nothing is."""
    return [
        *_log(run, reference),
        *_checkpoints(run / "checkpoints", reference / "checkpoints"),
        *_bad_samples(run, reference),
        *_tensorboard(run),
        *(f"{path} is left over" for path in run.rglob("*.tmp")),
        *_config(run),
    ]


def _log(run: Path, reference: Path) -> list[str]:
    wanted = {r["step"]: r for r in current_records(reference / "log.jsonl") if "loss" in r}
    found = [r for r in current_records(run / "log.jsonl") if "loss" in r]
    problems = []
    if [r["step"] for r in found] != list(wanted):
        problems.append(f"log.jsonl has the steps {[r['step'] for r in found]} instead of {list(wanted)}")
    for record in found:
        for name in SAME:
            mine, theirs = repr(record.get(name)), repr(wanted.get(record["step"], {}).get(name))
            if mine != theirs:
                problems.append(f"step {record['step']}: {name} {mine} instead of {theirs}")
    return problems


def _checkpoints(found: Path, wanted: Path) -> list[str]:
    problems = []
    folders = sorted(path for path in found.iterdir() if path.is_dir() and path.suffix != ".tmp")
    for folder in folders:
        try:
            for name, record in read_manifest(folder).items():
                check_file(folder / name, record, checksum=True)
        except ValueError as error:
            problems.append(str(error))
            continue
        for file in sorted(folder.glob("*.safetensors")):
            if not filecmp.cmp(file, wanted / folder.name / file.name, shallow=False):
                problems.append(f"{file}: {_tensors(file, wanted / folder.name / file.name)}")
        mine, theirs = (
            json.loads((root / folder.name / "state.json").read_bytes())["state"] for root in (found, wanted)
        )
        problems += [
            f"{folder}: {name} is {mine.get(name)} instead of {theirs.get(name)}"
            for name in sorted(mine.keys() | theirs.keys())
            if name != "config" and mine.get(name) != theirs.get(name)
        ]
    for pointer in ("last", "best"):
        names = [(root / pointer).read_text() for root in (found, wanted) if (root / pointer).exists()]
        if names and (len(names) < 2 or names[0] != names[1]):
            problems.append(f"`{pointer}` is not what it should be: {names}")
    return problems


def _tensors(file: Path, wanted: Path) -> str:
    """Which tensors of two files differ."""
    with safe_open(file, framework="np") as mine, safe_open(wanted, framework="np") as theirs:
        names, others = set(mine.keys()), set(theirs.keys())
        if names != others:
            return f"only one has {sorted(names ^ others)}"
        differ = [n for n in sorted(names) if mine.get_tensor(n).tobytes() != theirs.get_tensor(n).tobytes()]
    return f"{len(differ)} tensors differ: {differ[:5]}" if differ else "the header differs"


def _bad_samples(run: Path, reference: Path) -> list[str]:
    mine, theirs = ((folder / "bad_samples.jsonl").read_text().splitlines() for folder in (run, reference))
    if mine == theirs:
        return []
    more, fewer = Counter(mine) - Counter(theirs), Counter(theirs) - Counter(mine)
    return [f"bad_samples.jsonl: too often {dict(more)}, missing {dict(fewer)}, or in another order"]


def _tensorboard(run: Path) -> list[str]:
    """What TensorBoard shows must be what the log says, each step once."""
    if not (run / "tensorboard").exists():
        return []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown: Any = EventAccumulator(str(run / "tensorboard"))
    shown.Reload()
    steps = [event.step for event in shown.Scalars("train/loss")]
    logged = [record["step"] for record in current_records(run / "log.jsonl") if "loss" in record]
    return [] if steps == logged else [f"TensorBoard shows the steps {steps}"]


def _config(run: Path) -> list[str]:
    try:
        found = load_config(run / "config.yaml").out
    except ValueError as error:
        return [f"config.yaml cannot be read: {error}"]
    return [] if found == str(run) else [f"config.yaml has out={found!r}"]


def export_differences(run: Path, reference: Path) -> list[str]:
    """The last checkpoint as stock transformers loads it, against that of the undisturbed run."""
    found, wanted = (folder.with_name(f"{folder.name}-export") for folder in (run, reference))
    for folder, out in ((run, found), (reference, wanted)):
        export_checkpoint(folder, "last", out)
    AutoModelForImageTextToText.from_pretrained(found)
    names = sorted(path.name for path in wanted.glob("*.safetensors"))
    _, differ, missing = filecmp.cmpfiles(found, wanted, names, shallow=False)
    return [f"{found}: {name} differs or is missing" for name in differ + missing]
