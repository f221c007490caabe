"""A pool of ranks: processes started once per test run, each case in a process group of its own.

`run(function, world_size, ...)` calls a function of a test module on every rank and gives the results in rank
order.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from functools import _lru_cache_wrapper
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

MOST = 8
MOST_THREADS = 100
"""Of a process that takes another case: torch 2.11 leaks DTensor strategies, and process groups with them."""
MODELS = ["llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"]
MODELS += ["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"]
PRELOADED = ["torch", "torch.distributed.fsdp", "transformers", "seqbraid", "seqbraid.verify.parity"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in MODELS]


class Raised(NamedTuple):
    """An exception of a rank, in words: not every exception survives the way between processes."""

    kind: str
    message: str


class RankError(AssertionError):
    """A rank raised what the test did not expect."""


class Pool:
    """Up to eight processes that wait for cases."""

    def __init__(self) -> None:
        # Forked from one process that has imported everything, so that eight ranks start as quickly as one.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.workers: list[tuple[BaseProcess, Connection]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.count = 0

    def outcomes(
        self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...], limit: float
    ) -> list[Any]:
        """Per rank `("ok", value)` or `("error", Raised, traceback)`; a rank that hangs fails the test."""
        if any(_num_threads(worker) > MOST_THREADS for worker, _ in self.workers):
            self.close()
        while len(self.workers) < world_size:
            ours, theirs = self.context.Pipe()
            worker = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()  # so that the pipe ends with the worker
            self.workers.append((worker, ours))
        self.count += 1
        store = str(Path(self.folder.name) / f"case{self.count}")
        pipes = [pipe for _, pipe in self.workers[:world_size]]
        for rank, pipe in enumerate(pipes):
            pipe.send((function, rank, world_size, store, args))
        found: dict[int, Any] = {}
        end = monotonic() + limit
        while len(found) < world_size and monotonic() < end:
            waiting = {pipes[rank]: rank for rank in range(world_size) if rank not in found}
            for pipe in wait(list(waiting), timeout=max(0.0, end - monotonic())):
                try:
                    found[waiting[pipe]] = pipe.recv()
                except EOFError:
                    found[waiting[pipe]] = ("error", Raised("EOFError", "the process died"), "")
        if len(found) < world_size:
            self.close()
            raise RankError(
                f"ranks {sorted(set(range(world_size)) - set(found))} hung for {limit} s; others: {found}"
            )
        if any(outcome[0] == "error" and outcome[1].kind == "EOFError" for outcome in found.values()):
            self.close()  # one is gone; the others may be in the middle of what they did with it
        return [found[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all processes; the next case starts new ones."""
        for worker, _ in self.workers:
            worker.kill()
            worker.join()
        self.workers = []


def _num_threads(worker: BaseProcess) -> int:
    tasks = Path(f"/proc/{worker.pid}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    clear_caches = _caches_of_meshes()
    gc.freeze()  # what is there stays there, and is not looked at again
    while True:
        function, rank, world_size, store, args = pipe.recv()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        if (
            world_size > 1
        ):  # an error here ends the process: what torch would keep of it disturbs the next case
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            dist.barrier()  # a case that raises at once must not hang up on a rank that is still connecting
        try:
            outcome: Any = ("ok", function(*args))
        except Exception as error:
            outcome = ("error", Raised(type(error).__name__, str(error)), traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # Models and torch's cache of sharding rules hold groups, and cycles hold models; a group that is
            # not freed keeps waking its threads, and some hundred of them would take half a core.
            clear_caches()
            gc.collect()
        try:
            pipe.send(outcome)
        except (
            Exception
        ) as error:  # a value that cannot be sent is the test's mistake, and must not look like a hang
            pipe.send(("error", Raised("PicklingError", str(error)), traceback.format_exc()))


def _caches_of_meshes() -> Callable[[], None]:
    """What empties all caches of torch that hold meshes."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    clears = [_clear_sharding_prop_cache, _redistribute.clear_redistribute_planner_cache]
    clears += [
        found.cache_clear
        for found in gc.get_objects()
        if isinstance(found, _lru_cache_wrapper) and (found.__module__ or "").startswith("torch.distributed")
    ]

    def clear() -> None:
        for one in clears:
            one()

    return clear


_POOL = Pool()
atexit.register(_POOL.close)


def run(function: Callable[..., Any], world_size: int, *args: Any, limit: float = 120.0) -> list[Any]:
    """The results of a function on every rank; fails if any rank raises."""
    outcomes = _POOL.outcomes(function, world_size, args, limit)
    for rank, outcome in enumerate(outcomes):
        if outcome[0] == "error":
            raise RankError(f"rank {rank}: {outcome[2]}")
    return [outcome[1] for outcome in outcomes]


def errors(function: Callable[..., Any], world_size: int, *args: Any, limit: float = 20.0) -> list[Raised]:
    """The exceptions that every rank raises; fails if one does not, or hangs."""
    outcomes = _POOL.outcomes(function, world_size, args, limit)
    for rank, outcome in enumerate(outcomes):
        if outcome[0] == "ok":
            raise RankError(f"rank {rank} raised nothing")
    return [outcome[1] for outcome in outcomes]
