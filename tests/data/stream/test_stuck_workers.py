"""A worker that does not go forward is named with its sample, and ended; who waits for it can be stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import islice
from typing import Any

import pytest

from seqbraid.comm.whereabouts import Stopped, Whereabouts
from seqbraid.data.stream.loader import Loader
from seqbraid.mesh import Mesh
from tests.helpers.loaders import data_workers
from tests.helpers.toy import ListSource, ToyEncoder, ids, make_loader, records

FATE = "endless"


class Endless(ToyEncoder):
    """Does not come back from a record of that fate, nor does it give up."""

    def length(self, record: dict[str, Any]) -> int:
        while record["fate"] == FATE:
            time.sleep(0.01)
        return super().length(record)


def loader(fates: dict[int, str], where: Whereabouts | None = None, limit_s: float | None = 1.0) -> Loader:
    return make_loader(
        ListSource(records(400, fates)), Endless, Mesh(), row_tokens=32, rows_per_step=2, workers=2,
        epochs=1, shuffle=False, sample_limit_s=limit_s, buffer_size=16, where=where,
    )  # fmt: skip


def test_a_sample_that_never_ends_is_named() -> None:
    mine = loader({7: FATE})
    with pytest.raises(RuntimeError) as raised:
        next(mine)
    text = str(raised.value)
    assert "has been at toy.jsonl:8 for" in text and "timeouts.loader=1" in text
    assert "chat template with an endless loop" in text
    mine.close()
    assert not data_workers()


def test_a_stopped_worker_is_named_also_if_it_is_between_samples() -> None:
    mine = loader({})
    next(mine)
    for worker in data_workers():
        os.kill(worker.pid or 0, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"data worker \d .* the process is stopped \(SIGSTOP\)"):
        list(mine)
    mine.close()
    assert not data_workers()


def test_who_waits_for_workers_can_be_stopped_and_goes_on_later_where_it_was() -> None:
    where = Whereabouts()
    mine = loader({300: FATE}, where, limit_s=None)
    given = list(islice(mine, 3))
    threading.Timer(1.0, setattr, (where, "stop", True)).start()
    with pytest.raises(Stopped):
        for data in mine:
            given.append(data)
    state = mine.state_dict()
    mine.close()
    assert not data_workers()
    whole = list(loader({}, limit_s=60.0))
    again = loader({})
    again.load_state_dict(state)
    both = [ids(data.rows) for data in given] + [ids(data.rows) for data in again]
    assert both == [ids(data.rows) for data in whole]


def test_samples_that_go_forward_count_as_moves() -> None:
    where = Whereabouts()
    where.at("waiting for data")
    before = where.place.since
    next(loader({}, where))
    assert where.place.since > before and where.place.doing == "waiting for data"
