"""Pipeline parallelism: the micro-batches of a step on their way through stages on other ranks.

The schedules are torch's (`torch.distributed.pipelining`). What is ours: a stage is one call of the braided
model, so that FSDP, tensor, expert and sequence parallelism work in it as they do without stages; each
micro-batch travels with the tokens that it has, not padded to a common length; and empty micro-batches fill
up what a schedule wants, in front of the others: they compute nothing and add an exact zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from ..comm.consensus import agree, gather_floats, gather_ints
from ..models.batch import PackedBatch
from ..models.braided import BraidedModel
from ..models.output import LocalLoss
from ..models.parts import tensors_by_name
from ..models.router import stock_num_experts
from ..models.running import normal_tensors
from ..models.stage import Elsewhere, Stage, StageCall, StageTimes
from ..models.tensor_parts import whole_tensor
from .stage_clock import StageClock
from .tied import TiedCopy


def num_chunks(num_batches: int, pp: int, num_stages: int) -> int:
    """How many micro-batches a schedule is given, empty ones included.

    1F1B takes at least as many as stages; interleaved, in rounds of at least `pp`, whole rounds.

    >>> [num_chunks(n, 2, 2) for n in (1, 4, 7)], [num_chunks(n, 2, 4) for n in (1, 4, 7)]
    ([2, 4, 7], [1, 4, 8])
    """
    if num_stages == pp:
        return max(num_batches, num_stages)
    while num_batches % max(1, num_batches // pp):
        num_batches += 1
    return num_batches


@dataclass
class Work:
    """A step that is running."""

    batches: list[PackedBatch | None]
    """None for an empty micro-batch."""
    call: Callable[[PackedBatch, StageCall], Any]
    after: Callable[[int], None] | None
    router: Tensor | None
    """What the first stage adds the sums of its routers to."""
    with_mtp: bool
    """Whether embeddings travel along, for multi-token prediction on the last stage."""
    found: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None
    """What has gone wrong on this rank: from there on it sends zeros, and computes nothing."""


class StagePipeline:
    """Runs a model of which this rank has some stages; see `models.stage.Pipeline`."""

    def __init__(
        self, model: BraidedModel, stages: Sequence[Stage], dtype: torch.dtype, is_tied: bool
    ) -> None:
        self.model, self.stages, self.dtype = model, tuple(stages), dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.width = int(model.parts.config.hidden_size)
        self.group = model.mesh.process_group("pp")
        self.tied: TiedCopy | None = None
        if is_tied:
            for module in (model.parts.embedding, model.parts.head):
                if not isinstance(module, Elsewhere):
                    self.tied = TiedCopy(module, model.groups["pp"])
        self.clock = StageClock()
        self.moves: Callable[[], None] = lambda: None
        self.work: Work | None = None
        self._schedules: dict[tuple[int, bool, bool, bool], Any] = {}

    def run(
        self,
        batches: Sequence[PackedBatch],
        call: Callable[[PackedBatch, StageCall], Any],
        after: Callable[[int], None] | None = None,
        *,
        with_router: bool = False,
        with_mtp: bool = False,
    ) -> list[Any]:
        """See `models.stage.Pipeline`."""
        num_stages, pp = self.stages[0].num_stages, self.model.mesh.pp
        chunks = num_chunks(len(batches), pp, num_stages)
        empty = [None] * (chunks - len(batches))
        router = self._no_sums() if with_router else None
        work = self.work = Work([*empty, *batches], call, after, router, with_mtp)
        has_backward = torch.is_grad_enabled()
        schedule = self._schedule(chunks, has_backward, with_router, with_mtp)
        index = torch.arange(chunks)
        tied = self.tied if has_backward else None
        if tied is not None:
            tied.begin()
        is_first, is_last = (any(getattr(s, name) for s in self.stages) for name in ("is_first", "is_last"))
        try:
            with normal_tensors(), self.clock.step(self.model.device):
                (schedule.step if has_backward else schedule.eval)(
                    *([index] if is_first else []),
                    target=index if is_last else None,
                    return_outputs=False,
                    index=index,
                )
        except RuntimeError as error:  # in which torch wraps what went wrong in a stage
            self._schedules.clear()  # stopped halfway
            raise error.__cause__ or error from None
        finally:
            self.work = None
        if not has_backward or work.error is not None:
            self.model.free()
        agree(self.model.mesh.cpu_group, work.error, alike={"the call": "the stages of a step"})
        if tied is not None:
            tied.finish()
            if after is not None:
                after(len(batches))
        return [work.found[i] for i in sorted(work.found)]

    def times(self) -> StageTimes:
        """See `models.stage.Pipeline`."""
        mesh, num_stages = self.model.mesh, self.stages[0].num_stages
        found = gather_floats(mesh.cpu_group, self.clock.seconds(num_stages))
        steps, *of_stages = (sum(of_ranks) for of_ranks in zip(*found, strict=True))
        waiting = max(0.0, 1.0 - sum(of_stages) / steps) if steps else 0.0
        return StageTimes(waiting, tuple(x * mesh.pp / mesh.world_size for x in of_stages))

    @torch.no_grad()
    def values(
        self,
        batch: PackedBatch,
        call: Callable[[PackedBatch, StageCall], Any],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """See `models.stage.Pipeline`."""
        device = self.model.device
        found = self.run([batch.to(device)], call)
        own = found[0] if found else [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        own = [x.contiguous() for x in own]
        last = (self.stages[0].num_stages - 1) % self.model.mesh.pp
        for x in own:
            dist.broadcast(x, group=self.group, group_src=last)
        return own

    @torch.no_grad()
    def full_state(self, trained_alone: bool) -> dict[str, Any]:
        """See `models.stage.Pipeline`: each stage gathers its tensors, and its first rank sends them."""
        mesh, state = self.model.mesh, dict[str, Any]()
        own, saved = tensors_by_name(self.model.model), self.model.structure.state_dict().keys()
        wanted = {
            name: x
            for name, x in tensors_by_name(self.model.structure).items()
            if name in saved and (x.requires_grad or not trained_alone)
        }
        # The first rank that has a tensor sends it: of a tied one, that of the embedding.
        has = gather_ints(mesh.cpu_group, [name in own for name in wanted])
        for number, (name, kind) in enumerate(wanted.items()):
            owner = next(rank for rank, of_rank in enumerate(has) if of_rank[number])
            full = whole_tensor(own[name]) if name in own else None
            if mesh.rank == 0 and full is None:
                full = torch.empty(kind.shape, dtype=kind.dtype)
                dist.recv(full, owner, group=mesh.cpu_group)
            elif mesh.rank == owner != 0:
                assert full is not None
                dist.send(full.cpu().contiguous(), 0, group=mesh.cpu_group)
            if mesh.rank == 0:
                assert full is not None
                state[name] = full.cpu()
        return state

    def forward(self, stage: Stage, number: int, received: tuple[Tensor, ...]) -> Any:
        """One micro-batch on one of this rank's stages: what travels on, or the loss."""
        work = self.work
        assert work is not None
        batch = work.batches[number]
        if batch is None:
            return self._nothing(stage, received)
        if work.error is None:
            try:
                return self._run(work, batch, stage, number, received)
            except Exception as error:  # others wait for what comes from here: they hear of it at the end
                work.error = error
        if stage.is_last:
            return torch.zeros((), dtype=self.wide, device=self.model.device)
        shape, device = (self.rows(number), self.width), self.model.device
        zeros = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(1 + work.with_mtp)]
        return (*zeros,) if work.router is None else (*zeros, torch.zeros_like(work.router))

    def _run(
        self, work: Work, batch: PackedBatch, stage: Stage, number: int, received: tuple[Tensor, ...]
    ) -> Any:
        found = work.call(batch, self._stage_call(stage, received, work))
        if not stage.is_last:
            embeds = None if found.embeds_1TD is None else found.embeds_1TD.squeeze(0)
            sent = found.hidden_1TD.squeeze(0), embeds, found.router_2E
            return tuple(self._checked(x) for x in sent if x is not None)
        loss = torch.zeros((), dtype=self.wide, device=self.model.device)
        if isinstance(found, LocalLoss):
            loss, found = found.loss, found._replace(loss=found.loss.detach())
        work.found[number] = found
        return loss

    def _stage_call(self, stage: Stage, received: tuple[Tensor, ...], work: Work) -> StageCall:
        """Hidden states, embeddings and sums of routers, of which the last two may not travel."""
        if stage.is_first:
            return StageCall(stage, None, work.router)
        hidden, *others = received
        embeds = others.pop(0) if work.with_mtp else None
        return StageCall(stage, hidden, others[0] if others else None, embeds)

    def rows(self, number: int) -> int:
        """The tokens that travel for a micro-batch: those of this rank between mixers and MLPs."""
        assert self.work is not None
        batch = self.work.batches[number]
        if batch is None:
            return 1
        return batch.layout.num_local_tokens // batch.plans.tp

    def _checked(self, x: Tensor) -> Tensor:
        if x.dtype not in (self.dtype, self.wide):
            raise ValueError(f"a stage gives {x.dtype}, but the next one waits for {self.dtype}")
        return x

    def _nothing(self, stage: Stage, received: tuple[Tensor, ...]) -> Any:
        if stage.is_last:
            return 0.0 * torch.stack([x.sum().to(self.wide) for x in received]).sum()
        if not stage.is_first:
            return tuple(x + 0.0 for x in received)
        assert self.work is not None
        learns, device = torch.is_grad_enabled(), self.model.device
        wide = [
            torch.zeros(1, self.width, dtype=self.dtype, device=device, requires_grad=learns)
            for _ in range(1 + self.work.with_mtp)
        ]
        return (*wide,) if self.work.router is None else (*wide, self.work.router)

    def _no_sums(self) -> Tensor:
        experts = stock_num_experts(self.model.parts.config)
        return torch.zeros(2, experts or 0, dtype=self.wide, device=self.model.device)

    def _schedule(self, chunks: int, has_backward: bool, with_router: bool, with_mtp: bool) -> Any:
        key = chunks, has_backward, with_router, with_mtp
        if key not in self._schedules:
            made = [_TorchStage(self, stage, with_router, with_mtp) for stage in self.stages]
            of_several = self.stages[0].num_stages > self.model.mesh.pp
            kind: Any = ScheduleInterleaved1F1B if of_several else Schedule1F1B
            own: Any = made if of_several else made[0]
            self._schedules[key] = kind(own, chunks, loss_fn=lambda loss, _: loss, scale_grads=False)
        return self._schedules[key]


