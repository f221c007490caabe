"""Multi-token prediction beside a stock model: attached under the checkpoint's names, and taken off again.

transformers drops the `mtp.` tensors of Qwen3.5 and Qwen3-Next when it loads a checkpoint. Here they become
a module of the stock model, `model.mtp`, so that whoever shards, freezes, adapts or saves the model has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from .mtp_module import NAME, MtpModule, MtpOptions, has_mtp
from .mtp_weights import (
    PREFIX,
    add_to_checkpoint,
    is_packed,
    mtp_files,
    read_mtp,
    to_checkpoint,
    to_module,
)
from .parts import ModelParts
from .stock import INDEX, SINGLE

COUNTS = {
    "qwen3_next": "num_nextn_predict_layers",
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
}
"""Text models that have such a module, and what their configs call the number of its layers."""


def attach_mtp(model: PreTrainedModel, options: MtpOptions | None = None, weights: bool = True) -> MtpModule:
    """Give a stock model its module of multi-token prediction, before it is frozen, adapted or parallelized.

    Without `weights` none are read; neither are they for a model on the meta device, whose weights come
    later. Embedding and head are the model's own.
    """
    options = MtpOptions() if options is None else options
    parts = ModelParts.of(model)
    name, config = type(model).__name__, parts.config
    if parts.mtp is not None:
        raise ValueError(f"this {name} has its module of multi-token prediction already")
    count_key = COUNTS.get(config.model_type)
    if count_key is None or parts.final_norm is None:
        raise ValueError(
            f"{name} (model_type {config.model_type!r}) has no multi-token prediction that we know; "
            f"it is there for {', '.join(COUNTS)}: leave mtp out"
        )
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ValueError(
            f"{name} has mtp_use_dedicated_embeddings=True; only shared embeddings are supported"
        )
    folder = None if options.fresh and options.source is None else source_folder(model, options.source)
    files = {} if folder is None else mtp_files(folder)
    count = _num_layers(config, count_key, files)
    if not files and not options.fresh:
        raise ValueError(_nothing_there(name, config, count_key, folder))
    like: Any = parts.embedding.weight
    with torch.device(like.device), no_init_weights():
        module = MtpModule(config, type(parts.layer_list[-1]), type(parts.final_norm), options, max(count, 1))
    module.to(like.dtype).train(model.training)
    module.packed = is_packed(files)
    _check_names(module, files, folder)
    if weights and not like.is_meta:
        _fill(model, module, {} if folder is None else read_mtp(folder))
    model.add_module(NAME, module)
    if options.fresh and not count:
        setattr(config, count_key, 1)
    return module


def detach_mtp(model: PreTrainedModel) -> None:
    """Take the module off again."""
    del model._modules[NAME]


@contextmanager
def attached(model: PreTrainedModel, options: MtpOptions) -> Iterator[None]:
    """With the module there, and what it changes about the model undone behind it."""
    config = model.config.get_text_config()
    before = dict(vars(config))
    learned = [(p, p.requires_grad) for p in model.parameters()]
    attach_mtp(model, options)
    try:
        if options.only:
            train_mtp_only(model)
        yield
    finally:
        detach_mtp(model)
        for key in COUNTS.values():
            if key not in before and key in vars(config):
                delattr(config, key)
        for parameter, learns in learned:
            if parameter.requires_grad != learns:
                parameter.requires_grad_(learns)


def train_mtp_only(model: PreTrainedModel) -> None:
    """Freeze all of a model but its module of multi-token prediction."""
    own = {id(p) for p in mtp_of(model).parameters()}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.requires_grad_(False)


def mtp_of(model: nn.Module) -> MtpModule:
    """The module that `attach_mtp` gave to a model."""
    found = getattr(model, NAME, None)
    assert isinstance(found, MtpModule), "attach_mtp was not called"
    return found


def source_folder(model: PreTrainedModel, given: str | None = None) -> Path | None:
    """The folder of a checkpoint: the given one, or where the model was loaded from; None where that is no
    folder of this machine.
    """
    name = given or str(
        getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or ""
    )
    if given is not None and not Path(name).expanduser().is_dir():
        raise ValueError(f"mtp source={given!r} is not a folder; give that of a checkpoint with mtp. tensors")
    if not name or Path(name).expanduser().is_dir():
        return Path(name).expanduser() if name else None
    from huggingface_hub import snapshot_download

    try:  # what from_pretrained has downloaded
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None


def save_with_mtp(model: PreTrainedModel, state: dict[str, Tensor], folder: Path, **kwargs: Any) -> None:
    """`save_pretrained` of a whole state, and beside it the tensors of multi-token prediction: its own,
    or those of the checkpoint that it was loaded from.
    """
    mtp = {name: x for name, x in state.items() if has_mtp(model) and name.startswith(PREFIX)}
    source = None if mtp else source_folder(model)
    if mtp:
        mtp = to_checkpoint(mtp, mtp_of(model).packed)
    elif source is not None and _has_weights(source):
        mtp = read_mtp(source)  # before it may be written over
    stock = {name: x for name, x in state.items() if not (has_mtp(model) and name.startswith(PREFIX))}
    with _without_mtp(model):
        model.save_pretrained(folder, state_dict=stock, **kwargs)
    add_to_checkpoint(folder, mtp)


@contextmanager
def _without_mtp(model: PreTrainedModel) -> Iterator[None]:
    module = model._modules.pop(NAME, None)
    try:
        yield
    finally:
        if module is not None:
            model._modules[NAME] = module


def _has_weights(folder: Path) -> bool:
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def _num_layers(config: Any, key: str, files: Mapping[str, Any]) -> int:
    said = getattr(config, key, None)
    there = {int(name.split(".")[2]) for name in files if name.startswith(PREFIX + "layers.")}
    return int(said) if said else len(there)


def _nothing_there(name: str, config: Any, key: str, folder: Path | None) -> str:
    said = getattr(config, key, None)
    where = f"its checkpoint {folder} has no tensor mtp.*" if folder else "it was loaded from no folder"
    return (
        f"mtp was asked for, but {where}, and the config of {name} says {key}={said}; give the folder that "
        "has them as mtp source, or start from random weights with fresh=True"
    )


def _check_names(module: nn.Module, files: Mapping[str, Path], folder: Path | None) -> None:
    """Every tensor of the checkpoint has its place, and the other way round."""
    if not files:
        return
    there = {name.removeprefix(PREFIX) for name in to_module_names(files)}
    own = set(dict(module.named_parameters()))
    for names, what in ((own - there, "lacks"), (there - own, "has the unknown")):
        if names:
            raise ValueError(
                f"{folder} {what} {PREFIX}{sorted(names)[0]} ({len(names)} such tensors), so it does not fit "
                "the module of multi-token prediction of its config"
            )


def to_module_names(names: Mapping[str, Any]) -> set[str]:
    """The module's names for those of a checkpoint."""
    return set(to_module({name: torch.empty(1, 1, device="meta") for name in names}))


@torch.no_grad()
def _fill(model: Any, module: MtpModule, tensors: Mapping[str, Tensor]) -> None:
    """From a checkpoint, or from random numbers that are the same on every rank."""
    if not tensors:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(module.options.seed)
            module.apply(model._init_weights)
        return
    found = {name.removeprefix(PREFIX): x for name, x in to_module(tensors).items()}
    for name, parameter in module.named_parameters():
        if found[name].shape != parameter.shape:
            raise ValueError(
                f"the checkpoint has {PREFIX}{name} of shape {list(found[name].shape)}; the config makes it "
                f"{list(parameter.shape)}"
            )
        parameter.copy_(found[name])
