"""A run on two hosts, one of which is cut off: the other says which ranks are gone, and both end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.two_hosts import ADDRESSES, NotAllowed, TwoHosts, two_hosts
from tests.train.test_run_export import config, examples, options  # noqa: F401

LIMIT_S = 10
LOADER_S = 30
"""Which counts where the host is cut off while ranks exchange what their loaders have measured."""
PATIENCE_S = 240.0
"""How long anything may take on a machine that is busy with other things."""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts() as made:
            yield made
    except NotAllowed as error:
        pytest.skip(str(error))


def wait_for(what: str, holds: Callable[[], bool], outputs: list[Path]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            said = "\n".join(path.read_text()[-3000:] for path in outputs)
            raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}; the hosts have said\n{said}")
        time.sleep(0.05)


def test_a_host_that_is_cut_off_in_a_step_is_named_and_both_hosts_end(
    hosts: TwoHosts,
    examples: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out, log = tmp_path / "run", tmp_path / "run" / "log.jsonl"
    settings = options(config(examples, out, "tiny:qwen3"))
    settings += ["--train.steps=100000", "--train.batch_tokens=512", "--data.over_long=drop"]
    settings += ["--mesh.ring=2", "--log.sinks=[]"]
    settings += [f"--timeouts.step={LIMIT_S}", f"--timeouts.loader={LOADER_S}"]
    outputs = [tmp_path / f"host-{host}.txt" for host in (0, 1)]
    arguments = ["-m", "seqbraid", "train", *settings]
    agents = [hosts.torchrun(host, arguments, outputs[host], 2) for host in (0, 1)]

    def trains() -> bool:
        assert all(agent.poll() is None for agent in agents), [path.read_text() for path in outputs]
        return log.exists() and '"step": 3,' in log.read_text()

    wait_for("three steps", trains, outputs)
    hosts.cut()
    wait_for("the end of host-0", lambda: agents[0].poll() is not None, outputs)
    # Its torchrun waits for the rendezvous, which it cannot reach any more.
    wait_for("the ranks of host-1", lambda: set(hosts.processes(1)) <= {agents[1].pid}, outputs)

    assert agents[0].returncode != 0
    ends = re.compile(rf"\(timeouts\.(step={LIMIT_S}|loader={LOADER_S})\): ")
    stayed, was_cut = (
        next(line for line in path.read_text().splitlines() if ends.search(line)) for path in outputs
    )
    for rank in (2, 3):
        named = rf"rank {rank} \(host host-1, process \d+\) has sent no heartbeat for \d+ s"
        assert re.search(named, stayed), stayed
    assert f"the job's store at {ADDRESSES[0]}:" in was_cut and "has not answered rank" in was_cut
    ended = json.loads((out / "ended.json").read_text())
    # The rank that says so may not have heard the end of the third step.
    assert (ended["reason"], ended["status"]) == ("failed", 1) and ended["step"] >= 2
    # Here both reach the folder, and who is first writes.
    said = {"host-0": "rank 2 (host host-1, process ", "host-1": "the job's store at "}
    assert said[ended["host"]] in ended["error"]
    # Of each host: torchrun ends the others of a host as soon as one has.
    written = {int(path.stem.rpartition("-")[2]) for path in (out / "hang").glob("stacks-rank-*.txt")}
    assert written <= {0, 1, 2, 3} and written & {0, 1} and written & {2, 3}
