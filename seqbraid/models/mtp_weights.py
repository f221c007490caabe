"""The tensors of multi-token prediction in a checkpoint: read, and written as the source had them.

Experts are one tensor for all in the module. Some checkpoints have them so (Qwen3.6), others one by one
(Qwen3.5-MoE, Qwen3-Next), whatever the decoder of the same checkpoint does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .mtp_module import NAME
from .stock import INDEX, SINGLE, weight_files

PREFIX = NAME + "."
SINGLE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<name>gate|up|down)_proj\.weight")


def mtp_files(folder: Path) -> dict[str, Path]:
    """Which tensor of multi-token prediction is in which file of a checkpoint."""
    found: dict[str, Path] = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            found |= {name: path for name in file.keys() if name.startswith(PREFIX)}  # noqa: SIM118
    return found


def read_mtp(folder: Path) -> dict[str, Tensor]:
    """The tensors of multi-token prediction of a checkpoint, as they lie there."""
    found: dict[str, Tensor] = {}
    places = mtp_files(folder)
    for path in sorted(set(places.values())):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name, place in places.items() if place == path}
    return found


def is_packed(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these names has the experts of a layer in one tensor."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def to_module(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As the module has them; single experts are put together."""
    found: dict[str, Tensor] = {}
    single: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, x in tensors.items():
        match = SINGLE_EXPERT.fullmatch(name)
        if match is None:
            found[name] = x
        else:
            single.setdefault(match["experts"], {}).setdefault(match["name"], {})[int(match["number"])] = x
    for experts, parts in single.items():
        count = max(max(of) for of in parts.values()) + 1
        missing = [
            f"{experts}.{e}.{name}_proj.weight"
            for name in ("gate", "up", "down")
            for e in range(count)
            if e not in parts.get(name, {})
        ]
        if missing:
            raise ValueError(f"the checkpoint lacks {missing[0]} ({len(missing)} such tensors)")
        gate, up, down = ([parts[name][e] for e in range(count)] for name in ("gate", "up", "down"))
        found[f"{experts}.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        )
        found[f"{experts}.down_proj"] = torch.stack(down)
    return found


def to_checkpoint(state: Mapping[str, Tensor], packed: bool = False) -> dict[str, Tensor]:
    """As a checkpoint has them: experts `packed` as in the module, or one by one."""
    found: dict[str, Tensor] = {}
    for name, x in state.items():
        experts, _, kind = name.rpartition(".")
        if packed or not experts.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
            found[name] = x
            continue
        for number, own in enumerate(x):
            if kind == "down_proj":
                found[f"{experts}.{number}.down_proj.weight"] = own
            else:
                gate, up = own.chunk(2)
                found[f"{experts}.{number}.gate_proj.weight"] = gate
                found[f"{experts}.{number}.up_proj.weight"] = up
    return found


def add_to_checkpoint(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors beside those of a checkpoint that was just written, as another of its files."""
    if not tensors:
        return
    places: dict[str, str] = {}
    if (folder / SINGLE).is_file():  # a reader that finds it looks for no other
        first = "model-00001-of-00002.safetensors"
        (folder / SINGLE).rename(folder / first)
        with safe_open(folder / first, "pt") as file:
            places = dict.fromkeys(file.keys(), first)
    else:
        places = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    own = "model-mtp.safetensors"
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / own, metadata={"format": "pt"})
    places |= dict.fromkeys(tensors, own)
    total = sum((folder / name).stat().st_size for name in set(places.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
