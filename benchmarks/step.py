"""Full training steps (forward and backward) on one GPU at real widths: stock transformers, stock with the
kernels that a skilled user adds, and seqbraid, in turns in one run.

`python -m benchmarks.step --case qwen3_4b --tokens 16384` prints for each way tokens per second (median over
turns), the ratio to the best of the others, model FLOPs utilisation (`seqbraid.plan.flops`: the model's
arithmetic without recomputation, over the time and the vendor's dense bf16 peak), peak memory, loss and
gradient norm. Each way has a process of its own, since Liger patches classes for the whole process; what
fails is said. `--profile` shows where the time goes, `--waits` where the host waits for the GPU in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.step_ways import WAYS


class Worker:
    """A process that holds the model of one way."""

    def __init__(self, way: str) -> None:
        self.way = way
        command = [sys.executable, "-m", "benchmarks.step", *sys.argv[1:], "--worker", way]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
        )
        self.turns: list[dict[str, Any]] = []
        self.failure: str | None = None

    def ask(self, what: str) -> dict[str, Any] | None:
        """What the process answers; None if it has failed."""
        if self.failure is not None:
            return None
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"failure": "the process died"}
        self.failure = answer.get("failure")
        return None if self.failure else answer

    @property
    def ms(self) -> float:
        """Median step of the median turn."""
        return statistics.median(statistics.median(turn["ms"]) for turn in self.turns)


def main() -> None:
    """Take turns, then print the table."""
    args = parse()
    if args.worker:
        work(args)
        return
    workers = [Worker(way) for way in args.ways.split(",")]
    # One after the other: what a first step costs (compiling, autotuning) is not to disturb a measurement.
    for _ in range(args.turns):
        for worker in workers:
            found = worker.ask("turn")
            if found:
                worker.turns.append(found)
    about = next((worker.ask("about") for worker in workers if worker.turns), None) or {}
    print(
        f"{args.case}, {about.get('layers')} layers, {about.get('tokens')} tokens in "
        f"{about.get('samples')} samples, checkpointing {args.checkpointing}; {about.get('versions')}"
    )
    print(f"  the estimate of seqbraid's peak: {about.get('estimate', float('nan')):.1f} GiB")
    others = [worker.ms for worker in workers if worker.turns and worker.way != "seqbraid"]
    for worker in workers:
        if worker.failure is not None or not worker.turns:
            print(f"  {worker.way:>10}: failed: {worker.failure}")
            continue
        ratio = f"{min(others) / worker.ms:.2f} x the best other, " if others else ""
        mfu = about["flops"] / (worker.ms / 1e3) / about["peak"] if about.get("peak") else float("nan")
        turn = worker.turns[-1]
        speed = 1e3 * about["tokens"] / worker.ms
        print(
            f"  {worker.way:>10}: {speed:8.0f} tok/s ({worker.ms:.1f} ms), {ratio}MFU {100 * mfu:.1f} %, "
            f"{turn['peak']:.1f} GiB, loss {turn['loss']:.5f}, gradient norm {turn['norm']:.5f}"
        )
    for worker in workers:
        if worker.way in args.profile.split(","):
            from benchmarks.step_profile import show

            found = worker.ask("profile")
            if found:
                show(worker.way, found, args.kernels)
    for worker in workers:
        found = worker.ask("waits") if worker.way in args.waits.split(",") else None
        if found is not None:
            print(f"{worker.way}: the host waits for the GPU {sum(found.values())} times in a step")
            for where, count in found.items():
                print(f"  {count:5d} × {where}")
    for worker in workers:
        worker.process.kill()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="qwen3_4b", help="a width of step_cases.py")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--row", choices=("packed", "one"), default="packed")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--ways", default="stock,rival,seqbraid", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--checkpointing", default="full", help="none or full; selective for ours alone")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a turn, after one to warm up")
    parser.add_argument("--profile", default="", help="ways whose time is shown by kind of work")
    parser.add_argument("--waits", default="", help="ways whose waits are counted")
    parser.add_argument("--kernels", type=int, default=12, help="kernels that a profile lists")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    """Answer the parent: a line of JSON for each line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    state: Any = None
    for line in sys.stdin:
        try:
            if state is None:
                state = _State(args)
            answer = getattr(state, line.strip())()
        except Exception as error:
            traceback.print_exc(limit=5)
            answer = {"failure": f"{type(error).__name__}: {str(error)[:200]}"}
        print(json.dumps(answer), file=answers, flush=True)


class _State:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from benchmarks.step_cases import CASES
        from benchmarks.step_ways import make

        self.args, self.torch = args, torch
        case = CASES[args.case]()
        self.config = case.config(args.layers or case.layers)
        self.row = case.row(self.config, args.tokens, args.row)
        self.model, self.step = make(args.worker, case, self.config, self.row, args.checkpointing)

    def turn(self) -> dict[str, Any]:
        """One step to warm up, then some that are timed."""
        torch = self.torch
        torch.cuda.reset_peak_memory_stats()
        times, loss, norm = [], None, 0.0
        for i in range(self.args.steps + 1):
            torch.cuda.synchronize()
            begin = perf_counter()
            loss = self.step()
            torch.cuda.synchronize()
            times += [1e3 * (perf_counter() - begin)] if i else []
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            if i == self.args.steps:
                norm = float(torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).norm())
            del grads
            self.model.zero_grad(set_to_none=True)
        found = {
            "ms": times,
            "peak": torch.cuda.max_memory_allocated() / 2**30,
            "loss": float(loss),
            "norm": norm,
        }
        torch.cuda.empty_cache()  # for the others
        return found

    def about(self) -> dict[str, Any]:
        """What is the same for all ways."""
        import transformers

        import seqbraid as sb
        from seqbraid.plan.estimate import memory_estimate
        from seqbraid.plan.flops import ModelFlops, peak_flops
        from seqbraid.plan.memory import MemoryOptions

        torch, row = self.torch, self.row
        tokens, memory = sum(row.lengths), MemoryOptions(self.args.checkpointing)
        estimate = memory_estimate(self.model, sb.Mesh(), memory, "bfloat16", "sgd", tokens, fused=True)
        # No optimizer here: gradients are as wide as parameters, and there are no float32 weights.
        held = sum(line.bytes for line in estimate.lines if line.name not in ("gradients", "optimizer"))
        return {
            "estimate": (held + estimate["parameters"]) / 2**30,
            "layers": self.config.get_text_config().num_hidden_layers,
            "tokens": sum(row.lengths),
            "samples": len(row.samples),
            "flops": ModelFlops.of(self.config).step([row.lengths], row.label_tokens, row.media),
            "peak": peak_flops("cuda", torch.bfloat16),
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        }

    def profile(self) -> dict[str, Any]:
        """One step more, looked at."""
        from benchmarks.step_profile import profiled

        self.step()
        self.model.zero_grad(set_to_none=True)
        found = profiled(self.step)
        self.model.zero_grad(set_to_none=True)
        return found

    def waits(self) -> dict[str, int]:
        """How often a step waits for the GPU, by the line that does, as torch tells."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self.torch.cuda.set_sync_debug_mode("warn")
            self.step()
            self.torch.cuda.set_sync_debug_mode("default")
        self.model.zero_grad(set_to_none=True)
        lines = Counter(f"{w.filename}:{w.lineno}" for w in seen if "synchroniz" in str(w.message))
        return dict(lines.most_common())


if __name__ == "__main__":
    main()
