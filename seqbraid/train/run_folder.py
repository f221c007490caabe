"""A run's folder: the same for all ranks, of one run at a time, and with nothing else in it."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..comm.consensus import gather_objects, raised_by_all
from ..mesh import Mesh
from .checkpoint.files import MANIFEST
from .config import TrainConfig, as_dict
from .config_file import load_config, to_yaml
from .ending import forget_ending
from .lock import LOCK_FILE, Lock
from .log import Sinks, open_sinks
from .setup import load_model_processor

MARKER = ".seqbraid"
"""A hidden file that says that a folder is of a run."""
PACKAGES = ("seqbraid", "torch", "transformers")
SEEN_S = 10.0
"""How long another machine may take to see a new file of a shared file system."""


class RunFolder:
    """Taken by all ranks together; the first one holds its lock until it is released."""

    def __init__(self, out: str, mesh: Mesh) -> None:
        self.path, self.mesh = Path(out), mesh
        self.lock: Lock | None = None
        with raised_by_all(mesh.cpu_group):
            if mesh.rank == 0:
                self.lock = _take(self.path)
                weakref.finalize(self, self.lock.release)
        try:
            self._probe()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let another run have it."""
        if self.lock is not None:
            self.lock.release()

    def check(self) -> None:
        """ValueError on every rank if another run has taken it over."""
        with raised_by_all(self.mesh.cpu_group):
            if self.lock is not None:
                self.lock.check()

    def _probe(self) -> None:
        """Every rank must see what the first has written, and be able to write."""
        token, host = gather_objects(
            self.mesh.cpu_group, (self.lock.token if self.lock else "", socket.gethostname())
        )[0]
        with raised_by_all(self.mesh.cpu_group):
            end = time.monotonic() + SEEN_S
            while not self._sees(token):
                if time.monotonic() > end:
                    raise ValueError(
                        f"rank {self.mesh.rank} on {socket.gethostname()} cannot see in "
                        f"out={str(self.path)!r} what rank 0 on {host} has written to its own; out must "
                        "be one folder shared by all ranks"
                    )
                time.sleep(0.1)
            probe = self.path / f".probe-{token}-{self.mesh.rank}"
            try:
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise ValueError(
                    f"rank {self.mesh.rank} cannot write to out={str(self.path)!r}: {error}"
                ) from None

    def _sees(self, token: str) -> bool:
        try:
            return token in (self.path / LOCK_FILE).read_text()
        except OSError:
            return False


def check_out(folder: Path) -> None:
    """ValueError where no run can be written into a folder, as far as can be known without writing."""
    # There, or the nearest folder above it that is: the run makes the others.
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        kind = "a broken link" if there.is_symlink() else "a file"
        raise ValueError(f"out={str(folder)!r} cannot be used: {there} is {kind}, not a folder; give another")
    try:
        foreign = _foreign(folder) if there == folder else []
    except OSError as error:
        raise _unusable(folder, error) from None
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ValueError(
            f"out={str(folder)!r} holds {', '.join(foreign[:3])}{more} and is not a run of seqbraid; give "
            "a new or an empty folder, so that your files are not overwritten"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unusable(folder, PermissionError(f"{there} cannot be written to"))


def write_description(folder: Path, config: TrainConfig, model_config: Any, mesh: Mesh) -> None:
    """Write what the folder is a run of; all ranks call it."""
    with raised_by_all(mesh.cpu_group):
        if mesh.rank == 0:
            _write_config(folder, config)
            model_config.save_pretrained(folder / "model")
            load_model_processor(config.model, config.data.chat_template).save_pretrained(folder / "model")


def versions() -> dict[str, str]:
    """Of the packages that a model comes from."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def run_sinks(folder: Path, config: TrainConfig, mesh: Mesh, first: int) -> Iterator[Sinks]:
    """What the run says, from step `first` on: on the first rank to its log and the sinks of its
    configuration, elsewhere to nobody.
    """
    log, sinks = config.log, Sinks()
    with raised_by_all(mesh.cpu_group):
        if mesh.rank == 0:
            steps, keeps = config.train.steps, config.checkpoint.on_error == "continue"
            sinks = open_sinks(
                folder, log.sinks, as_dict(config), first, total_steps=steps, every=log.every, keeps=keeps
            )
    try:
        yield sinks
    finally:
        sinks.close()


def _write_config(folder: Path, config: TrainConfig) -> None:
    """`config.yaml` of a run; one that says something else is moved aside, not written over."""
    path, text = folder / "config.yaml", to_yaml(config)
    if path.exists() and not _says(path, config, text):
        number = 1
        while (aside := folder / f"config.{number}.yaml").exists():
            number += 1
        path.rename(aside)
    if not path.exists():
        fresh = folder / "config.yaml.tmp"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)


def _says(path: Path, config: TrainConfig, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text or load_config(path) == config
    except (OSError, ValueError):
        return False


def _take(folder: Path) -> Lock:
    check_out(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
        lock = Lock(folder)
        forget_ending(folder)
        return lock
    except OSError as error:
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"out={str(folder)!r} cannot be used: {error}; give a writable folder")


def _foreign(folder: Path) -> list[str]:
    """What is in a folder that is not of a run; hidden files and empty folders are nobody's."""
    if (folder / MARKER).exists() or any(folder.glob(f"checkpoints/step-*/{MANIFEST}")):
        return []
    return sorted(
        path.name
        for path in folder.iterdir()
        if not path.name.startswith(".") and not (path.is_dir() and not any(path.iterdir()))
    )