class _Call(nn.Module):
    """What torch calls for a stage. It is no FSDP module, so that torch leaves FSDP to the model."""

    def __init__(self, pipeline: StagePipeline, stage: Stage) -> None:
        super().__init__()
        self.pipeline, self.stage = pipeline, stage

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        """The micro-batch with this number."""
        return self.pipeline.forward(self.stage, int(index), () if self.stage.is_first else received)


class _TorchStage(PipelineStage):
    """A stage whose micro-batches have as many tokens each as they have: what arrives gets its memory when it
    is asked for, and keeps it until its backward.
    """

    def __init__(self, pipeline: StagePipeline, stage: Stage, with_router: bool, with_mtp: bool) -> None:
        self.pipeline, self.stage = pipeline, stage
        self.per_token = 1 + with_mtp
        """Tensors of what travels that have a row for each token; they come first."""
        # Some shapes that are known at once: else torch would run the model to find them.
        travels = tuple(_meta((1, pipeline.width), pipeline.dtype) for _ in range(self.per_token))
        if with_router:
            travels += (_meta((2, stock_num_experts(pipeline.model.parts.config) or 0), pipeline.wide),)
        self.num_received = len(travels)
        loss = _meta((), pipeline.wide)
        super().__init__(
            _Call(pipeline, stage),
            stage.number,
            stage.num_stages,
            pipeline.model.device,
            input_args=(torch.empty(1, dtype=torch.int64, device="meta"),) if stage.is_first else travels,
            output_args=(loss,) if stage.is_last else travels,
            group=pipeline.group,
        )
        self._runtime_validate = False  # it would want these shapes of every micro-batch

    def _validate_fwd_input(self, *_: Any) -> None:
        """Torch 2.11 compares always, as 2.13 does where `_runtime_validate` is set."""

    def _validate_fwd_outputs(self, *_: Any) -> None:
        """Torch 2.11 compares always, as 2.13 does where `_runtime_validate` is set."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for the micro-batch."""
        if not self.is_first:
            infos: Any = self.args_recv_info[fwd_chunk_id]
            self._make_room(infos, fwd_chunk_id)
            for info in infos:  # as torch 2.11 has them
                info.buffer.requires_grad_(self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for its gradient."""
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_room(self, infos: Any, number: int) -> None:
        for info in infos[: self.per_token]:
            info.buffer = info.buffer.new_empty(self.pipeline.rows(number), self.pipeline.width)
        for info in infos[self.per_token :]:
            info.buffer = torch.empty_like(info.buffer)

    def _let_go(self, infos: Any) -> None:
        for info in infos[: self.per_token]:
            info.buffer = info.buffer.new_empty(0)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As any forward, timed."""
        with self.pipeline.clock.computing(self.stage_index):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.pipeline.moves()
        if not self.is_first:
            self._let_go(self.args_recv_info[fwd_chunk_id])
        return out

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Without a backward nothing is kept behind them."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self._count(ops, "activations")
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As they are, counted."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self._count(ops, "activation gradients")
        return ops

    def _count(self, ops: list[dist.P2POp], name: str) -> None:
        if ops:
            self.pipeline.model.groups["pp"].sent[name] += sum(op.tensor.nbytes for op in ops)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """As any backward of the model, the last one of its micro-batches being the last."""
        if not self.has_backward:
            return
        model, work = self.pipeline.model, self.pipeline.work
        assert work is not None and self.chunks is not None
        outputs, inputs = self.fwd_cache[bwd_chunk_id]
        if work.error is not None:
            del self.fwd_cache[bwd_chunk_id]
            self._send_zeros(bwd_chunk_id, inputs)
            return
        if self.is_first and not any(x.requires_grad for x in outputs):  # nothing learns in it
            del self.fwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = (None,)
            return
        clock = self.pipeline.clock
        try:
            with model.accumulating(last=bwd_chunk_id == self.chunks - 1), clock.computing(self.stage_index):
                super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        except Exception as error:  # in which torch wraps what went wrong
            cause = error.__cause__
            work.error = cause if isinstance(cause, Exception) else error
            self._send_zeros(bwd_chunk_id, inputs)
            return
        self.pipeline.moves()
        if not self.is_last:
            self._let_go(self.grad_recv_info[bwd_chunk_id])
        if self.pipeline.tied is not None:
            self.pipeline.tied.take()
        empty = self.chunks - sum(batch is not None for batch in work.batches)
        if work.after is not None and bwd_chunk_id >= empty:
            work.after(bwd_chunk_id - empty + 1)

    def _send_zeros(self, number: int, inputs: Sequence[Tensor]) -> None:
        """In the place of gradients: the stage before waits for them."""
        none = (None,) if self.is_first else ()
        self.bwd_cache[number] = none or tuple(torch.zeros_like(x) for x in inputs[: self.num_received])


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
