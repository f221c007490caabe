"""What may race in a kernel, by the addresses that its programs read and write in the interpreter.

Programs run side by side on a GPU, and so do the warps of one. So no program may touch what another one
writes; and what a program has read it may write only in the same shape, one number per thread or more: of a
smaller tensor several warps have copies, and one may read what another has already written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

THREADS = 128
"""Of a program, at Triton's default of four warps."""


class Access(NamedTuple):
    """A load or store of a program."""

    program: tuple[int, int, int]
    writes: bool
    shape: tuple[int, ...]
    addresses: Any


@contextmanager
def no_races() -> Iterator[list[str]]:
    """Fail where a kernel that is launched within may race; gives the names of those that were launched."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    launch = GridExecutor.__call__
    seen: list[Access] = []
    launched: list[str] = []

    def note(builder: Any, pointers: Any, mask: Any, writes: bool) -> None:
        real = np.broadcast_to(mask.data, pointers.data.shape)
        seen.append(Access(builder.grid_idx, writes, pointers.data.shape, pointers.data[real].ravel()))

    def noted_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        note(self, ptrs, mask, False)
        return load(self, ptrs, mask, *args)

    def noted_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        note(self, ptrs, mask, True)
        return store(self, ptrs, value, mask, *args)

    def checked_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.clear()
        launch(self, *args, **kwargs)
        launched.append(self.fn.__name__)
        found = _race(seen)
        assert found is None, f"{self.fn.__name__}: {found}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", noted_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", noted_store)
        patch.setattr(GridExecutor, "__call__", checked_launch)
        yield launched


def _race(seen: list[Access]) -> str | None:
    writers: dict[int, tuple[int, int, int]] = {}
    for access in seen:
        if access.writes:
            for address in access.addresses.tolist():
                if writers.setdefault(address, access.program) != access.program:
                    return f"programs {writers[address]} and {access.program} write the same number"
    read: dict[int, tuple[int, ...]] = {}
    for access in seen:
        for address in access.addresses.tolist():
            if access.writes:
                size = int(np.prod(access.shape))
                if address in read and (read[address] != access.shape or size < THREADS):
                    return f"{access.program} writes {access.shape} where it has read {read[address]}"
            elif address in writers:
                if writers[address] != access.program:
                    return f"program {access.program} reads what {writers[address]} writes"
                read[address] = access.shape
    return None
