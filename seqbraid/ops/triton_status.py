"""Whether our own Triton kernels, which pass over rows of memory once, can be taken."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from .kernels import Candidate


def package_version(package: str) -> tuple[int, ...] | None:
    """The first three numbers of an installed package's version."""
    try:
        return tuple(int(part) for part in version(package).split("+")[0].split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return None


class RowsNeed(NamedTuple):
    """What passes over the rows of a tensor are needed for."""

    device: torch.device
    dtype: torch.dtype
    whole: bool = True
    """Whether rows are whole, not shared out over ranks."""

    def __str__(self) -> str:
        return f"{self.dtype} on {self.device}" + ("" if self.whole else ", rows cut over ranks")


def rows_unfit(need: RowsNeed) -> str | None:
    """What the Triton kernels that pass over rows do not take."""
    if need.device.type != "cuda":
        return "its kernels need a GPU"
    if not need.whole:
        return "its kernels take whole rows, and these are cut over ranks"
    return "it is float64" if need.dtype == torch.float64 else None


def triton_missing() -> str | None:
    """Whether there is a compiler for our own kernels."""
    return None if package_version("triton") else "Triton is not installed; pip install triton"


TRITON = Candidate("triton", rows_unfit, triton_missing)
"""One pass over memory instead of several."""
