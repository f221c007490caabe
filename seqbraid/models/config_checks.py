"""What a checkpoint's `config.json` may not say, seen before transformers takes it at its word."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


def check_raw(path: Path) -> None:
    """Refuse a dtype that torch does not have, and attention kernels that would be fetched from the Hub."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for part in _parts(raw):
        for key in ("dtype", "torch_dtype"):
            if (name := part.get(key)) is not None and not _is_float(name):
                raise ValueError(
                    f"{path} cannot be read: {key}={name!r} is not a floating-point dtype of torch; "
                    "correct it, for example to 'bfloat16' or 'float32'"
                )
        for key in ("attn_implementation", "_attn_implementation"):
            kernel = part.get(key)
            if isinstance(kernel, str) and "/" in kernel:
                raise ValueError(
                    f"{path} has {key}={kernel!r}, a kernel of the Hub, but code is not downloaded "
                    "because of a checkpoint's config; remove the key, and set "
                    f"kernels.attention={kernel} to use it (seqbraid doctor lists the installed kernels)"
                )


def check_vocabulary(path: Path, config: Any) -> None:
    """Refuse a vocabulary that is too small for the config's own padding token."""
    text = config.get_text_config()
    size, padding = getattr(text, "vocab_size", None), getattr(text, "pad_token_id", None)
    if size is None:
        return
    if size < 1:
        raise ValueError(f"{path} has vocab_size={size}; it must be at least 1")
    if padding is not None and not -size <= padding < size:
        raise ValueError(
            f"{path} has pad_token_id={padding}, outside its own vocabulary of vocab_size={size}; correct "
            "one of them"
        )


def _parts(raw: Any) -> Iterator[Mapping[str, Any]]:
    """A config and those within it."""
    if not isinstance(raw, Mapping):
        return
    yield raw
    for name, value in raw.items():
        if str(name).endswith("_config") and name != "quantization_config":
            yield from _parts(value)


def _is_float(name: Any) -> bool:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return isinstance(found, torch.dtype) and found.is_floating_point
