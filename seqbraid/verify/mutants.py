"""Deliberate defects, each switched on for the length of a `with`: a check that none of them fails
is no check.

A mutant replaces one function of the library by one that makes a mistake seen in the wild. Nothing here is
reachable in a normal run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import FSDPModule

from ..comm.dispatch import Dispatch
from ..comm.group import Group
from ..comm.rows import RowPlan, exchange_rows
from ..data import pack as pack_module
from ..layout.labels import IGNORE
from ..models import attention as attention_module
from ..models import batch as batch_module
from ..models import braided as braided_module
from ..models import experts as experts_module
from ..ops import attention as attention_ops
from ..sequence_parallel import gated_delta as gated_delta_module
from ..sequence_parallel import ring as ring_module
from ..sequence_parallel import ulysses as ulysses_module
from ..sequence_parallel.context import StepContext


@dataclass(frozen=True)
class Mutant:
    """A defect, and the check that it must fail: parity of a family, or of the attention blocks alone."""

    name: str
    switched_on: Callable[[], AbstractContextManager[Any]]
    check: str
    """A family of `tiny.FAMILIES`, or `blocks`."""
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def mesh(self) -> dict[str, int]:
        """The axes that it takes, those of one rank left out."""
        axes = ("ring", "ulysses", "tp", "ep", "pp")
        sizes: dict[str, int] = {axis: getattr(self, axis) for axis in axes}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def world_size(self) -> int:
        """How many ranks it takes."""
        return self.ring * self.ulysses * self.tp * self.pp


def _positions_not_reset() -> AbstractContextManager[Any]:
    build = pack_module.build_row

    def wrong(*args: Any) -> Any:
        row = build(*args)
        return replace(row, positions=torch.arange(len(row.input_ids)).expand(4, -1))

    return patch.object(pack_module, "build_row", wrong)


def _targets_shifted_across_samples() -> AbstractContextManager[Any]:
    build = pack_module.build_row

    def wrong(samples: Any, *args: Any) -> Any:
        labels = torch.cat([torch.as_tensor(s.get("labels", s["input_ids"])) for s in samples])
        targets = torch.cat([labels[1:], labels.new_tensor([IGNORE])])
        return replace(build(samples, *args), targets=targets)

    return patch.object(pack_module, "build_row", wrong)


def _boundaries_ignored(name: str, position: int) -> AbstractContextManager[Any]:
    """Give one gated-delta op a single boundary around all sequences."""
    right = getattr(gated_delta_module, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        arguments[position] = (arguments[position][0], arguments[position][-1])
        return right(*arguments, **kwargs)

    return patch.object(gated_delta_module, name, wrong)


def _padding_counted() -> AbstractContextManager[Any]:
    split = batch_module.Row.split

    def wrong(self: Any, plans: Any) -> Any:
        layout = plans.layout
        extra = layout.num_local_tokens * layout.num_ranks - layout.num_tokens
        batch = split(self, plans)
        return replace(batch, label_tokens=batch.label_tokens + extra)

    return patch.object(batch_module.Row, "split", wrong)


def _padding_routed() -> AbstractContextManager[Any]:
    right = braided_module.load_balancing_loss
    return patch.object(
        braided_module,
        "load_balancing_loss",
        lambda logits, real, *rest: right(logits, torch.ones_like(real), *rest),
    )


def _block_statistics() -> AbstractContextManager[Any]:
    """The backward of a block from the block's own out and LSE instead of the merged ones."""
    right = attention_ops.BlockBackward.__init__

    def wrong(
        self: Any, dout: Any, q: Any, k: Any, v: Any, seen: Any, plan: Any, *rest: Any, **how: bool
    ) -> None:
        own = attention_ops.block_attention(q, k, v, plan, *rest)
        right(self, dout, q, k, v, own, plan, *rest, **how)

    return patch.object(attention_ops.BlockBackward, "__init__", wrong)


def _attention_changed(**changes: Any) -> AbstractContextManager[Any]:
    right = attention_module.softmax_attention

    def wrong(q: Any, k: Any, v: Any, context: Any, scale: float, window: Any, sink: Any) -> Any:
        arguments = {"window": window, "sink_H": sink} | changes
        return right(q, k, v, context, scale, **arguments)

    return patch.object(attention_module, "softmax_attention", wrong)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("positions not reset", _positions_not_reset, "gpt2"),
    Mutant("conv boundary ignored", lambda: _boundaries_ignored("causal_conv", 3), "qwen3_5"),
    Mutant("state not reset", lambda: _boundaries_ignored("make_call", 5), "qwen3_5"),
    Mutant("targets shifted across samples", _targets_shifted_across_samples, "llama"),
    Mutant("padding counted in the divisor", _padding_counted, "llama"),
    Mutant("padding counted by the router", _padding_routed, "qwen3_moe"),
    Mutant("LSE gradient dropped", _block_statistics, "blocks"),
    Mutant("sliding window ignored", lambda: _attention_changed(window=None), "gemma3"),
    Mutant("sink ignored", lambda: _attention_changed(sink_H=None), "gpt_oss"),
)


