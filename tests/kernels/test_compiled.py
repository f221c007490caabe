"""Our Triton kernels compile to machine code, and fit into what a GPU has of shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MOST = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a block may have, by compute capability."""


def test_they_compile(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    lines = [line.split() for line in found.stdout.splitlines()]
    assert len({name for name, *_ in lines}) == 12
    for name, capability, shared in lines:
        assert int(shared) <= MOST[int(capability)], (name, capability)
