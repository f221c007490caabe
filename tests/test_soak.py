"""A few of `make soak`'s runs."""

from __future__ import annotations

import subprocess
import sys


def test_short_runs_end_with_the_right_status() -> None:
    command = [sys.executable, "-m", "tests.soak", "--runs", "5", "--ranks", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout
    assert "0 of 5 runs failed" in ended.stdout
