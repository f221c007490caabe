"""What a run is made from beside its weights: the model's config, tokenizer, chat template and processor.

Weights are read by one rank alone, and a resumed run has its own. These files every rank reads for itself, at
each start: they must be the same on all ranks, and those that the run began with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..comm.consensus import agree, raised_by_all
from ..mesh import Mesh
from .config import TrainConfig
from .run_folder import versions
from .setup import TINY
from .weights import checkpoint_folder, split_revision

PROCESSING = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "*.tiktoken", "*.jinja", "chat_template*", "*processor_config.json"),
)
"""Files that decide which tokens and pixels become of a record."""

OF_NO_MATTER = ("transformers_version", "_name_or_path")
"""Entries of JSON files that say who wrote them."""

Identity = dict[str, dict[str, Any]]


def agree_on_model(config: TrainConfig, mesh: Mesh) -> tuple[TrainConfig, Identity]:
    """The configuration with the revision of a model from the Hub in it, and the model's identity.

    The versions of the packages that the model comes from are compared too. All ranks call this together, and
    all refuse where one has another model.
    """
    with raised_by_all(mesh.cpu_group):
        config = _pinned(config)
        identity = model_identity(config.model)
    agree(mesh.cpu_group, None, alike={**identity, "version of": versions()})
    return config, identity


def model_identity(model: str) -> Identity:
    """Every entry of a model's config, and a digest of each of the files that make tokens and pixels."""
    if model.startswith(TINY):
        return {"model": {"name": model}}
    folder = checkpoint_folder(model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, so it is not a checkpoint of transformers")
    files = sorted({path.name for pattern in PROCESSING for path in folder.glob(pattern) if path.is_file()})
    return {
        "config": dict(_entries(_json(folder / "config.json"))),
        "file": {name: _digest(folder / name) for name in files},
        "revision": {"of the Hub": split_revision(model)[1]},
    }


def check_same_model(before: Mapping[str, Any] | None, now: Identity, last: Path) -> None:
    """Refuse to go on from a checkpoint with another model's config, tokenizer, template or processor."""
    # What a run of an earlier version did not write down cannot be compared.
    for kind in before or {}:
        was, has = before[kind], now.get(kind, {})  # type: ignore[index]
        changed = [name for name in {**was, **has} if was.get(name) != has.get(name)]
        if changed:
            name = changed[0]
            raise ValueError(
                f"{last} was trained with {kind} {name} = {_shown(was.get(name))}, but the model has "
                f"{_shown(has.get(name))}{(f' ({len(changed) - 1} more differ)' if changed[1:] else '')}; "
                "the model's folder was changed since then: restore it, or give another out"
            )


def _pinned(config: TrainConfig) -> TrainConfig:
    """With the commit of a model from the Hub: the one that the run in this folder has, else the newest."""
    if config.model.startswith(TINY) or Path(config.model).expanduser().is_dir():
        return config
    name, revision = split_revision(config.model)
    before = _model_before(Path(config.out))
    if revision is None and split_revision(before)[0] == name:
        config = replace(config, model=before)
    folder = checkpoint_folder(config.model)
    return replace(config, model=f"{name}@{folder.name}") if folder.parent.name == "snapshots" else config


def _model_before(out: Path) -> str:
    """The model of the run in a folder; where there is none, or none that can be read, nothing."""
    import yaml  # jsonargparse brings it

    try:
        found = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    return str(found.get("model", "")) if isinstance(found, dict) else ""


def _entries(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in sorted(values.items()):
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{key}.")
        elif key not in OF_NO_MATTER:
            yield prefix + key, value


def _digest(path: Path) -> str:
    """Of what a file says: of JSON the entries, however they are written down."""
    data = path.read_bytes()
    if path.suffix == ".json":
        data = json.dumps(list(_entries(_json(path)))).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {"": found}


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:80]
