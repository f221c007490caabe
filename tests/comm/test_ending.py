"""Processes end with status 0 after their work is done, whatever gloo's threads still hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from seqbraid.comm import ending

LETTING_GO = """
import hashlib, sys, threading, time, weakref
import torch, torch.distributed as dist
{imported}

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
begun = threading.Event()

def long(reference):  # what letting go of a tensor may set off: long work, without the GIL in its middle
    if threading.current_thread() is not threading.main_thread():
        begun.set()
        hashlib.sha256(bytes(100_000_000))

for _ in range(1000):  # until a thread of gloo is the last to hold one
    tensor = torch.ones(1 << 12)
    reference = weakref.ref(tensor, long)
    work = dist.all_reduce(tensor, async_op=True)
    del tensor, work
    if begun.wait(0.005):
        break
else:
    sys.exit("no thread of gloo was the last to hold a tensor")
{end}
"""


def end_of(imported: str, end: str = "") -> subprocess.CompletedProcess[str]:
    """A process that ends while a thread of gloo lets go of a tensor."""
    script = LETTING_GO.format(imported=imported, end=end)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


def test_a_process_waits_for_threads_that_let_go_of_tensors() -> None:
    ended = end_of("import seqbraid.mesh")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_without_the_wait_the_process_aborts() -> None:
    """The cause itself: where this no longer fails, the wait can go."""
    ended = end_of("")
    if ended.returncode == 0 and sys.version_info >= (3, 14):
        pytest.skip("Python 3.14 lets such a thread hang instead of ending it")
    assert ended.returncode == -6 and "terminate called" in ended.stderr


def test_a_failure_keeps_its_traceback_and_its_status() -> None:
    mistake = "dist.destroy_process_group(); raise RuntimeError('a mistake of the user')"
    ended = end_of("import seqbraid.mesh", mistake)
    assert ended.returncode == 1 and "RuntimeError: a mistake of the user" in ended.stderr
    assert "terminate called" not in ended.stderr


def test_the_wait_ends_where_a_thread_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_gloo_threads", lambda: {"1": ("R", "0")})
    ending.wait_for_gloo(limit_s=0.1)
