"""What stock models make of samples: measured once per test run by the test process, read by all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch


@lru_cache(maxsize=1)
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="references")


def stored(make: Callable[[], Any], *key: Any) -> str:
    """The file with what `make` gives, which is called where nobody has asked for this key yet.

    The key says all that decides: a second test with the same one, in whichever file, gets the first one's.
    """
    path = Path(_folder().name) / hashlib.sha256(repr(key).encode()).hexdigest()
    if not path.exists():
        torch.save(make(), path)
    return str(path)
