"""seqbraid: train on long packed sequences over many devices, with the loss and gradients of one process.

>>> import seqbraid as sb
>>> sb.SequenceLayout([900, 300, 40], ring=2, ulysses=2).num_local_tokens
310
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data.pack import pack
    from .distributed import parallelize
    from .layout import SequenceLayout
    from .mesh import Mesh
    from .models.batch import BadBatch, PackedBatch
    from .models.braided import BraidedModel
    from .models.local_tokens import LocalTokens, TokenLogprobs, TokenLoss
    from .models.mtp_module import MtpOptions
    from .models.output import StepOutput
    from .models.step import Step, forward_backward
    from .ops.kernels import KernelOptions
    from .plan.memory import MemoryOptions
    from .plan.pipeline import PipelineOptions

__version__ = "0.1.0"

__all__ = [
    "BadBatch",
    "BraidedModel",
    "KernelOptions",
    "LocalTokens",
    "MemoryOptions",
    "Mesh",
    "MtpOptions",
    "PackedBatch",
    "PipelineOptions",
    "SequenceLayout",
    "Step",
    "StepOutput",
    "TokenLogprobs",
    "TokenLoss",
    "forward_backward",
    "pack",
    "parallelize",
]

_HOMES = {
    "BadBatch": ".models.batch",
    "BraidedModel": ".models.braided",
    "KernelOptions": ".ops.kernels",
    "LocalTokens": ".models.local_tokens",
    "MemoryOptions": ".plan.memory",
    "Mesh": ".mesh",
    "MtpOptions": ".models.mtp_module",
    "PackedBatch": ".models.batch",
    "PipelineOptions": ".plan.pipeline",
    "SequenceLayout": ".layout",
    "Step": ".models.step",
    "StepOutput": ".models.output",
    "TokenLogprobs": ".models.local_tokens",
    "TokenLoss": ".models.local_tokens",
    "forward_backward": ".models.step",
    "pack": ".data.pack",
    "parallelize": ".distributed",
}
"""Loaded when they are asked for: torch and transformers take seconds, and many commands need neither."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
