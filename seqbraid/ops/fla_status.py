"""Whether flash-linear-attention's kernels are there, and right on this GPU."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from . import gated_delta_fla
from .triton_status import package_version, triton_missing

SAFE_TRITON = (3, 7, 1)
"""On Hopper, Triton 3.4 to 3.7.0 miscompiles the gated backward."""


@cache
def fla_missing() -> str | None:
    """Why its kernels cannot be called; None if they can."""
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed; pip install 'seqbraid[cuda]'"
    if triton_missing() is not None:
        return triton_missing()
    try:
        gated_delta_fla.fla_functions()
    except (ImportError, AttributeError) as error:
        return (
            f"this version of flash-linear-attention has a different API ({error}); pip install "
            "'seqbraid[cuda]'"
        )
    return None


@cache
def fla_wrong(device: torch.device) -> str | None:
    """Why its results are wrong on this device; None if they are right."""
    triton = package_version("triton")
    if device.type != "cuda" or triton is None:
        return None
    if torch.cuda.get_device_capability(device)[0] == 9 and triton < SAFE_TRITON:
        found, wanted = (".".join(map(str, v)) for v in (triton, SAFE_TRITON))
        return f"Triton {found} miscompiles its backward on this GPU; pip install 'triton>={wanted}'"
    return None
