"""On a GPU a ring's kernels run side by side: what each of them waits for, followed on the CPU.

Streams are played by clocks. Each knows how far it has waited for every other one, and every operation of
torch is looked at: whether it waits for whoever wrote what it reads, and for whoever reads what it writes,
and whether memory is let go only when the stream that it belongs to has waited for its last use (then nobody
can get it too early, whatever the allocator does).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqbraid import SequenceLayout
from seqbraid.ops import attention, blocks, streams
from seqbraid.ops.blocks import BlockPlan
from seqbraid.sequence_parallel.plans import RowPlans
from seqbraid.sequence_parallel.ring import ring_attention
from seqbraid.sequence_parallel.ring_plan import RingPlan
from tests.ops.test_varlen_groups import IMPLS

Reached = dict["Stream", int]
"""How many operations of each stream are surely done."""


class Stream:
    """A stream that runs nothing, but knows what it has waited for."""

    device = "cpu"

    def __init__(self, *_: Any) -> None:
        self.reached: Reached = {}

    def record_event(self) -> Reached:
        return dict(self.reached)

    def wait_event(self, event: Reached) -> None:
        for stream, count in event.items():
            self.reached[stream] = max(self.reached.get(stream, 0), count)

    def tick(self) -> dict[Stream, int]:
        """One more operation, and its time."""
        self.reached[self] = self.reached.get(self, 0) + 1
        return {self: self.reached[self]}

    def waits_for(self, times: Reached) -> bool:
        return all(self.reached.get(stream, 0) >= count for stream, count in times.items())


class Use(NamedTuple):
    """A part of a memory that was read or written, and when."""

    start: int
    stop: int
    writes: bool
    time: Reached

    @staticmethod
    def of(tensor: Tensor, writes: bool, time: Reached) -> Use:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        start = tensor.storage_offset()
        return Use(start, start + sum((n - 1) * step for n, step in sizes) + 1, writes, time)

    def meets(self, other: Use) -> bool:
        """Whether one of them must wait for the other."""
        return self.start < other.stop and other.start < self.stop and (self.writes or other.writes)


class Memory:
    """Of tensors: whose it is, and its uses."""

    def __init__(self, tensor: Tensor, owner: Stream) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.owner = owner
        self.uses: list[Use] = []


class Watch(TorchDispatchMode):
    """Looks at every operation, and counts what is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.others = Stream(), Stream()
        self.current = [self.main]
        self.memory: dict[int, Memory] = {}
        self.wrong: Counter[str] = Counter()
        self.side: set[Stream] = set()
        self.overlaps = 0

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_for_freed()
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = [self._of(x, self.main) for x in inputs]
        result = func(*args, **(kwargs or {}))
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        alias = [a.alias_info for a in func._schema.arguments]
        if any(a is not None and not a.is_write for a in alias):  # a view touches nothing
            return result
        stream = self.current[-1]
        self._note_overlap(stream)
        now = stream.tick()
        changed = {
            self._key(x)
            for a, x in zip(alias, args, strict=False)
            if a is not None and a.is_write and isinstance(x, Tensor)
        }
        for x, memory in zip(inputs, known, strict=True):
            use = Use.of(x, self._key(x) in changed, now)
            for before in memory.uses:
                if use.meets(before) and not stream.waits_for(before.time):
                    what = (
                        "read or written before it was there"
                        if before.writes
                        else "written while it was read"
                    )
                    self.wrong[what] += 1
            memory.uses.append(use)
        for x in outputs:
            if self._key(x) not in self.memory:
                self._of(x, stream).uses.append(Use.of(x, True, now))
        return result

    def _key(self, x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def _of(self, x: Tensor, owner: Stream) -> Memory:
        return self.memory.setdefault(self._key(x), Memory(x, owner))

    def _note_overlap(self, stream: Stream) -> None:
        if stream in self.side:
            self.overlaps += any(not stream.waits_for({s: s.reached.get(s, 0)}) for s in self.side - {stream})
        elif stream not in (self.main, self.others):
            self.side.add(stream)
            self._note_overlap(stream)

    def _look_for_freed(self) -> None:
        for key, memory in list(self.memory.items()):
            if memory.storage.expired():
                del self.memory[key]
                if not all(memory.owner.waits_for(use.time) for use in memory.uses):
                    self.wrong["let go while it was used"] += 1


class Exchanges:
    """A group whose messages travel on a stream of their own."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], name: str
    ) -> Any:
        main, others = self.watch.main, self.watch.others
        others.wait_event(main.record_event())
        with self.watch.on(others):
            for _, tensor in sends:
                tensor.clone()
            for _, tensor in receives:
                tensor.fill_(0.1)
        done = others.record_event()
        kept = [tensor for _, tensor in sends]

        def wait() -> None:
            main.wait_event(done)
            kept.clear()

        return SimpleNamespace(wait=wait)


def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """From now on streams are clocks, which this one reads."""
    watch = Watch()
    cuda = SimpleNamespace(
        current_stream=lambda device: watch.main,
        stream=watch.on,
        Stream=Stream,
        is_current_stream_capturing=lambda: False,
    )
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(streams, "_stream_sets", cache(streams._stream_sets.__wrapped__))
    for module in (streams, attention):
        monkeypatch.setattr(module, "take_turns", lambda count, like, ahead: ahead or count > 1)
    return watch


ROWS = {
    "several rounds": ([160], "zigzag", 1.0),
    "one round": ([160], "zigzag", 4.0),
    "many blocks": ([31, 7, 64, 1, 40, 90], "zigzag", 1.0),
    "whole ones behind": ([200, 20, 20, 20, 7], "balanced", 2.0),
}


def plan_of(row: str, rank: int) -> RingPlan:
    lengths, policy, ratio = ROWS[row]
    layout = SequenceLayout(lengths, ring=4, policy=policy)
    return RowPlans(layout, rank).ring(None, shared=True, whole=True, query_heads=ratio)


def two_steps(watch: Watch, row: str, rank: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Forward, backward, an evaluation between them, twice, with layers one behind the other; outputs
    and gradients.
    """
    plan, group = plan_of(row, rank), Exchanges(watch)
    lengths, policy, _ = ROWS[row]
    tokens = SequenceLayout(lengths, ring=4, policy=policy).num_local_tokens
    generator = torch.Generator().manual_seed(0)
    found = []
    with watch:
        weight = torch.randn(16, 16, dtype=dtype, generator=generator).requires_grad_()
        sink = torch.randn(4, dtype=dtype, generator=generator).requires_grad_()

        def layer(x: Tensor) -> Tensor:
            q, k, v = x @ weight, (x @ weight.T)[:, :2], (x @ (2 * weight))[:, :2]
            return x + ring_attention(q, k, v, plan, group, 0.3, sink) @ weight  # type: ignore[arg-type]

        for _ in range(2):
            x = torch.randn(tokens, 4, 16, dtype=dtype, generator=generator)
            out = layer(layer(x))
            with torch.no_grad():
                layer(x)
            out.float().sum().backward()
            assert weight.grad is not None and sink.grad is not None
            found += [out.detach().clone(), weight.grad, sink.grad]
            del out
            weight.grad = sink.grad = None
        watch._look_for_freed()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("row", ROWS)
def test_kernels_wait_for_what_they_need(
    monkeypatch: pytest.MonkeyPatch, row: str, rank: int, dtype: torch.dtype
) -> None:
    watch = watched(monkeypatch)
    two_steps(watch, row, rank, dtype)
    assert watch.side and watch.overlaps
    assert not watch.wrong


@pytest.mark.parametrize("kernel", [None, *IMPLS])
@pytest.mark.parametrize("row", ROWS)
def test_results_are_those_of_kernels_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, row: str, kernel: str | None
) -> None:
    """Also of kernels that write to their place."""
    if kernel is not None:
        monkeypatch.setattr(blocks, "uses_varlen", lambda q, v: True)
        monkeypatch.setattr(blocks, "flash_impl", lambda q, k, windowed, kernels: IMPLS[kernel])
    one_after_the_other = two_steps(Watch(), row, rank=2, dtype=torch.float64)
    watch = watched(monkeypatch)
    side_by_side = two_steps(watch, row, rank=2, dtype=torch.float64)
    assert watch.side and not watch.wrong
    for a, b in zip(side_by_side, one_after_the_other, strict=True):
        assert b.norm() > 0.1 and torch.equal(a, b)