def _lse_aliased() -> AbstractContextManager[Any]:
    """The LSE that is kept is that of the first block: the merge went into a copy."""
    right = attention_ops.BlockForward.merge
    return patch.object(
        attention_ops.BlockForward, "merge", lambda self, out, lse, into: right(self, out, lse.clone(), into)
    )


def _wrong_keys() -> AbstractContextManager[Any]:
    """One round gets keys of the right shape from the wrong rank: our own."""
    right = ring_module.Keys.take

    def wrong(self: Any) -> Any:
        k, v = right(self)
        return (self.k[: len(k)], self.v[: len(v)]) if len(self.k) >= len(k) else (k, v)

    return patch.object(ring_module.Keys, "take", wrong)


def _kv_gradient_not_summed() -> AbstractContextManager[Any]:
    """A KV head that goes to several ranks gets the gradient of the first of them alone."""
    right = ulysses_module._kv_for

    def wrong(x: Any, plan: Any, rank: int) -> Any:
        first = rank == 0 or plan.kv_heads(rank - 1).stop <= plan.kv_heads(rank).start
        return right(x if first else x.detach(), plan, rank)

    return patch.object(ulysses_module, "_kv_for", wrong)


def _loss_times_group_size() -> AbstractContextManager[Any]:
    right = braided_module.agree_on_step

    def wrong(mesh: Any, *step: Any) -> Any:
        agreed = right(mesh, *step)
        return agreed._replace(label_tokens=agreed.label_tokens // mesh.sequence_size)

    return patch.object(braided_module, "agree_on_step", wrong)


def _gradients_averaged() -> AbstractContextManager[Any]:
    right = FSDPModule.set_gradient_divide_factor
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, _: right(self, 2.0))


def _expert_gradients_multiplied() -> AbstractContextManager[Any]:
    """FSDP divides the sum over ranks with the same experts as if each token were on all of them."""
    right = FSDPModule.set_gradient_divide_factor

    def wrong(self: Any, factor: float) -> None:
        right(self, factor / 2 if type(self).__name__.endswith("Experts") else factor)

    return patch.object(FSDPModule, "set_gradient_divide_factor", wrong)


def _wrong_expert() -> AbstractContextManager[Any]:
    """The first token of a rank goes to the expert after one of its own."""
    right = Dispatch.of

    def wrong(index_TK: Any, num_experts: int, group: Any) -> Any:
        index_TK = index_TK.clone()
        index_TK[:1, :1] = (index_TK[:1, :1] + 1) % num_experts
        return right(index_TK, num_experts, group)

    # Not where experts are recognised, which would not let this pass.
    return patch.object(experts_module, "Dispatch", SimpleNamespace(of=wrong))


def _router_loss_per_rank() -> AbstractContextManager[Any]:
    """Each rank's tokens are taken for a row of their own."""
    right = braided_module.load_balancing_loss

    def wrong(logits: Any, real: Any, top_k: int, group: Any, before: Any = None) -> Any:
        return right(logits, real, top_k, Group(), before) / group.size

    return patch.object(braided_module, "load_balancing_loss", wrong)


def padding_routed_to_experts() -> AbstractContextManager[Any]:
    """Experts see slots that hold no token: no gradient shows it, but loads and bytes do."""
    return patch.object(StepContext, "real_rows", lambda self, device: None)


def _sliced_twice() -> AbstractContextManager[Any]:
    split = batch_module.Row.split

    def wrong(self: Any, plans: Any) -> Any:
        layout, rank, batch = plans.layout, plans.rank, split(self, plans)
        return replace(
            batch, input_ids=layout.shard(batch.input_ids, rank), targets=layout.shard(batch.targets, rank)
        )

    return patch.object(batch_module.Row, "split", wrong)


