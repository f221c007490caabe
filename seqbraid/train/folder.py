"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(path: Path, replaces: str | None = None) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written; nothing is left of it on an error.

    A folder of that name may be there only if it is empty, or if it has a file called `replaces`: then the
    new one takes its place.
    """
    old = path.is_dir() and replaces is not None and (path / replaces).is_file()
    if path.exists() and not old and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists already; give a new folder, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    target.mkdir()
    try:
        yield target
        for file in target.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        if old:
            aside = path.with_name(f"{path.name}.old-{os.getpid()}")
            os.replace(path, aside)
            os.replace(target, path)
            shutil.rmtree(aside)
        else:
            os.replace(target, path)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
