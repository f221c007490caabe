"""Saving through torch's distributed checkpoint (DCP) into host memory, which a thread may then write.

DCP's own formats did not serve: the default one keeps its metadata as a pickle; the safetensors one has no
checksums and builds each file a second time in memory; and both plan over the training's process group, with
pickled plans. Here each rank plans alone, since a DTensor knows which part of it every rank holds.
"""

from __future__ import annotations

import json
import weakref
import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from .index import DTYPE_NAMES
from .read import alone


class AlonePlanner(DefaultSavePlanner):
    """Plans what this rank writes without asking the others: of equal copies exactly one is written."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.rank = rank
        self.world_size = world_size

    def create_local_plan(self) -> SavePlan:
        """DCP's plan, less what other ranks write."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[item for item in plan.items if self._is_ours(item)])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Nothing to agree on; that the parts of all ranks make whole tensors is checked by `make_index`."""
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata

    def _is_ours(self, item: WriteItem) -> bool:
        key = item.index.fqn
        tensor = self.state_dict[key]
        if key.startswith("rank."):
            return True
        # Copies are spread by name, so that no rank writes all of them.
        turn = zlib.crc32(key.encode())
        if not isinstance(tensor, DTensor) or tensor.numel() == 0:
            return turn % self.world_size == self.rank
        assert item.tensor_data is not None and item.tensor_data.chunk is not None
        if 0 in item.tensor_data.chunk.sizes:  # the rows of a short tensor do not reach every rank
            return False
        place, copies = 0, 1
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(tensor.placements):
            assert not placement.is_partial(), f"{key} is a partial sum"
            if placement.is_replicate():
                place = place * tensor.device_mesh.size(axis) + coordinate[axis]
                copies *= tensor.device_mesh.size(axis)
        return turn % copies == place


class StagingMemory:
    """Bytes on the host that live as long as this object, page-locked where tensors come from a GPU."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., StagingMemory] | None = None

    def reserve(self, size: int, for_gpu: bool) -> Tensor:
        """The first `size` bytes; what was there is lost."""
        if self._bytes.numel() < size:
            if self._unpin is not None:
                self._unpin()
            self._bytes = torch.empty(0, dtype=torch.uint8)  # never hold the old and the new one
            self._bytes = torch.empty(size, dtype=torch.uint8)
            # Torch's own pinned memory is rounded up to a power of two, which may be twice the model.
            if for_gpu and int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), size, 0)) == 0:
                self._unpin = weakref.finalize(self, _unregister, self._bytes)
        return self._bytes[:size]


def _unregister(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class StageWriter(StorageWriter):
    """Where DCP puts this rank's parts: host memory in the layout of a safetensors file.

    After the save, `header` and `payload` are the file.
    """

    def __init__(self, memory: StagingMemory) -> None:
        self.memory = memory
        self.header = b""
        self.payload: memoryview = memoryview(b"")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy the parts; when this returns, the tensors may change."""
        parts: list[tuple[WriteItem, Tensor]] = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor), f"{item.index.fqn} is not a tensor"
            parts.append((item, tensor.detach()))
        # Large elements first, so that each part starts at a multiple of its element size.
        parts.sort(key=lambda part: (-part[1].element_size(), part[0].index.fqn))
        header: dict[str, Any] = {}
        places: dict[str, Any] = {}
        spans = []
        end = 0
        for item, tensor in parts:
            start, end = end, end + tensor.nbytes
            spans.append((start, end))
            assert item.tensor_data is not None and item.tensor_data.chunk is not None
            key, chunk = item.index.fqn, item.tensor_data.chunk
            assert tensor.shape == chunk.sizes, f"{key}: {tensor.shape} is not {chunk.sizes}"
            header[key] = {
                "dtype": _dtype_name(key, tensor.dtype),
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            places[key] = {"shape": list(item.tensor_data.size), "offsets": list(chunk.offsets)}
        header["__metadata__"] = {"format": "pt", "places": json.dumps(places, separators=(",", ":"))}
        devices = {tensor.device for _, tensor in parts if tensor.is_cuda}
        memory = self.memory.reserve(end, for_gpu=bool(devices))
        for (_, tensor), (start, stop) in zip(parts, spans, strict=True):
            memory[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.payload = memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy 2 has no types for this
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, tensor.nbytes, None) for item, tensor in parts])
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget: one object per save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The index is made when all ranks have written."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """We are never chosen by a path."""
        return False


def _dtype_name(key: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{key} is {dtype}; a checkpoint holds {', '.join(DTYPE_NAMES.values())}")
    return DTYPE_NAMES[dtype]


def stage_tensors(
    tensors: dict[str, Tensor], memory: StagingMemory, rank: int, world_size: int
) -> StageWriter:
    """Copy this rank's parts of all tensors to host memory."""
    writer = StageWriter(memory)
    with alone():
        save(tensors, storage_writer=writer, planner=AlonePlanner(rank, world_size), no_dist=True)
    return writer
