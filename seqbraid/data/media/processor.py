"""Processors and tokenizers of checkpoints, with and without torchvision.

Without torchvision, transformers refuses to load the processor of any model that can see videos, since its
video processors are built on it. Here such a processor gets the stock image processor for PIL, and in place
of the video processor only its settings, which is all that `frames.py` needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoProcessor, AutoTokenizer, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import PushToHubMixin, is_torchvision_available

from .frames import DEFAULTS

VIDEO_PROCESSORS = {
    "Qwen3VLProcessor": "Qwen3VLVideoProcessor",
    "Qwen3OmniMoeProcessor": "Qwen2VLVideoProcessor",
}
"""Stock processor to its video processor, of the families that can be trained."""

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

SPECIAL_WORDS = 3
"""Entries that a vocabulary may have besides its added tokens and still be empty: unknown, beginning, end."""


class VideoSettings(PushToHubMixin):  # the base class is how a processor knows what to write to its folder
    """What a stock video processor would be made of."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")
    _auto_class = None

    def __init__(self, video_processor_type: str, **values: Any) -> None:
        if video_processor_type not in DEFAULTS:
            raise ValueError(
                f"video processor {video_processor_type!r} is not known; known are {', '.join(DEFAULTS)}"
            )
        values = DEFAULTS[video_processor_type] | values
        size = dict(values["size"])
        for edge, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            # Older checkpoints of this class bound the pixels by these names, which then win over `size`.
            pixels = values.pop(name, None)
            if pixels is not None and video_processor_type == "Qwen2VLVideoProcessor":
                size[edge] = pixels
        self.__dict__.update(values, size=size, video_processor_type=video_processor_type)

    def to_dict(self) -> dict[str, Any]:
        """As stock transformers writes it."""
        return dict(vars(self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("the stock video processors need torchvision; SampleEncoder reads videos without it")


def load_processor(path: str | Path) -> Any:
    """The processor of a checkpoint in a folder, or its tokenizer where the model knows text alone.

    No code of the checkpoint is ever run, and nothing is fetched.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{str(path)!r} is not a folder; give one with a checkpoint's tokenizer and processor"
        )
    name = _processor_class(folder)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        if name is None:
            found = AutoTokenizer.from_pretrained(folder, **options)
        elif is_torchvision_available():
            found = AutoProcessor.from_pretrained(folder, **options)
        else:
            found = _load_without_torchvision(folder, name, options)
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"the processor in {str(path)!r} cannot be loaded: {error}") from error
    _check_vocabulary(folder, getattr(found, "tokenizer", found))
    return found


def _check_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Without the files of a vocabulary, transformers makes a tokenizer of special tokens alone, for which
    text is nothing.
    """
    words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    if len(words) <= SPECIAL_WORDS:
        files = ", ".join(sorted(set(tokenizer.vocab_files_names.values())))
        raise ValueError(
            f"the {type(tokenizer).__name__} in {str(folder)!r} has no vocabulary, so that text would become "
            f"no tokens: files are missing (it reads {files}); copy them from the checkpoint"
        )


def make_processor(name: str, chat_template: str | None, **parts: Any) -> Any:
    """A stock processor from its parts, of which `video_processor` may be `VideoSettings`."""
    stock = getattr(transformers, name)
    processor = object.__new__(stock)
    # The stock constructor asks for a class that only exists with torchvision; for this one call it may not.
    processor.check_argument_for_proper_class = lambda *_: None
    processor.__init__(**parts, chat_template=chat_template)
    del processor.check_argument_for_proper_class
    return processor


def _load_without_torchvision(folder: Path, name: str, options: Mapping[str, Any]) -> Any:
    if name not in VIDEO_PROCESSORS:
        raise ValueError(
            f"{name} cannot be loaded without torchvision (only {', '.join(VIDEO_PROCESSORS)} can); "
            "pip install torchvision"
        )
    values, _ = getattr(transformers, name).get_processor_dict(str(folder), local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    parts = {
        "image_processor": Qwen2VLImageProcessorPil.from_pretrained(str(folder), local_files_only=True),
        "video_processor": VideoSettings(
            **{"video_processor_type": VIDEO_PROCESSORS[name]} | _video_values(folder, values)
        ),
        "tokenizer": tokenizer,
    }
    if name == "Qwen3OmniMoeProcessor":
        parts["feature_extractor"] = WhisperFeatureExtractor.from_pretrained(
            str(folder), local_files_only=True
        )
    return make_processor(name, values.get("chat_template") or tokenizer.chat_template, **parts)


def _video_values(folder: Path, processor_values: Mapping[str, Any]) -> dict[str, Any]:
    """Where transformers looks, in its order: the processor's file, the video processor's,
    the image processor's.
    """
    found = processor_values.get("video_processor")
    for name in PROCESSOR_FILES[:0:-1]:
        if found is None and (folder / name).is_file():
            found = _read(folder / name)
    found = dict(found or {})
    # An image processor's file names itself, and so may one of an older release.
    if found.get("video_processor_type") not in DEFAULTS:
        found.pop("video_processor_type", None)
    for key in ("image_processor_type", "feature_extractor_type", "processor_class"):
        found.pop(key, None)
    return found


def _processor_class(folder: Path) -> str | None:
    """The name of the processor's class, where the folder has one."""
    files = [folder / name for name in PROCESSOR_FILES if (folder / name).is_file()]
    if not files:
        return None
    for file in (*files, folder / "tokenizer_config.json"):
        name = _read(file).get("processor_class") if file.is_file() else None
        if isinstance(name, str):
            return name
    raise ValueError(
        f"{str(folder)!r} has {files[0].name}, but no file of it says its processor_class, such as "
        f"{', '.join(VIDEO_PROCESSORS)}"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{str(file)!r} is not a JSON object")
    return values
