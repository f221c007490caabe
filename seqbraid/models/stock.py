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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .families import family_of
from .media_tokens import media_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

OFTEN_REPLACED = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
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
        if hasattr(function := vars(module).get(name), "__wrapped__")
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
        raise ValueError(f"{folder} has no config.json, so it is no checkpoint of transformers")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, KeyError, TypeError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{folder} brings code of its own for a model that transformers {transformers.__version__} "
                "does not have; such code is never run"
            ) from None
        raise ValueError(f"{folder}/config.json cannot be read: {error}") from None


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
                f"model_type {config.model_type!r} is neither a causal language model of transformers nor a "
                "media family we know"
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
    """The safetensors files of a checkpoint, in order; ValueError where there are none or one is missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}"
            + (f", only {', '.join(pickled[:3])}" if pickled else "")
            + "; weights are read from safetensors alone, because loading a pickle runs code: convert them "
            "with model.save_pretrained"
        )
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is no index of safetensors files: {error!r}") from None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} names {name!r}, which is no file of that folder")
    return [folder / name for name in names]
