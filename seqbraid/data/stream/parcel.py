"""How an object with large tensors goes from one process to another without being copied through a pipe.

Tensors and arrays travel outside the pickle. Many bytes are written into an anonymous file in memory, whose
descriptor is sent and which the receiver maps and closes. So no descriptor stays open, nothing is left behind
when a process is killed, and the size of /dev/shm, small in containers, does not matter.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 1 << 16
"""Up to so many bytes a copy through the pipe is cheaper than a mapping."""
ALIGNMENT = 64


class _Pickler(pickle.Pickler):
    """Pickles the bytes of CPU tensors out of band, as pickle does with numpy arrays by itself."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided:
            return NotImplemented
        whole = obj.detach().resolve_conj().resolve_neg().contiguous()
        # A single number is contiguous whatever its stride, but bytes are seen at a stride of 1 alone.
        data = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(data.numpy().data), obj.dtype, tuple(obj.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:  # an empty buffer is refused
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


class Parcel:
    """An object, pickled and ready to be sent."""

    def __init__(self, obj: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        text = io.BytesIO()
        _Pickler(text, protocol=5, buffer_callback=buffers.append).dump(obj)
        self._text = text.getvalue()
        self._views = [buffer.raw() for buffer in buffers]

    def send(self, pipe: Connection) -> None:
        """Send to whoever calls `receive` at the other end of a duplex pipe."""
        places, size = _places([view.nbytes for view in self._views])
        mapped = size > SMALL and hasattr(os, "memfd_create")
        pipe.send((self._text, [view.nbytes for view in self._views], mapped))
        if not mapped:
            data = bytearray(size)
            for place, view in zip(places, self._views, strict=True):
                data[place : place + view.nbytes] = view
            if size:
                pipe.send_bytes(data)
            return
        descriptor = os.memfd_create("seqbraid")
        try:
            os.ftruncate(descriptor, size)
            with mmap.mmap(descriptor, size) as memory:
                for place, view in zip(places, self._views, strict=True):
                    memory[place : place + view.nbytes] = view
            send_handle(pipe, descriptor, None)
        finally:
            os.close(descriptor)


def receive(pipe: Connection) -> Any:
    """The object that was sent; its tensors are the receiver's own, to be written to as it likes."""
    text, sizes, mapped = pipe.recv()
    places, size = _places(sizes)
    if mapped:
        descriptor = recv_handle(pipe)
        try:  # torch maps a file without keeping it open, which Python's mmap does not
            path = f"/proc/self/fd/{descriptor}"
            data = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()
        finally:
            os.close(descriptor)
    else:
        data = np.frombuffer(bytearray(pipe.recv_bytes()) if size else b"", dtype=np.uint8)
    return pickle.loads(text, buffers=[data[p : p + n] for p, n in zip(places, sizes, strict=True)])


def _places(sizes: list[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes begin, aligned, and the size of all."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return places, end
