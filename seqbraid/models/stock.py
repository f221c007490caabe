"""Which stock class a checkpoint is loaded with, the checks on its folder before anything is read, and how a
stock model is run on a CPU.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .config_checks import check_raw, check_vocabulary
from .families import family_of
from .media_tokens import media_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

OFTEN_REPLACED: tuple[str, ...] = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
OFTEN_REPLACED += ("causal_conv1d_fn", "causal_conv1d_update")
"""Functions of transformers' gated delta models that those of other packages take the place of."""


@contextmanager
def in_torch(model: PreTrainedModel) -> Iterator[None]:
    """Run a stock model on the CPU, whatever is installed.

    Where flash-linear-attention or causal-conv1d is, transformers puts its functions into the modules of
    gated delta models when they are imported, and calls them wherever the tensors are. On a CPU they fail.
    """
    modules = {sys.modules.get(type(layer).__module__) for layer in model.modules()} - {None}
    replaced = {
        (module, name): function
        for module in modules
        for name in OFTEN_REPLACED
        if callable(function := vars(module).get(name)) and hasattr(function, "__wrapped__")
    }
    for (module, name), function in replaced.items():
        setattr(module, name, _its_own(function))
    try:
        yield
    finally:
        for (module, name), function in replaced.items():
            setattr(module, name, function)


def _its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function of transformers was before it was replaced; it is given what it knows."""
    own = inspect.unwrap(function)
    known = inspect.signature(own).parameters
    return lambda *args, **kwargs: own(*args, **{name: kwargs[name] for name in kwargs if name in known})


def read_config(folder: Path) -> Any:
    """The config of a checkpoint's folder; code that a folder brings along is never run."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, so it is not a checkpoint of transformers")
    check_raw(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each family's config checks and converts in its own way
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{folder} needs its own code for a model that transformers {transformers.__version__} "
                "does not have; custom code is never run, so use a model of transformers"
            ) from None
        raise ValueError(f"{folder}/config.json cannot be read: {' '.join(str(error).split())}") from None
    check_vocabulary(folder / "config.json", config)
    return config


def trained_config(config: Any) -> Any:
    """The config of the part that is trained: of the whole Omni its thinker, else the model's own."""
    return media_config(config)


def stock_class(config: Any) -> Any:
    """The class whose `from_pretrained` and `_from_config` make the model that is trained.

    Text models take the class that their config maps to. Media models take the one they were saved from, and
    Omni's thinker its own, also where the checkpoint is of the whole Omni.

    >>> from transformers import Qwen3VLConfig
    >>> stock_class(Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"])).__name__
    'Qwen3VLForConditionalGeneration'
    """
    config = trained_config(config)
    if family_of(config) is None:
        mapping = AutoModelForCausalLM._model_mapping
        if type(config) not in mapping.keys():  # noqa: SIM118 (its `in` looks at other things)
            raise ValueError(
                f"model_type {config.model_type!r} is neither a causal language model of transformers nor "
                "a supported multimodal family"
            )
        found = mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found
    # The config class is named after the family, and so is the class that we train.
    wanted = type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"
    for name in (config.architectures or []) + [wanted]:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.__name__ == wanted:
            return found
    raise ValueError(f"transformers {transformers.__version__} has no class {wanted} for {config.model_type}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order; ValueError where there are none, or one is
    missing or damaged.
    """
    if (folder / SINGLE).is_file():
        found = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        found = [folder / name for name in _indexed(folder / INDEX)]
    else:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}"
            + (f", only {', '.join(pickled[:3])}" if pickled else "")
            + (
                "; only safetensors are read, because loading a pickle runs code: convert the weights with "
                "model.save_pretrained"
            )
        )
    for path in found:
        try:
            with safe_open(path, "pt"):
                pass  # its header is read, and compared with the size of the file
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is not a complete safetensors file: {error}; copy or download it again"
            ) from None
    return found


def _indexed(path: Path) -> list[str]:
    """The names of the files that an index is of."""
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; copy or download it again") from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(places, dict) and places and all(isinstance(name, str) for name in places.values())):
        raise ValueError(
            f"{path} is not an index of safetensors files: it needs a weight_map from tensor names to "
            "file names; copy or download it again"
        )
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or not (path.parent / name).is_file():
            raise ValueError(f"{path} names {name!r}, which is not in that folder")
    return names
