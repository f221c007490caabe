"""Whether flash-linear-attention's kernels are there, and right on this GPU."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

SAFE_TRITON = (3, 7, 1)
"""On Hopper, Triton 3.4 to 3.7.0 miscompiles the gated backward."""


class FlaStatus(NamedTuple):
    """The verdict on a device, and why."""

    usable: bool
    reason: str


@cache
def fla_status(device: torch.device) -> FlaStatus:
    """Whether the gated delta rule goes to flash-linear-attention's kernels there; said once in the log."""
    status = _status(device)
    kernels = "flash-linear-attention" if status.usable else "torch"
    logger.info("gated delta rule on %s by %s: %s", device, kernels, status.reason)
    return status


def _status(device: torch.device) -> FlaStatus:
    if device.type != "cuda":
        return FlaStatus(False, "its kernels need a GPU")
    if find_spec("fla") is None:
        return FlaStatus(False, "it is not installed; pip install 'seqbraid[cuda]'")
    triton = _version("triton")
    if triton is None:
        return FlaStatus(False, "Triton is not installed")
    if torch.cuda.get_device_capability(device)[0] == 9 and triton < SAFE_TRITON:
        found, wanted = (".".join(map(str, v)) for v in (triton, SAFE_TRITON))
        return FlaStatus(
            False, f"Triton {found} miscompiles its backward on this GPU; pip install 'triton>={wanted}'"
        )
    try:
        from .gated_delta_fla import fla_functions

        fla_functions()
    except (ImportError, AttributeError) as error:
        return FlaStatus(False, f"this release of it has other functions than we know ({error})")
    return FlaStatus(True, f"installed, Triton {'.'.join(map(str, triton))}")


def _version(package: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return None
