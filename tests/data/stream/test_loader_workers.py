"""Workers give what no workers give, say what went wrong, and end with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from seqbraid import Mesh
from tests.helpers.loaders import data_workers, loader, told
from tests.helpers.toy import ListSource, ToyEncoder, make_loader, records


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_workers_give_what_no_workers_give_and_keep_no_descriptors() -> None:
    source = records(200, dict.fromkeys(range(0, 200, 2), "media"), longest=32)
    options = {"source": source, "rows_per_step": 20, "epochs": 1}
    expected = [told(step) for step in loader(**options)]
    with_workers = loader(**options, workers=2)
    kept = list(islice(with_workers, 1))
    before = open_descriptors()
    kept += list(with_workers)
    assert open_descriptors() <= before + 2
    assert [told(step) for step in kept] == expected
    for step in kept:
        for sample in (sample for row in step.rows for sample in row):
            record = source[int(sample["input_ids"][0])]
            assert ("pixel_values" in sample) == (record["fate"] == "media")
            if "pixel_values" in sample:
                assert torch.equal(
                    sample["pixel_values"], torch.full((record["n"], 1024), float(record["id"]))
                )
                sample["pixel_values"].zero_()  # what arrived may be written to
    assert all(step.wait_s >= 0 for step in kept)
    with_workers.close()
    assert not data_workers()


class Failing(ToyEncoder):
    """An encoder that cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no tokenizer here")


def test_errors_in_workers_are_told_apart() -> None:
    bug = loader(source=records(37, {5: "bug"}), workers=1, on_bad_sample="skip")
    with pytest.raises(RuntimeError, match=r"(?s)^toy.jsonl:6: KeyError: 'oops'.*in length"):
        next(bug)
    bug.close()
    with pytest.raises(ValueError, match="must be picklable"):
        make_loader(
            ListSource(records(5)), lambda: ToyEncoder(), Mesh(), row_tokens=8, rows_per_step=1, workers=1
        )
    no_encoder = make_loader(
        ListSource(records(5)), Failing, Mesh(), row_tokens=32, rows_per_step=1, workers=1
    )
    with pytest.raises(RuntimeError, match="no tokenizer here"):
        next(no_encoder)
    no_encoder.close()


def test_a_worker_that_dies_is_an_error_that_says_so() -> None:
    dying = loader(workers=2, epochs=40, prefetch_steps=0)
    next(dying)
    next(child for child in data_workers() if child.name == "data worker 1").kill()
    with pytest.raises(RuntimeError, match=r"^data worker 1 \(process \d+\) was ended by SIGKILL"):
        list(dying)
    dying.close()
    assert not data_workers()


ORPHANS = """
import os, sys, time
from seqbraid import Mesh
from tests.helpers.toy import ListSource, ToyEncoder, make_loader, records

class Slow(ToyEncoder):
    def encode(self, record):
        if record["id"] == 7:
            print("worker", os.getpid(), flush=True)
            time.sleep(600)
        return super().encode(record)

if __name__ == "__main__":
    source = ListSource(records(64))
    loader = make_loader(source, Slow, Mesh(), row_tokens=32, rows_per_step=2, workers=2, epochs=None)
    for step in loader:
        pass
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("worker "), "the busy worker"
        assert len(session(parent.pid)) > 2
        parent.kill()
        end = monotonic() + 60  # one may still be starting, on a busy machine
        while session(parent.pid) - {parent.pid} and monotonic() < end:
            sleep(0.05)
        assert not session(parent.pid) - {parent.pid}


def session(leader: int) -> set[int]:
    """The processes of a session, workers and whatever forks them included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found
