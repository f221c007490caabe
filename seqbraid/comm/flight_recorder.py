"""Torch's flight recorder: the latest collectives of each rank, kept for when one of them hangs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

ENTRIES = "2000"
SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The variable that sets how many collectives are kept, as torch calls it now and did before."""
DUMPS_AT_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
FILE = "flight-rank-"


def record_flights(folder: Path) -> None:
    """Have torch record collectives, and write them here when one times out; before any group is made.

    What the user has set is left as it is.
    """
    if not any(name in os.environ for name in SIZE):
        os.environ[SIZE[0]] = ENTRIES
    os.environ.setdefault(DUMPS_AT_TIMEOUT, "1")
    if not any(name in os.environ for name in FILES):
        os.environ[FILES[0]] = str(folder / FILE)


def write_flights(folder: Path, rank: int) -> Path | None:
    """Write what was recorded, as torch's own analysis (`torchfrtrace`) reads it; None where nothing is."""
    name = "_dump_nccl_trace" if torch.cuda.is_available() else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    if dump is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{FILE}{rank}"
    path.write_bytes(dump())
    return path
