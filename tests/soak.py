"""Short runs on several ranks, over and over: each must end with status 0, however it leaves its groups (or,
where a rank raises, with status 1 and its traceback).

    python -m tests.soak --runs 200

Ranks are forked from one process that has imported everything, so that a run takes seconds; each of them ends
as any Python program does, by the interpreter's own end.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import seqbraid as sb
from benchmarks import memory_per_rank
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples

PRELOADED = ("transformers.models.llama.modeling_llama", "seqbraid.distributed.api", "seqbraid.data.pack")
"""What ranks would otherwise import one by one."""
STEPS = 2
LIMIT_S = 300.0
"""For one run; the machine may be busy."""
KEPT: dict[str, Any] = {}
"""What a user's script has in its globals: alive until the interpreter clears modules."""


def train(axes: dict[str, int]) -> float:
    """A user's own loop through the public surface; the parameters are sharded by FSDP."""
    torch.manual_seed(0)
    mesh = sb.Mesh(**axes)
    stock = tiny_model("llama")
    model = sb.parallelize(stock, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        batch = sb.pack(random_samples([40, 7, 90], 97, STEPS * mesh.data_rank + step), stock.config, mesh)
        if mesh.pp > 1:
            out = sb.forward_backward(model, [batch] * 2)
        else:
            out = model(batch)
            out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    KEPT.update(mesh=mesh, model=model, out=out)
    return float(out.mean_loss)


def left(axes: dict[str, int]) -> None:
    """The groups are left to the end of the process, right after what ranks tell each other."""
    loss = train(axes)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, loss)


def destroyed(axes: dict[str, int]) -> None:
    """The user destroys the groups, as torch's tutorials do."""
    left(axes)
    dist.destroy_process_group()


def own_groups(axes: dict[str, int]) -> None:
    """The user starts the job himself, has a group of his own, and destroys it all; the tensors stay."""
    dist.init_process_group("gloo")
    train(axes)
    group = dist.new_group(list(range(dist.get_world_size())))
    found = [torch.empty(4096) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.ones(4096), group=group)
    KEPT.update(group=group, found=found)
    dist.destroy_process_group()


def benchmark(axes: dict[str, int]) -> None:
    """`memory_per_rank.py` in a small form."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args = argparse.Namespace(tokens=256, hidden=32, layers=2, mesh="product")
    memory_per_rank.rank_main(rank, size, os.path.abspath("store"), args, os.path.abspath("results.pt"))


def failing(axes: dict[str, int]) -> None:
    """One rank raises; the others wait for it in a collective."""
    train(axes)
    if os.environ["RANK"] == "1":
        raise RuntimeError("a mistake of the user's")
    dist.all_reduce(torch.ones(4096))


KINDS: dict[str, Callable[[dict[str, int]], None]] = {
    "left": left,
    "destroyed": destroyed,
    "own_groups": own_groups,
    "memory_per_rank": benchmark,
    "failing": failing,
}
MESHES: dict[int, Sequence[dict[str, int]]] = {
    2: ({"ring": 2}, {"ulysses": 2}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}),
    4: ({"ring": 2, "ulysses": 2}, {"dp_shard": 2, "ring": 2}, {"dp_shard": -1}, {"pp": 2, "tp": 2}),
}


class End(NamedTuple):
    """How a rank ended: its exit status, negative for a signal, and what it said."""

    status: int
    said: str


def well_ended(kind: str, ends: Sequence[End]) -> bool:
    """All with status 0; or, where a rank raises, all with status 1 and that rank with its own words."""
    if kind == "failing":
        return all(end.status == 1 for end in ends) and "a mistake of the user's" in ends[1].said
    return all(end.status == 0 for end in ends)


def run(kind: str, size: int, axes: dict[str, int]) -> list[End]:
    """One run: a process per rank, each of which ends as Python ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    folder = tempfile.mkdtemp(prefix="soak")
    ranks: list[int] = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
            os.chdir(folder)
            os.dup2(os.open(f"said{rank}", os.O_WRONLY | os.O_CREAT), 2)
            # Python's threads take turns late: one of gloo's that comes too late stays behind more often.
            sys.setswitchinterval(1.0)
            KINDS[kind](axes)
            sys.exit(0)
        ranks.append(pid)
    end = time.monotonic() + LIMIT_S
    ends = [End(status_of(pid, end), (Path(folder) / f"said{n}").read_text()) for n, pid in enumerate(ranks)]
    shutil.rmtree(folder)
    return ends


def status_of(pid: int, end: float) -> int:
    """The exit status of a rank; one that hangs is killed."""
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    """Run, and print a tally."""
    parser = argparse.ArgumentParser(prog="tests.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ranks", default="2,4")
    args = parser.parse_args()
    for module in PRELOADED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    cases = [
        (kind, size, axes)
        for size in map(int, args.ranks.split(","))
        for axes in MESHES[size]
        for kind in args.kinds.split(",")
    ]
    tally: Counter[tuple[str, int, bool]] = Counter()
    for number in range(args.runs):
        kind, size, axes = cases[number % len(cases)]
        ends = run(kind, size, axes)
        good = well_ended(kind, ends)
        tally[kind, size, good] += 1
        for rank, end in enumerate(ends if not good else ()):
            print(f"run {number}, {kind} on {size} ranks, {axes}: rank {rank} ended with {end.status}")
            print(end.said.strip()[-500:], flush=True)
    for (kind, size, good), count in sorted(tally.items()):
        print(f"{kind:>16} on {size} ranks: {count} {'ended well' if good else 'FAILED'}")
    failed = sum(count for (_, _, good), count in tally.items() if not good)
    print(f"{failed} of {args.runs} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
