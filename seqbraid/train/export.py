"""Writing what stock `from_pretrained` loads: weights, config, processor, and what else the source held."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedModel

from ..comm.consensus import agree
from ..models.braided import BraidedModel
from ..models.stock import INDEX, SINGLE, read_config, trained_config
from .checkpoint.names import extra_tensors, to_saved
from .folder import new_folder
from .lora import merged
from .weights import TensorFile, read_headers, saved_dtype, shapes

SHARD_BYTES = 5 << 30
"""Size of a file of weights; no more than one file's tensors are held beside the model."""

PROCESSOR_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files of tokenizers and processors, taken from the source where no processor is given."""


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    folder: Path
    files: tuple[str, ...]
    """The files of weights."""
    tensors: int
    """Tensors of the model."""
    extra: tuple[str, ...]
    """Tensors of the source that the model's class does not know, copied as they were."""
    total_bytes: int
    dtype: torch.dtype
    """Of the model's weights, or of most of them."""

    def text(self) -> str:
        """For who reads the console."""
        kept = f", {len(self.extra)} more as they were in the source" if self.extra else ""
        size = (
            f"{self.total_bytes / 1e9:.2f} GB" if self.total_bytes >= 1e7 else f"{self.total_bytes:,} bytes"
        )
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"wrote {self.folder}: {self.tensors} tensors{kept}, {size}, {dtype}, "
            f"in {len(self.files)} file{'s' if len(self.files) > 1 else ''}\n"
            f"stock transformers loads it: AutoModel.from_pretrained({str(self.folder)!r})"
        )


class _Piece(NamedTuple):
    """A tensor to be written: its size, and how to get it."""

    num_bytes: int
    get: Callable[[], Tensor]


def export(
    model: BraidedModel | PreTrainedModel,
    source_folder: Path | None,
    out: Path,
    processor: Any = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    beside: Callable[[Path], None] | None = None,
) -> ExportReport | None:
    """Write a checkpoint that stock `from_pretrained` loads; all ranks call it, the first writes and reports.

    Args:
        model: on the mesh, or the stock model in one process. LoRA adapters are merged into their layers.
        source_folder: the checkpoint that training started from. Its layout is kept, and tensors in it that
            are not the model's (`mtp.`, Omni's talker) are carried over byte for byte. A whole Qwen3-Omni
            comes out whole.
        out: a new folder; it appears when all of it is written.
        processor: processor or tokenizer, written beside the weights; the source's files when left out.
        dtype: of the weights; as in the source, tensor by tensor, when left out.
        shard_bytes: the most that a file of weights holds, but for a single larger tensor.
        beside: writes more files into the folder before it appears, such as a model card.
    """
    stock = model.model if isinstance(model, BraidedModel) else model
    if not isinstance(model, BraidedModel):
        return _write(stock, stock.state_dict(), source_folder, out, processor, dtype, shard_bytes, beside)
    state = model.full_state() if isinstance(model, FSDPModule) else stock.state_dict()
    report, error = None, None
    if model.mesh.rank == 0:
        try:
            report = _write(model.structure, state, source_folder, out, processor, dtype, shard_bytes, beside)
        except (OSError, ValueError) as problem:
            error = problem
    agree(model.mesh.cpu_group, error)
    return report


def _write(
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
    source_folder: Path | None,
    out: Path,
    processor: Any,
    dtype: torch.dtype | None,
    shard_bytes: int,
    beside: Callable[[Path], None] | None,
) -> ExportReport:
    source = {} if source_folder is None else read_headers(source_folder)
    layout = shapes(source) if source else None
    saved = to_saved(model, merged(model, state), layout)
    extra = extra_tensors(model, layout) if layout else ()
    default = dtype or _original_dtype(model, source_folder)
    pieces = {name: _own(x, dtype, source.get(name), default) for name, x in saved.items()}
    pieces |= {name: _copied(name, source[name]) for name in extra}
    with new_folder(out) as folder:
        files, total = _write_weights(folder, pieces, shard_bytes)
        _write_configs(folder, model, source_folder, default)
        if processor is not None:
            processor.save_pretrained(str(folder))
        elif source_folder is not None:
            for name in PROCESSOR_FILES:
                if (source_folder / name).is_file():
                    shutil.copyfile(source_folder / name, folder / name)
        if beside is not None:
            beside(folder)
    return ExportReport(out, tuple(files), len(saved), extra, total, default)


def _own(x: Tensor, asked: torch.dtype | None, before: TensorFile | None, default: torch.dtype) -> _Piece:
    """A weight of the model; one that is no floating-point number stays what it is."""
    dtype = asked or (default if before is None else before.dtype)
    dtype = dtype if x.is_floating_point() and dtype.is_floating_point else x.dtype
    return _Piece(x.numel() * dtype.itemsize, lambda: x.detach().to("cpu", dtype).contiguous())


def _copied(name: str, tensor: TensorFile) -> _Piece:
    """A tensor of the source, read when its turn has come."""

    def get() -> Tensor:
        with safe_open(tensor.file, "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found

    return _Piece(tensor.num_bytes, get)


def _write_weights(folder: Path, pieces: Mapping[str, _Piece], shard_bytes: int) -> tuple[list[str], int]:
    """Files of at most `shard_bytes`, and the index of what is where; gives their names and size."""
    shards = list(_shards(pieces, shard_bytes))
    places: dict[str, str] = {}
    files = []
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: pieces[name].get() for name in names}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
        files.append(file)
    total = sum(piece.num_bytes for piece in pieces.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files, total


def _shards(pieces: Mapping[str, _Piece], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, piece in pieces.items():
        if names and size + piece.num_bytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += piece.num_bytes
    yield names


def _write_configs(
    folder: Path, model: PreTrainedModel, source_folder: Path | None, dtype: torch.dtype
) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    whole = None if source_folder is None else read_config(source_folder)
    if whole is not None and trained_config(whole) is not whole:  # the thinker goes back into the whole Omni
        whole.thinker_config = config
        config = whole
    config.dtype = dtype
    config.save_pretrained(folder)
    generation = None if source_folder is None else source_folder / "generation_config.json"
    if generation is not None and generation.is_file():
        shutil.copyfile(generation, folder / generation.name)
    elif isinstance(model.generation_config, GenerationConfig):
        model.generation_config.save_pretrained(folder)


def _original_dtype(model: PreTrainedModel, source_folder: Path | None) -> torch.dtype:
    config = model.config if source_folder is None else read_config(source_folder)
    return saved_dtype(config) or model.dtype
