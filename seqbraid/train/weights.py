"""Loading a checkpoint's folder: stock classes, safetensors alone, no code that a folder brings along."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..models.stock import read_config, stock_class, trained_config, weight_files
from .checkpoint.index import DTYPES
from .checkpoint.names import extra_tensors

PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.txt",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)
"""What is fetched of a checkpoint on the hub: no pickles, no code."""


AT_REVISION = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)")

SAMPLES, SAMPLE_BYTES = 64, 4096
"""How many places of a file, and how much of each, a fingerprint looks at; of a small file at everything."""


class Stock(NamedTuple):
    """A stock model and what its folder holds beside it."""

    model: PreTrainedModel
    extra: tuple[str, ...]
    """Tensors of the folder that the model's class does not know, such as `mtp.` or Omni's talker."""
    folder: Path


class TensorFile(NamedTuple):
    """Where a tensor of a checkpoint lies, from the files' headers."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def config_folder(path_or_name: str | Path) -> Path:
    """As `checkpoint_folder`, but of a checkpoint on the Hub its config alone."""
    return checkpoint_folder(path_or_name, ("config.json",))


def checkpoint_folder(path_or_name: str | Path, patterns: Sequence[str] = PATTERNS) -> Path:
    """A folder as it is, or the local snapshot of a checkpoint on the Hub (`owner/name[@revision]`)."""
    folder = Path(path_or_name).expanduser()
    if folder.is_dir():
        return folder
    name, revision = split_revision(path_or_name)
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"{name!r} is neither a folder nor the name of a model on the Hub (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fetch = partial(snapshot_download, name, revision=revision, allow_patterns=list(patterns))
    try:
        try:
            return Path(fetch())
        except (HfHubHTTPError, OSError):
            # Without network some releases want a list of the commit's files, which others did not keep.
            with suppress(HfHubHTTPError, OSError):
                return Path(fetch(local_files_only=True))
            raise
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{str(path_or_name)!r} is not a folder, and could not be downloaded from the Hub: {error}"
        ) from None


def split_revision(path_or_name: str | Path) -> tuple[str, str | None]:
    """The name of a checkpoint on the Hub, and the branch, tag or commit that is asked for.

    >>> split_revision("owner/name@main"), split_revision("owner/name")
    (('owner/name', 'main'), ('owner/name', None))
    """
    found = None if Path(path_or_name).expanduser().is_dir() else AT_REVISION.fullmatch(str(path_or_name))
    return (found["name"], found["revision"]) if found else (str(path_or_name), None)


def load_stock(
    path_or_name: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Stock:
    """The model of a checkpoint, in training mode, with every weight of it from safetensors files.

    Args:
        path_or_name: a checkpoint's folder or its name on the hub. Of a whole Qwen3-Omni the thinker is
            loaded.
        dtype: of the parameters; the checkpoint's own when left out.
        device: with `meta` no weight is read, only the model's structure and the headers.
    """
    folder = checkpoint_folder(path_or_name)
    config = read_config(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder} is quantized, and quantized weights cannot be trained; use the "
            "checkpoint it was made from"
        )
    tensors = read_headers(folder)
    with torch.device("meta"):
        model = empty_model(folder, dtype)
    # Before anything is read, and before a run whose result could not be written beside the rest.
    extra = extra_tensors(model, shapes(tensors))
    if torch.device(device).type != "meta":
        found = type(model)
        model, report = found.from_pretrained(
            folder,
            config=trained_config(config),
            dtype=dtype if dtype is not None else "auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # refused below, in words that name them
            output_loading_info=True,
        )
        if report["mismatched_keys"]:
            name, saved, wanted = sorted(report["mismatched_keys"])[0]
            raise ValueError(
                f"{folder} has {name} of shape {list(saved)}, but its config.json makes it {list(wanted)} "
                f"(such tensors: {len(report['mismatched_keys'])}); use both from the same checkpoint"
            )
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise ValueError(
                f"{folder} lacks {len(missing)} tensors of {found.__name__}, which would be initialised "
                f"randomly: {', '.join(missing[:5])}{(', …' if len(missing) > 5 else '')}"
            )
        model = model.to(device)
    return Stock(model.train(), extra, folder)


def empty_model(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of a folder's config, with weights of no meaning, which are still to be loaded into it."""
    config = read_config(folder)
    own, found = trained_config(config), stock_class(config)
    try:
        with no_init_weights():
            model: PreTrainedModel = found._from_config(
                own, dtype=dtype or saved_dtype(config) or torch.float32
            )
    except ImportError as error:  # of a package that the config asks for
        raise ValueError(f"{folder}/config.json cannot be used: {error}") from None
    model.tie_weights()  # a part of the initialization that was left out
    generation = folder / "generation_config.json"
    if generation.is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.train()


def weights_fingerprint(folder: Path) -> str:
    """What tells the weights of a folder from others: names, shapes, and numbers from all over its files."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            for start in range(0, size, max(size // SAMPLES, SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(size - SAMPLE_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def read_headers(folder: Path) -> dict[str, TensorFile]:
    """Every tensor of a checkpoint, from the headers of its files; none is loaded."""
    found: dict[str, TensorFile] = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise ValueError(
                        f"{path}: {name} has dtype {part.get_dtype()}; known are {', '.join(DTYPES)}"
                    )
                found[name] = TensorFile(path, dtype, tuple(part.get_shape()))
    return found


def shapes(tensors: Mapping[str, TensorFile]) -> dict[str, tuple[int, ...]]:
    """The shapes alone."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def saved_dtype(config: Any) -> torch.dtype | None:
    """The dtype that a config says its checkpoint is in; None where it says nothing."""
    found = config.dtype or trained_config(config).dtype or config.get_text_config().dtype
    dtype: torch.dtype | None = getattr(torch, found) if isinstance(found, str) else found
    return dtype
