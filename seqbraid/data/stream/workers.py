"""The processes that measure and encode samples."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any, Protocol

import torch

from .parcel import Parcel, receive
from .tasks import Tasks
from .texts import TEXT_BYTES

FOR_THE_RUN = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
]
END_S = 5.0
"""How long a killed worker may take to end; one that waits for a dead file system does not."""
START_S = 120.0
"""What a worker has at least until its first sample: it imports what its encoder needs."""
NO_SAMPLE = -1
TASKS_AT_HAND = 2  # of a worker: one that it does, one to go on with while its answer is read


@dataclass(frozen=True)
class WorkerOptions:
    """What is done ahead of the step that is trained on, and by how many processes."""

    workers: int = 0
    """Processes per rank; 0 encodes in this process, when a step is asked for."""
    prefetch_steps: int = 2
    """Steps that are encoded ahead."""
    sample_limit_s: float | None = None
    """Seconds that a worker may be at one sample; for ever when left out."""
    text_bytes: int = TEXT_BYTES
    """What a rank keeps at most of texts that were tokenized when they were measured, until they are drawn;
    samples beyond it are tokenized again."""

    def check(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("workers", "prefetch_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")


class Result(Protocol):
    """What a task will have given."""

    def result(self, timeout: float | None = None) -> Any: ...


class Later:
    """A task that is done when its result is asked for."""

    def __init__(self, task: Callable[[], Any]) -> None:
        self._task = task

    def result(self, timeout: float | None = None) -> Any:
        """Whatever the limit: the task is done in this thread."""
        return self._task()


class NoWorkers:
    """Does the tasks in this process, when their results are asked for: nothing runs beside the training."""

    num_workers = 0

    def __init__(self, tasks: Tasks, moves: Callable[[], None] | None = None) -> None:
        """
        Args:
            moves: is called at each sample.
        """
        self._tasks = tasks
        if moves is not None:
            tasks.at = lambda sample: moves()

    def submit(self, method: str, argument: Any) -> Result:
        """The result-to-be of a method of `Tasks`."""
        return Later(lambda: getattr(self._tasks, method)(argument))

    def begun(self) -> int:
        """Of no use here: who asks does the tasks."""
        return 0

    def close(self) -> None:
        """Nothing to end."""


class Workers:
    """Processes that do tasks in the order given; one that dies fails all that is under way.

    Each has a pipe of its own, read by one thread of this process. They end with this process, however it
    ends. One that is at the same sample for longer than `limit_s` counts as dead.
    """

    def __init__(self, tasks: Tasks, num_workers: int, limit_s: float | None = None) -> None:
        try:
            pickled = pickle.dumps(tasks)
        except Exception as error:
            raise ValueError(
                f"source and make_encoder go to worker processes and must be picklable ({error}); use "
                "functions at module level, functools.partial of them, or workers=0"
            ) from error
        self.num_workers = num_workers
        self._source = tasks.source
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._waiting: deque[tuple[Future[Any], bytes]] = deque()
        # Forked from a fresh process that has imported torch once; this one has threads and maybe a GPU.
        context = _context()
        self._workers: list[_Worker] = []
        with _signals_blocked():  # also for the process that they are forked from
            for number in range(num_workers):
                ours, theirs = context.Pipe()
                at = RawArray("q", [0, NO_SAMPLE])
                process = context.Process(
                    target=_work, args=(theirs, pickled, at), name=f"data worker {number}", daemon=True
                )
                process.start()
                theirs.close()  # so that the pipe ends with the worker
                self._workers.append(_Worker(process, ours, at))
        self._reader = threading.Thread(target=self._read, name="data workers", daemon=True)
        self._reader.start()

    def submit(self, method: str, argument: Any) -> Result:
        """The result-to-be of a method of `Tasks`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is None:
                self._waiting.append((future, pickle.dumps((method, argument))))
                self._hand_out()
            else:  # raised with the result: only there do the ranks agree on errors
                future.set_exception(RuntimeError(self._failure))
        return future

    def _hand_out(self) -> None:
        while self._waiting:
            worker = min(self._workers, key=lambda worker: len(worker.tasks))
            if len(worker.tasks) >= TASKS_AT_HAND:
                return
            future, message = self._waiting.popleft()
            worker.tasks.append(future)
            try:
                worker.pipe.send_bytes(message)
            except OSError:  # it is dead: the reader will find out, and fail this task as well
                return

    def _read(self) -> None:
        while self._failure is None:
            by_handle: dict[Any, _Worker] = {worker.process.sentinel: worker for worker in self._workers}
            by_handle |= {worker.pipe: worker for worker in self._workers}
            ready = wait(list(by_handle), None if self._limit_s is None else min(1.0, self._limit_s / 10))
            if stuck := self._stuck():
                self._fail(stuck)
                return
            # What a worker has sent before it died is read first; then its pipe is at its end.
            for handle in sorted(ready, key=lambda handle: isinstance(handle, int)):
                worker = by_handle[handle]
                try:
                    if handle is not worker.pipe:
                        raise EOFError
                    done, answer = receive(worker.pipe)
                except (EOFError, OSError):
                    self._fail(f"{worker.process.name} {_how_it_ended(worker.process)}")
                    return
                except Exception as error:  # this thread must not end with tasks under way
                    self._fail(f"the answer of {worker.process.name} cannot be read: {error!r}")
                    return
                with self._lock:
                    if self._failure is not None:
                        return
                    future = worker.tasks.popleft()
                    self._hand_out()
                if done:
                    future.set_result(answer)
                else:
                    future.set_exception(RuntimeError(answer))

    def begun(self) -> int:
        """How many samples the workers have begun, each time that they did."""
        return sum(worker.at[0] for worker in self._workers)

    def _stuck(self) -> str:
        """What to say of a worker that has not gone forward for too long; nothing where all do."""
        now = time.monotonic()
        for worker in self._workers:
            stays = worker.stays(now)
            sample = worker.at[1]
            if self._limit_s is None or stays <= max(self._limit_s, START_S if sample == NO_SAMPLE else 0.0):
                continue
            what = "starting its encoder" if sample == NO_SAMPLE else f"at {self._source.where(sample)}"
            stopped = process_state(worker.process.pid) == "T"
            why = (
                "the process is stopped (SIGSTOP); send it SIGCONT"
                if stopped
                else (
                    "it may be a chat template with an endless loop, or a file system that does not "
                    "respond: remove or repair the sample, or raise timeouts.loader"
                )
            )
            return (
                f"{worker.process.name} (process {worker.process.pid}) has been {what} for {stays:.0f} s "
                f"(timeouts.loader={self._limit_s:g}); {why}"
            )
        return ""

    def _fail(self, why: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = why
            pending = [task for worker in self._workers for task in worker.tasks]
            pending += [task for task, _ in self._waiting]
            self._waiting.clear()
        for worker in self._workers:
            worker.process.kill()
        for task in pending:
            task.set_exception(RuntimeError(why))

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        self._fail("the data workers were closed")
        for worker in self._workers:
            worker.process.join(END_S)
        if self._reader is not threading.current_thread():
            self._reader.join()
        for worker in self._workers:
            worker.pipe.close()


def _context() -> SpawnContext | ForkServerContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:  # nobody has asked for others
        context.set_forkserver_preload(["__main__", __name__])
    return context


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes that are started within are deaf to what asks a run to stop; what this one gets is kept."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing starts it first of all, and then unblocks SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_RUN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    def __init__(self, process: BaseProcess, pipe: Connection, at: Any) -> None:
        self.process = process
        self.pipe = pipe
        self.tasks: deque[Future[Any]] = deque()  # in the order in which they will be answered
        self.at = at
        """Written by the worker: how many samples it has begun, and which one is the latest."""
        self._seen: tuple[Any, ...] = ()
        self._since = 0.0

    def stays(self, now: float) -> float:
        """For how long it has been at the same sample, as far as was seen; 0 where it has nothing to do."""
        task = self.tasks[0] if self.tasks else None
        seen = (task, *self.at)
        if task is None or seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


def process_state(pid: int | None) -> str:
    """R for running, S for asleep, T for stopped, …; empty where it cannot be told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def _how_it_ended(process: BaseProcess) -> str:
    process.join(timeout=5)
    code = process.exitcode
    if code is not None and code < 0:
        hint = "; the host may be out of memory: try fewer workers" if -code == signal.SIGKILL else ""
        return f"(process {process.pid}) was ended by {signal.Signals(-code).name}{hint}"
    return f"(process {process.pid}) ended with exit code {code}; see its output above"


def _work(pipe: Connection, pickled: bytes, at: Any) -> None:
    """The life of a worker."""

    def begins(sample: int) -> None:
        at[1] = sample
        at[0] += 1

    # They go to all processes of a job, but are for the parent, which ends the workers when it is done.
    for number in FOR_THE_RUN:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tasks: Tasks | None = None
    while True:
        try:
            method, argument = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            if tasks is None:
                tasks = pickle.loads(pickled)
                tasks.at = begins
            parcel = Parcel((True, getattr(tasks, method)(argument)))
        except Exception as error:
            parcel = Parcel((False, f"{error}\n\nIn a data worker:\n{traceback.format_exc()}"))
        try:
            parcel.send(pipe)
        except (BrokenPipeError, ConnectionResetError):
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])  # a pipe that closes with the parent, also when that is killed
    os._exit(1)
