"""`Checkpoints`: the folders that a run saves into and resumes from, on whatever mesh.

A save copies this rank's parts of model and optimizer to host memory and returns; a thread writes them. No
collective runs in a thread: `poll` asks all ranks, over the CPU group, whether they have written, and only
then rank 0 publishes. A folder holds a safetensors file per rank, `index.json` (which part of which tensor is
where), `state.json` and, last, `complete.json`; nothing is pickled. Torch's distributed checkpoint plans what
a rank saves and what it reads.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...comm.consensus import agree, gather_ints
from ...mesh import Mesh
from . import files
from .choose import WAY_OUT, candidates, choose_checkpoint, set_back
from .files import FileRecord, check_share
from .index import Index, check_index, check_tensors, rank_file
from .job import CheckpointError, Failed, Job, Published
from .publish import name_best, publish_on_leaving, publish_written, recover, write_part
from .read import fill_tensors
from .stage import StagingMemory, stage_tensors
from .state import check_json, model_tensors, of_ours, optimizer_state_for, optimizer_tensors

_RUNNING, _DONE, _FAILED, _BROKEN = range(4)
_MESSAGE_BYTES = 1024
_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run; all ranks call every method, at the same steps.

    Args:
        folder: where they go, on a file system that all ranks share.
        mesh: the mesh of the run.
        keep: how many of the newest to keep; `best` and the one being loaded are kept besides.
        asynchronous: write in a thread while training goes on; otherwise `save` returns when it is published.
        on_error: whether a failed write stops the run with a `CheckpointError` or is reported as `Failed`.
        base: what identifies the weights that the frozen parameters have. They are then not saved, and a load
            wants a model that has them already. Everything is saved when left out.
        way_out: what whoever reads of a damaged checkpoint can do about it.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        keep: int = 2,
        asynchronous: bool = True,
        on_error: Literal["stop", "continue"] = "stop",
        base: str | None = None,
        way_out: str = WAY_OUT,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the newest checkpoint is what a resume needs")
        if on_error not in ("stop", "continue"):
            raise ValueError(f"on_error={on_error!r} is unknown; use stop or continue")
        self.folder = Path(folder)
        self.mesh = mesh
        self.keep = keep
        self.asynchronous = asynchronous
        self.on_error = on_error
        self.base = base
        self.way_out = way_out
        self._job: Job | None = None
        self._events: list[Published | Failed] = []
        self._loading: set[str] = set()
        self._made_folder = False
        self._memory = StagingMemory()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: dict[str, Any],
    ) -> None:
        """Copy everything to host memory and start to write it; waits first for a save under way.

        Args:
            step: the step that the checkpoint is of, and named after; one of the same step is replaced.
            model: what `parallelize` gave.
            optimizer: its optimizer; None saves the model alone.
            state: anything else, as JSON has it; the first rank's is written.
        """
        start = time.monotonic()
        self._events = self.finish()
        name = files.folder_name(step)
        with self._together():  # after this the folder is there, or nobody can write
            parts, text = self._stage(model, optimizer, state)
            no_folder = self._make_folder(name) if self.mesh.rank == 0 else None
        if no_folder is None:
            fresh, rank = self.folder / f"{name}.tmp", self.mesh.rank
            work = self._thread.submit(write_part, fresh, rank, parts, None if rank else text)
        else:
            work = Future()
            work.set_exception(no_folder)
        self._job = Job(step, work, start)
        if not self.asynchronous:
            self._events = self.finish()

    def poll(self) -> list[Published | Failed]:
        """What has happened since the last call; publishes once all ranks have written."""
        if self._job is not None:
            self._advance(self._job)
        return self._take_events()

    def finish(self) -> list[Published | Failed]:
        """Wait for the save under way; what has happened since the last call."""
        while self._job is not None:
            wait([self._job.work])
            self._advance(self._job)
        return self._take_events()

    def leave(self, patience_s: float = 10.0) -> None:
        """Publish the save under way, once every rank has written, on the way out of an error.

        No rank is asked, for one may be gone: they are seen by their files. Given up when these stop growing.
        """
        job, self._job = self._job, None
        if job is not None:
            publish_on_leaving(self.folder, job, self.mesh.rank, patience_s)

    def mark_best(self, step: int) -> None:
        """Make `best` name this step's checkpoint, once it is published if it is under way."""
        if self._job is not None and self._job.step == step and self._job.phase != "writing":
            self._events = self.finish()
        if any(isinstance(event, Failed) and event.step == step for event in self._events):
            return  # it could not be written, which is reported
        path, error, reason = self.folder / files.folder_name(step), None, ""
        if self.mesh.rank == 0:
            try:
                if self._job is not None and self._job.step == step:
                    name_best(self.folder, path.name)
                elif not files.is_complete(path):
                    raise ValueError(
                        f"step {step} has no checkpoint that `best` could name: {path} is not complete"
                    )
                else:
                    files.point(self.folder, "best", path.name)
            except OSError as problem:
                reason = str(problem)
            except ValueError as problem:
                error = problem
        agree(self.mesh.cpu_group, error)
        if reason := self._first_text(reason):
            self._report(step, f"`best` could not be written: {reason}", fatal=False)

    def last(self, resume: str = "auto") -> Path | None:
        """The checkpoint to resume from, the same on every rank; clears away what a killed run left.

        Args:
            resume: as in the configuration. Damage is a ValueError on every rank, unless `latest-intact` asks
                for the newest that is intact, byte for byte.
        """
        step, reason = -1, ""
        with self._together():
            if self.mesh.rank == 0:
                try:
                    recover(self.folder, busy=None if self._job is None else f"{self._job.name}.tmp")
                    found = (
                        None
                        if resume == "latest-intact"
                        else choose_checkpoint(self.folder, resume, self.way_out)
                    )
                    step = -1 if found is None else files.step_of(found)
                except OSError as problem:
                    reason = str(problem)
        if reason := self._first_text(reason):
            raise CheckpointError(f"the checkpoints in {self.folder} cannot be read: {reason}")
        if resume == "latest-intact":
            return self._latest_intact()
        step = gather_ints(self.mesh.cpu_group, [step])[0][0]
        return None if step < 0 else self.folder / files.folder_name(step)

    def set_back(self, path: Path, resume: str) -> None:
        """Let `last` name a checkpoint that was asked for, so that a restart goes on from there."""
        if resume != "latest-intact" and not resume.startswith("step:"):
            return
        with self._together():
            if self.mesh.rank == 0:
                set_back(self.folder, path, resume)

    def _latest_intact(self) -> Path | None:
        """The newest checkpoint whose every byte is as it was written; the ranks share the reading."""
        steps = [files.step_of(path) for path in candidates(self.folder)] if self.mesh.rank == 0 else []
        (count, *_), *_ = gather_ints(self.mesh.cpu_group, [len(steps)])
        problems = []
        for number in range(count):
            step = gather_ints(self.mesh.cpu_group, [steps[number] if steps else -1])[0][0]
            path = self.folder / files.folder_name(step)
            problem = self._first_text(check_share(path, self.mesh.rank, self.mesh.world_size))
            if not problem:
                return path
            problems.append(problem)
            if self.mesh.rank == 0:
                _log.warning("resume=latest-intact skips %s: %s", path.name, problem)
        if problems:
            raise ValueError(f"no checkpoint in {self.folder} is intact: {'; '.join(problems)}")
        return None

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Fill model and optimizer from a checkpoint that was saved on any mesh; gives its `state`.

        Every checksum is verified first, and every key, shape and dtype. Where one does not fit, all ranks
        raise ValueError and nothing is changed. The learning rate and the like are the caller's to set.
        """
        path = Path(path)
        with self._reading(path):
            # Each rank reads its share of the files in full, and all agree on what they found.
            index, saved = self._open(path, lambda number, _: number % self.mesh.world_size == self.mesh.rank)
            state: dict[Tensor, dict[str, Any]] = {}
            with self._together():
                base = saved.get("base")
                self._check_base(path, base)
                tensors, prefixes = model_tensors(model, frozen=base is None), ["model."]
                if optimizer is not None:
                    if saved["optimizer"] is None:
                        raise ValueError(f"{path} has no optimizer state")
                    state = optimizer_state_for(model, optimizer, index, saved["optimizer"])
                    tensors |= optimizer_tensors(model, optimizer, state)[0]
                    prefixes.append("optimizer.")
                check_tensors(tensors, of_ours(index, model), prefixes)
            with self._together():
                fill_tensors(tensors, path, index)
            if optimizer is not None:
                optimizer.state.clear()
                optimizer.state.update(state)
        result: dict[str, Any] = saved["state"]
        return result

    def state(self, path: Path) -> dict[str, Any]:
        """The `state` of a checkpoint alone; its tensors are not read."""
        with self._reading(path):
            found: dict[str, Any] = self._open(path, lambda *_: False)[1]["state"]
        return found

    def _stage(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: dict[str, Any],
    ) -> tuple[list[bytes | memoryview], str]:
        """Copy all parts of this rank to host memory; gives its file and the text of `state.json`."""
        check_json(state, "state")
        tensors, record = model_tensors(model, frozen=self.base is None, copies=False), None
        if optimizer is not None:
            more, record = optimizer_tensors(model, optimizer, optimizer.state, copies=False)
            tensors |= more
        of_stage = self.mesh.world_size // self.mesh.pp  # ranks that have the same tensors
        staged = stage_tensors(tensors, self._memory, self.mesh.rank % of_stage, of_stage)
        world_size = self.mesh.world_size
        text = json.dumps({"state": state, "optimizer": record, "base": self.base, "world_size": world_size})
        return [staged.header, staged.payload], text

    def _check_base(self, path: Path, saved: str | None) -> None:
        """What was saved without its frozen parameters is worth nothing on top of others."""
        if saved is not None and saved != self.base:
            raise ValueError(
                f"{path} holds adapters trained on the base weights {saved} but the model has "
                f"{self.base or 'unknown'}; use the checkpoint that the run started from"
            )

    def _make_folder(self, name: str) -> OSError | None:
        fresh = self.folder / f"{name}.tmp"
        try:
            files.clear(fresh)
            files.clear(self.folder / f"{name}.next")
            # Later a missing folder is an error: where a disk was unmounted, its mount point must stay empty.
            fresh.mkdir(parents=not self._made_folder)
        except OSError as problem:
            return problem
        self._made_folder = True
        return None

    def _advance(self, job: Job) -> None:
        """Ask all ranks how far they are; when all are done, go on to publishing, or end the job."""
        status, record, problem = _RUNNING, FileRecord(0, 0), None
        if job.work.done():
            problem = job.work.exception()
            status = _DONE if problem is None else _FAILED if isinstance(problem, OSError) else _BROKEN
            record = job.work.result() if problem is None else record
        found = gather_ints(self.mesh.cpu_group, [status, *record])
        statuses = [row[0] for row in found]
        if _RUNNING in statuses:
            return
        if max(statuses) >= _FAILED:
            self._job = None
            reason = self._first_text("" if problem is None else f"{type(problem).__name__}: {problem}")
            if self.mesh.rank == 0:
                files.discard(self.folder / f"{job.name}.tmp")
                files.remove(self.folder / f"{job.name}.next")
            self._report(job.step, reason, fatal=_BROKEN in statuses)
        elif job.phase == "writing":
            job.phase = "publishing"
            written = {rank_file(rank): FileRecord(*row[1:]) for rank, row in enumerate(found)}
            if self.mesh.rank == 0:
                job.work = self._thread.submit(self._publish, job, written)
        else:
            self._job = None
            path = self.folder / job.name
            self._events.append(Published(job.step, path, time.monotonic() - job.start))

    def _publish(self, job: Job, written: dict[str, FileRecord]) -> FileRecord:
        """Rank 0, in the thread."""
        publish_written(self.folder, job.name, written)
        files.retain(self.folder, self.keep, self._loading)
        return FileRecord(0, 0)

    def _report(self, step: int, reason: str, fatal: bool) -> None:
        if fatal or self.on_error == "stop":
            raise CheckpointError(f"the checkpoint of step {step} could not be written: {reason}")
        self._events.append(Failed(step, reason))

    def _take_events(self) -> list[Published | Failed]:
        events, self._events = self._events, []
        return events

    def _open(self, path: Path, reads: Callable[[int, str], bool]) -> tuple[Index, dict[str, Any]]:
        """Index and state of a complete checkpoint; `reads` says which data files this rank reads in full."""
        with self._together():
            try:
                expected = files.read_manifest(path)
                for number, name in enumerate(sorted(expected)):
                    whole = name.endswith(".json") or reads(number, name)
                    files.check_file(path / name, expected[name], whole)
            except ValueError as error:
                raise ValueError(f"{error}; {self.way_out}") from None
            index: Index = json.loads((path / "index.json").read_bytes())
            check_index(index)
            saved: dict[str, Any] = json.loads((path / "state.json").read_bytes())
        return index, saved

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        self._loading.add(path.name)
        try:
            yield
        finally:
            self._loading.discard(path.name)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Errors of one rank are raised by all."""
        error = None
        try:
            yield
        except Exception as problem:
            error = problem
        agree(self.mesh.cpu_group, error)

    def _first_text(self, text: str) -> str:
        """The first rank's text that is not empty, on every rank."""
        padded = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        for rank, row in enumerate(gather_ints(self.mesh.cpu_group, list(padded))):
            if found := bytes(row).rstrip(b"\0").decode(errors="replace"):
                return f"rank {rank}: {found}"
        return ""