@contextmanager
def results_not_given_back(self: streams.Calls) -> Iterator[Any]:
    """What `Calls.results` was without its end."""
    self._wait()
    results, self._results, self._calls = self._results, [], []
    yield results


def part_is_the_tensor(self: Any, like: Tensor, rows: Any, apart: bool) -> None:
    """`_Whole` that hands on memory of other streams."""
    self.tensor = None if len(rows) == 1 else like.new_empty(like.shape)


@pytest.mark.parametrize(
    ("broken", "name", "how", "said"),
    [
        (streams.Calls, "_wait", lambda self: None, "read or written before it was there"),
        (streams.Calls, "results", results_not_given_back, "let go while it was used"),
        (attention._Whole, "__init__", part_is_the_tensor, "let go while it was used"),
    ],
)
def test_what_does_not_wait_is_found(
    monkeypatch: pytest.MonkeyPatch, broken: type, name: str, how: Any, said: str
) -> None:
    monkeypatch.setattr(broken, name, how)
    watch = watched(monkeypatch)
    two_steps(watch, "several rounds", rank=2)
    assert watch.wrong[said]


def test_rounds_start_while_the_ones_before_them_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one set of streams they would stand behind the uses of what those returned."""
    assert all(len(round_.blocks.blocks) == 1 for round_ in plan_of("several rounds", 2).rounds)
    watch = watched(monkeypatch)
    two_steps(watch, "several rounds", rank=2)
    assert watch.overlaps
    watch = watched(monkeypatch)
    one_set = cycle([[Stream() for _ in range(streams.NUM_STREAMS)]])
    monkeypatch.setattr(streams, "_stream_sets", lambda main: one_set)
    two_steps(watch, "several rounds", rank=2)
    assert watch.side and not watch.overlaps and not watch.wrong


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_that_nobody_asks_for_are_waited_for(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """After an error, or where a consumer stops between start and finish."""
    watch = watched(monkeypatch)

    def call(x: Tensor, error: bool) -> tuple[Tensor, ...]:
        found = (x * 2,)
        if error:
            raise MemoryError
        return found

    with watch:
        inputs = [torch.ones(4), torch.ones(4)]
        calls = streams.Calls([partial(call, inputs[0], False), partial(call, inputs[1], fails)], inputs[0])
        with pytest.raises(MemoryError) if fails else nullcontext():
            calls.start()
        del calls, inputs
        gc.collect()
        watch._look_for_freed()
    assert watch.side and not watch.wrong


def test_inputs_are_let_go_with_the_results() -> None:
    """A finished object that is still held does not keep the keys of its round."""
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    running = attention.BlockForward(q, k, v, BlockPlan.causal([(0, 8)]), 0.3).start()
    keys = StorageWeakRef(k.untyped_storage())
    del k
    assert not keys.expired()
    running.finish()
    assert keys.expired()