def _transition_left_out() -> AbstractContextManager[Any]:
    """Segments hand states on as if they changed nothing in them."""
    right = gated_delta_module._scan
    return patch.object(
        gated_delta_module,
        "_scan",
        lambda M, S0, scan: right(torch.eye(M.shape[-1], dtype=M.dtype).expand_as(M), S0, scan),
    )


def _states_in_bf16() -> AbstractContextManager[Any]:
    right = gated_delta_module._exchange

    def wrong(M: Any, S0: Any, *rest: Any) -> Any:
        return right(*(x.bfloat16().to(x.dtype) for x in (M, S0)), *rest)

    return patch.object(gated_delta_module, "_exchange", wrong)


def _scan_in_rank_order() -> AbstractContextManager[Any]:
    """States are composed as they arrive, which is the order of the sequence only for contiguous cuts."""
    right = gated_delta_module._scan

    def wrong(M: Any, S0: Any, scan: Any) -> Any:
        return right(M, S0, replace(scan, S0_order=torch.arange(len(S0)), M_order=torch.arange(len(M))))

    return patch.object(gated_delta_module, "_scan", wrong)


def _halo_of_the_neighbour() -> AbstractContextManager[Any]:
    """What precedes a segment is taken to be the end of the shard of the rank before."""

    def wrong(mixed: Any, width: int, plan: Any, group: Any) -> Any:
        size, count = group.size, width - 1
        neighbours = RowPlan(
            rows=torch.arange(len(mixed) - count, len(mixed)),
            send=[count * (peer == (group.rank + 1) % size) for peer in range(size)],
            receive=[count * (peer == (group.rank - 1) % size) for peer in range(size)],
            is_local=False,
        )
        num_segments = len(plan.cu) - 1
        has_halo = torch.zeros(num_segments * count, dtype=mixed.dtype)
        has_halo[plan.halo(width).places] = 1
        arrived = exchange_rows(mixed, neighbours, group, "gated delta halo")
        return arrived.expand(num_segments, -1, -1) * has_halo.view(num_segments, count, 1)

    return patch.object(gated_delta_module, "_halo", wrong)


def _state_gradient_dropped() -> AbstractContextManager[Any]:
    right = gated_delta_module._of_all

    def wrong(entering: Any, scan: Any, plan: Any) -> Any:
        return None if scan is plan.backward else right(entering, scan, plan)

    return patch.object(gated_delta_module, "_of_all", wrong)


def stale_context() -> AbstractContextManager[Any]:
    """A process-wide context: whoever computes, and computes again, takes the one that was made last."""
    latest: list[Any] = []
    make, right = braided_module.StepContext, attention_module.softmax_attention

    def remembered(*args: Any) -> Any:
        latest[:] = [make(*args)]
        return latest[0]

    def wrong(q: Any, k: Any, v: Any, context: Any, *rest: Any) -> Any:
        return right(q, k, v, latest[0], *rest)

    stack = ExitStack()
    stack.enter_context(patch.object(braided_module, "StepContext", remembered))
    stack.enter_context(patch.object(attention_module, "softmax_attention", wrong))
    return stack


RANK_MUTANTS: tuple[Mutant, ...] = (
    Mutant("per-block LSE in backward", _block_statistics, "llama", ring=2),
    Mutant("LSE aliased", _lse_aliased, "llama", ring=2),
    Mutant("the wrong rank's keys in one round", _wrong_keys, "llama", ring=2),
    Mutant("KV-head gradient not summed", _kv_gradient_not_summed, "llama", ulysses=4),
    Mutant("loss multiplied by the group size", _loss_times_group_size, "llama", ring=2),
    Mutant("FSDP averages", _gradients_averaged, "llama", ring=2),
    Mutant("sliced twice", _sliced_twice, "llama", ring=2),
    Mutant("expert gradients multiplied by ep", _expert_gradients_multiplied, "qwen3_moe", ring=4, ep=2),
    Mutant("a token at the wrong expert", _wrong_expert, "qwen3_moe", ring=2, ep=2),
    Mutant("the routers' loss of each rank alone", _router_loss_per_rank, "qwen3_moe", ring=2, ep=2),
    Mutant("M left out", _transition_left_out, "qwen3_5", ring=2),
    Mutant("states in bf16", _states_in_bf16, "qwen3_5", ring=4),
    Mutant("states scanned in rank order", _scan_in_rank_order, "qwen3_5", ring=4),
    Mutant("halo from the neighbour rank", _halo_of_the_neighbour, "qwen3_5", ring=4),
    Mutant("state gradient not returned", _state_gradient_dropped, "qwen3_5", ring=2),
)
"""Defects that only several ranks can have."""
