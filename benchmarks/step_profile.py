"""Where the time of a step goes, by kind of work."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "gated delta": r"gated_delta|gdr|delta_rule|chunk_(fwd|bwd)|recompute_w_u|kkt|cumsum|solve_tril|conv",
    "loss": r"_rows_kernel|cross_entropy|element_mul|softmax",
    "attention": r"flash|fmha|sdpa|attention|attn",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|grouped_mm|splitk",
    "norms, rotary, SwiGLU": r"rms|norm|rope|rotary|silu|swiglu",
    "copies": r"[mM]emcpy|[mM]emset|copy|[cC]atArray|index_select|gather|scatter|indexing_backward",
    "elementwise, sums": r".",
}
"""A kernel's kind is the first whose pattern is in its name."""


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel, by its name.

    >>> [kind_of(name) for name in ("nvjet_tst_128x256", "_rows_kernel", "flash_bwd", "reduce_kernel")]
    ['matrix products', 'loss', 'attention', 'elementwise, sums']
    """
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel))


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds by kind of one step, of its kernels one by one, of torch's operations that are no matrix
    products, and of nothing at all.
    """
    torch.cuda.synchronize()
    begin = perf_counter()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        step()
        torch.cuda.synchronize()
    wall = 1e3 * (perf_counter() - begin)
    kinds, kernels = defaultdict[str, float](float), defaultdict[str, list[float]](lambda: [0.0, 0.0])
    spans = []
    for event in prof.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        ms = (event.time_range.end - event.time_range.start) / 1e3
        spans.append((event.time_range.start / 1e3, event.time_range.end / 1e3))
        kinds[kind_of(event.name)] += ms
        kernels[event.name][0] += ms
        kernels[event.name][1] += 1
    span = max(end for _, end in spans) - min(begin for begin, _ in spans)
    busiest = sorted(kernels.items(), key=lambda item: -item[1][0])
    calls = prof.key_averages(group_by_input_shape=True)
    calls = sorted(calls, key=lambda call: -call.self_device_time_total)
    return {
        "calls": [
            (f"{call.key[:40]} {str(call.input_shapes)[:90]}", call.self_device_time_total / 1e3, call.count)
            for call in calls
            if call.key.startswith("aten::") and not re.search(r"mm|attention", call.key)
        ][:30],
        "kinds": dict(kinds) | {"idle": span - _covered(spans)},
        "kernels": [(name[:90], ms, int(count)) for name, (ms, count) in busiest[:30]],
        "span": span,
        "wall": wall,
    }


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the time some kernel runs."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def show(way: str, found: dict[str, Any], top: int) -> None:
    """Print a profile."""
    print(f"{way}: {found['span']:.1f} ms from the first kernel to the last")
    for kind, ms in sorted(found["kinds"].items(), key=lambda item: -item[1]):
        print(f"  {ms:8.1f} ms {100 * ms / found['span']:5.1f} %  {kind}")
    for heading, rows in (("kernels", found["kernels"]), ("operations of torch, by shapes", found["calls"])):
        print(f"  {heading}:")
        for name, ms, count in rows[:top]:
            print(f"      {ms:8.2f} ms × {count:4d}  {name}")
