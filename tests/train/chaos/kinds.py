"""All kinds of disturbance, by name."""

from __future__ import annotations

import random
from collections.abc import Callable

from .faults import (
    ask_one_rank,
    fill_the_disk,
    hang_up,
    interrupt,
    lose_a_file,
    start_twice,
    stop_a_worker,
    stop_all,
)
from .hosts import cut_a_host
from .job import Job
from .kills import (
    Kill,
    Pace,
    kill_all,
    kill_at_evaluation,
    kill_at_prefetch,
    kill_at_save,
    kill_at_start,
    kill_at_step,
)

KINDS: dict[str, Callable[[Job, random.Random, Pace], Kill]] = {
    "step": kill_at_step,
    "save": kill_at_save,
    "prefetch": kill_at_prefetch,
    "eval": kill_at_evaluation,
    "start": kill_at_start,
    "agent": kill_all,
    "term": stop_all,
    "int": interrupt,
    "hup": hang_up,
    "usr1": ask_one_rank,
    "worker": stop_a_worker,
    "shard": lose_a_file,
    "full": fill_the_disk,
    "twins": start_twice,
    "host": cut_a_host,
}
BY_HAND = ("agent", "term", "int", "hup", "usr1", "shard", "full", "host")
"""After these the command is given again; else torchrun starts the ranks again."""
GOES_ON = ("twins",)
"""After these the run goes on by itself."""
ONCE = ("host",)
"""These are done once in a trial, for they take long."""
