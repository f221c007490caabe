"""The index of a checkpoint: which file has which part of which tensor, as JSON.

Each rank writes one safetensors file, whose header says where in the whole tensors its parts belong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
"""What safetensors calls torch's dtypes."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Index = dict[str, dict[str, Any]]
"""Key to `{"dtype": "F32", "shape": [...], "chunks": [[file, offsets, sizes], ...]}`."""


def rank_file(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def make_index(folder: Path, files: Iterable[str]) -> Index:
    """Where every part of every tensor is, from the headers of all ranks' files."""
    index: Index = {}
    for file in files:
        header = _read_header(folder / file)
        places = json.loads(header.pop("__metadata__")["places"])
        for key, entry in header.items():
            shape = places[key]["shape"]
            known = index.setdefault(key, {"dtype": entry["dtype"], "shape": shape, "chunks": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], shape):
                raise ValueError(
                    f"ranks differ in {key}: {known['dtype']} {known['shape']} and {entry['dtype']} {shape}"
                )
            known["chunks"].append([file, places[key]["offsets"], entry["shape"]])
    check_index(index)
    return index


def check_index(index: Index) -> None:
    """ValueError unless the parts of every tensor fill it, once."""
    for key, entry in index.items():
        shape, chunks = entry["shape"], entry["chunks"]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{key} has the unknown dtype {entry['dtype']!r}")
        for file, offsets, sizes in chunks:
            ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
            if min([0, *offsets, *sizes]) < 0 or any(e > n for e, n in zip(ends, shape, strict=True)):
                raise ValueError(
                    f"the part of {key} in {file} is outside its shape {shape}: {offsets} + {sizes}"
                )
        starts = {tuple(offsets) for _, offsets, _ in chunks}
        volume = sum(math.prod(sizes) for _, _, sizes in chunks)
        if len(starts) != len(chunks) or volume != math.prod(shape):
            raise ValueError(f"the parts of {key} do not fill its shape {shape}: {chunks}")


def check_tensors(tensors: Mapping[str, Tensor], index: Index, prefixes: Sequence[str]) -> None:
    """ValueError unless the checkpoint has exactly these tensors under the prefixes, in shape and dtype."""
    saved = {key for key in index if key.startswith(tuple(prefixes))}
    if missing := sorted(tensors.keys() - saved):
        raise ValueError(f"the checkpoint is missing {_some(missing)}, which the model or optimizer has")
    if unexpected := sorted(saved - tensors.keys()):
        raise ValueError(f"the checkpoint has {_some(unexpected)}, unknown to this model or optimizer")
    for key, tensor in tensors.items():
        entry = index[key]
        if list(tensor.shape) != entry["shape"]:
            raise ValueError(f"{key} has shape {list(tensor.shape)}; the checkpoint's is {entry['shape']}")
        if DTYPE_NAMES.get(tensor.dtype) != entry["dtype"]:
            raise ValueError(
                f"{key} is {tensor.dtype}, in the checkpoint {DTYPES[entry['dtype']]}: build the model with "
                "the dtype of the run that saved it"
            )


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header
