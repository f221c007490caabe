"""Loading through torch's distributed checkpoint (DCP), which finds the saved parts that a rank needs."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .index import DTYPES, Index


class FolderReader(StorageReader):
    """Reads the parts that a rank needs from a published folder."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in DCP's terms."""
        tensors: dict[str, Any] = {}
        files: dict[MetadataIndex, str] = {}
        for key, entry in self.index.items():
            chunks = []
            for file, offsets, sizes in entry["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                files[MetadataIndex(key, torch.Size(offsets))] = file
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=files)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep which file has which part."""
        self.files = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors, file by file; pages of a file that hold nothing for us are not read."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.files[item.storage_index]].append(item)
        for file, items in by_file.items():
            with safe_open(self.folder / file, framework="pt") as tensors:
                for item in items:
                    part = tensors.get_tensor(item.storage_index.fqn)
                    window = [
                        slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)
                    ]
                    target = planner.resolve_tensor(item).detach()
                    source = part[tuple(window)]
                    assert (target.shape, target.dtype) == (source.shape, source.dtype), item
                    target.copy_(source)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget: one object per load."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """We are never chosen by a path."""
        return False


def fill_tensors(tensors: dict[str, Tensor], folder: Path, index: Index) -> None:
    """Read this rank's parts of all tensors into them."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with alone():
        load(dict(tensors), storage_reader=FolderReader(folder, index), planner=planner, no_dist=True)


@contextmanager
def alone() -> Iterator[None]:
    """DCP on this rank alone: without its warning that this is so, and with the error that it wraps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as wrapped:
            error, _ = next(iter(wrapped.failures.values()))
            raise error from None
