"""What checkpoints keep, in host memory: copied out while the layer is computed, fetched one layer ahead.

On a GPU the copies run on a stream of their own, to and from pinned memory. The original of a layer is let go
two layers later, when its copy is awaited *on the stream*: the memory is then free for the very next kernel,
however far the host has run ahead. The last two layers are still on the device when the backward begins. On a
CPU the same steps are plain copies.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from ..models.tensor_parts import own_part

SMALLEST = 1 << 12
"""Tensors of fewer bytes stay where they are."""

IN_FLIGHT = 2
"""Layers whose originals may still be on the device in the forward."""


class LayerMemory:
    """Where one pass through a layer puts what it keeps: on the device, as it is."""

    def pack(self, x: Tensor) -> Any:
        """What to keep of a tensor."""
        return x

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""
        assert isinstance(packed, Tensor)
        return packed


class HostMemory:
    """Host memory for a stack of layers, which run in the order of their index."""

    def __init__(self) -> None:
        self.in_flight: deque[_LayerInHost] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def open(self, index: int, layer: nn.Module) -> LayerMemory:
        """Memory for a pass through a layer. The first of the stack begins a new pass through all of them."""
        while len(self.in_flight) >= IN_FLIGHT:
            self.in_flight.popleft().let_go()
        before = self.in_flight[-1] if self.in_flight and index else None
        self.in_flight.append(_LayerInHost(self, layer, before))
        return self.in_flight[-1]

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that copies from and to a GPU."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _LayerInHost(LayerMemory):
    """The tensors of one pass through one layer. They keep it alive, not the other way around."""

    def __init__(self, host: HostMemory, layer: nn.Module, before: _LayerInHost | None) -> None:
        self.host = host
        # Those of the layer are there in the backward anyway, or are gathered for it.
        held = (own_part(p.detach()) for p in layer.parameters(recurse=True))
        self.parameters = {x.untyped_storage().data_ptr() for x in held}
        self.before = None if before is None else ref(before)
        self.saved: WeakValueDictionary[tuple[Any, ...], _Saved] = WeakValueDictionary()
        self.originals: list[Tensor] = []
        self.copied: torch.cuda.Event | None = None

    def pack(self, x: Tensor) -> Any:
        place = x.untyped_storage().data_ptr()
        if x.nbytes < SMALLEST or place in self.parameters:
            return x
        # While we hold the original nobody else can be in its place.
        key = (place, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        found = self.saved.get(key)
        if found is None:
            found = self.saved[key] = _Saved(self, x.detach())
            self.originals.append(found.original)
            if x.is_cuda:
                self.copied = self.host.stream(x.device).record_event()
        return found

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Saved):
            return super().unpack(packed)
        self._settle()
        self.fetch()
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()
        return packed.take()

    def fetch(self) -> None:
        """Start bringing back what is not on the device."""
        for saved in list(self.saved.values()):
            saved.fetch()

    def let_go(self) -> None:
        """Free the originals, after their copies in the order of the stream."""
        self._settle()
        for saved in list(self.saved.values()):
            saved.on_device = None

    def _settle(self) -> None:
        """From here on nobody reads the originals on our behalf."""
        if self.copied is not None:
            self.copied.wait()
            self.copied = None
        self.originals.clear()
        if self in self.host.in_flight:
            self.host.in_flight.remove(self)


class _Saved:
    """One tensor: its copy in host memory and, before it is let go and after it is fetched, on the device."""

    def __init__(self, layer: _LayerInHost, original: Tensor) -> None:
        self.layer = layer
        self.device = original.device
        self.in_host = torch.empty_like(original, device="cpu", pin_memory=original.is_cuda)
        self.on_device: Tensor | None = original
        self.fetched: torch.cuda.Event | None = None
        self._copy(original, self.in_host)

    @property
    def original(self) -> Tensor:
        assert self.on_device is not None
        return self.on_device

    def fetch(self) -> None:
        """Start bringing the tensor back."""
        if self.on_device is not None:
            return
        if self.device.type != "cuda":
            self.on_device = self.in_host
            return
        self.on_device = torch.empty_like(self.in_host, device=self.device)
        self.fetched = self._copy(self.in_host, self.on_device)
        # Where the graph is thrown away before the copy is there, the memory waits for it.
        self.on_device.record_stream(self.layer.host.stream(self.device))

    def take(self) -> Tensor:
        """The tensor on its device, for kernels of the current stream."""
        if self.fetched is not None:
            self.fetched.wait()
            self.fetched = None
        return self.original

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            target.copy_(source)
            return None
        stream = self.layer.host.stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()
