"""Ranks that see GPUs which are not there: enough to choose a device by, and no more."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist


def free_port() -> int:
    """A port for ranks to meet at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@contextmanager
def fake_gpus(seen: list[str], port: int) -> Iterator[list[int]]:
    """On a rank of the pool, as on one that a launcher has just started and that sees these GPUs; gives the
    GPUs that it has taken."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    taken: list[int] = []
    with (
        patch("torch.cuda.is_available", lambda: bool(seen)),
        patch("torch.cuda.device_count", lambda: len(seen)),
        patch("torch.cuda.get_device_properties", lambda gpu: SimpleNamespace(uuid=seen[gpu])),
        patch("torch.cuda.set_device", taken.append),
    ):
        yield taken
