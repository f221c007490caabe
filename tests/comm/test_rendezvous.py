"""Ranks meet in a store that the dead have written to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from seqbraid.comm.rendezvous import meet


def test_ranks_meet_past_what_the_dead_left_in_the_store() -> None:
    store = TCPStore("localhost", 0, is_master=True)
    clients = [TCPStore("localhost", store.port, is_master=False) for _ in range(3)]
    limit = timedelta(seconds=30)
    names: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
            store.set("rank/1", "somebody who died before an answer came")
            came = [pool.submit(meet, clients[rank], rank, 3, limit) for rank in order]
            found = {future.result() for future in came}
            assert len(found) == 1
            names += found
    assert len(set(names)) == 3


def test_ranks_do_not_wait_for_ever() -> None:
    store = HashStore()
    store.set("rank/1", "dead")
    told: list[str] = []
    with pytest.raises(TimeoutError, match="ranks 1, 2 did not join within"):
        meet(store, 0, 3, timedelta(seconds=0.2), told.append)
    assert set(told) == {"ranks 1, 2"}
