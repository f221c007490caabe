"""A group of ranks and what they can do together. A group of one takes the same path and sends nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave them new names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate; `rank` is this process's place among them.

    `sent` counts the bytes that leave this rank, by the name of the exchange; what a rank keeps
    is not counted.
    """

    handle: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sent: Counter[str] = field(default_factory=Counter, repr=False)

    @staticmethod
    def of(handle: dist.ProcessGroup | None) -> Group:
        """The group of a process group; of this process alone where there is none."""
        return (
            Group() if handle is None else Group(handle, dist.get_rank(handle), dist.get_world_size(handle))
        )

    def through_host(self, x: Tensor) -> bool:
        """Whether a tensor must visit the host to be exchanged: gloo sends none point to point from a GPU."""
        return x.is_cuda and self.handle is not None and "nccl" not in dist.get_backend(self.handle)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int], name: str) -> Tensor:
        """Send `send[i]` elements of the flat `x` to rank i; get `receive[i]` from it, in rank order."""
        if self.size == 1:
            return x
        self.sent[name] += (sum(send) - send[self.rank]) * x.element_size()
        out = x.new_empty(sum(receive))
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=self.handle)
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the group, in a new tensor."""
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def maximum(self, x: Tensor) -> Tensor:
        """The largest of each number over the group, in a new tensor."""
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def _all_reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return x
        total = x.clone()
        dist.all_reduce(total, operation, group=self.handle)
        return total

    def all_gather_rows(self, x: Tensor, name: str) -> Tensor:
        """The rows `[…, n · size, D]` of all, one rank behind the other, given `[…, n, D]` of each."""
        self.sent[name] += (self.size - 1) * x.nbytes
        out = x.new_empty(*x.shape[:-2], x.shape[-2] * self.size, x.shape[-1])
        _all_gather(out.view(-1, x.shape[-1]), x.contiguous().view(-1, x.shape[-1]), group=self.handle)
        return out

    def reduce_scatter_rows(self, x: Tensor, name: str) -> Tensor:
        """This rank's rows `[…, n, D]` of the sum over the group of `[…, n · size, D]`."""
        own = x.shape[-2] // self.size
        self.sent[name] += (self.size - 1) * (x.nbytes // self.size)
        if self.through_host(x):  # gloo scatters no sums from a GPU
            return self.all_reduce(x).narrow(-2, self.rank * own, own).clone()
        out = x.new_empty(*x.shape[:-2], own, x.shape[-1])
        _reduce_scatter(out.view(-1, x.shape[-1]), x.contiguous().view(-1, x.shape[-1]), group=self.handle)
        return out

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Everybody's tensor, all of one shape, in rank order."""
        if self.size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.handle)
        return parts

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], name: str
    ) -> Transfer:
        """Start sending tensors to some ranks and receiving from others; wait before using either."""
        transfer = Transfer()
        operations: list[dist.P2POp] = []
        for rank, tensor in sends:
            self.sent[name] += tensor.numel() * tensor.element_size()
            # Kept until the wait, so that the memory is not handed out while it is still being read.
            transfer.kept.append(tensor.cpu() if self.through_host(tensor) else tensor.contiguous())
            operations.append(dist.P2POp(dist.isend, transfer.kept[-1], group=self.handle, group_peer=rank))
        for rank, tensor in receives:
            arriving = tensor
            if self.through_host(tensor):
                arriving = torch.empty_like(tensor, device="cpu")
                transfer.arriving.append((tensor, arriving))
            operations.append(dist.P2POp(dist.irecv, arriving, group=self.handle, group_peer=rank))
        if operations:
            transfer.works = dist.batch_isend_irecv(operations)
        return transfer


@dataclass
class Transfer:
    """An exchange in flight."""

    kept: list[Tensor] = field(default_factory=list)
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)

    def wait(self) -> None:
        """Until everything has arrived."""
        for work in self.works:
            work.wait()
        for tensor, arrived in self.arriving:
            tensor.copy_(arrived)
