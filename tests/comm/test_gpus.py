"""Each rank has a GPU of its own, or none is used and somebody says so."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import seqbraid as sb
from seqbraid.cli import main
from seqbraid.comm.gpus import Claim, problem
from seqbraid.comm.rendezvous import join_job
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.train.config import MeshConfig, TrainConfig
from seqbraid.train.demo.training import Settings, train_split
from seqbraid.train.setup import make_device, make_mesh
from tests.helpers.fake_gpus import fake_gpus, free_port
from tests.helpers.ranks import errors, run

ONE, EIGHT = ["GPU-0"], [f"GPU-{number}" for number in range(8)]


def chosen(seen_by: list[list[str]], port: int) -> tuple[str, list[int], str]:
    """The backend that a job would start, the GPU that this rank takes, and the run's device."""
    backend: list[str] = []

    def start(name: str, **_: Any) -> None:  # NCCL needs more of a GPU than that it is counted
        backend.append(name)

    with fake_gpus(seen_by[int(os.environ["RANK"])], port) as taken, pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "init_process_group", start)
        join_job()
        return backend[0], taken, str(make_device())


def test_each_rank_takes_a_gpu_of_its_own() -> None:
    assert run(chosen, 2, [EIGHT, EIGHT], free_port()) == [("nccl", [0], "cuda:0"), ("nccl", [1], "cuda:1")]


def test_ranks_that_are_shown_one_gpu_each_take_it() -> None:
    """As with CUDA_VISIBLE_DEVICES set per rank: number 0 on both, and not the same."""
    found = run(chosen, 2, [["GPU-4"], ["GPU-5"]], free_port())
    assert found == [("nccl", [0], "cuda:0"), ("nccl", [0], "cuda:0")]


def test_ranks_that_see_no_gpu_use_the_cpu() -> None:
    assert run(chosen, 2, [[], []], free_port()) == [("gloo", [], "cpu")] * 2


def own_loop(seen: list[str], port: int) -> None:
    with fake_gpus(seen, port):
        sb.parallelize(tiny_model("llama"), sb.Mesh(ring=2))


def training(seen: list[str], port: int) -> None:
    with fake_gpus(seen, port):
        make_mesh(TrainConfig(model="tiny:llama", mesh=MeshConfig(ring=2)))


@pytest.mark.parametrize("started", [own_loop, training])
def test_training_refuses_on_every_rank_where_gpus_are_too_few(started: Any) -> None:
    for raised in errors(started, 2, ONE, free_port()):
        assert raised.kind == "ValueError"
        assert "has 1 GPU for 2 ranks: ranks 0 and 1 would share one" in raised.message
        assert "--nproc-per-node" in raised.message and "CUDA_VISIBLE_DEVICES" in raised.message


def own_choice(seen: list[str], port: int) -> float:
    with fake_gpus(seen, port) as taken:
        dist.init_process_group("gloo")
        stock = tiny_model("llama")
        mesh = sb.Mesh(ring=2)
        out = sb.parallelize(stock, mesh)(sb.pack([{"input_ids": list(range(40))}], stock.config, mesh))
        out.loss.backward()
        assert not taken
        return float(out.mean_loss)


def test_a_user_who_starts_gloo_has_chosen_the_cpu() -> None:
    first, second = run(own_choice, 2, ONE, free_port())
    assert first == second


def verified(seen: list[str], port: int) -> tuple[int, str]:
    said = io.StringIO()
    with fake_gpus(seen, port), contextlib.redirect_stdout(said):
        status = main(["verify", "--model", "llama", "--ring", "2", "--lengths", "40,7"])
    return status, said.getvalue()


def test_verify_runs_on_the_cpu_and_says_so_once() -> None:
    (status, said), (other_status, other_said) = run(verified, 2, ONE, free_port())
    assert status == other_status == 0
    assert said.count("seqbraid verify runs on the CPU: ") == 1
    assert "has 1 GPU for 2 ranks" in said and "holds" in said
    assert other_said == ""


def test_verify_runs_on_the_cpu_where_every_rank_could_have_a_gpu() -> None:
    """The stock model beside it is there, and so are its samples."""
    (status, said), (other_status, other_said) = run(verified, 2, EIGHT, free_port())
    assert status == other_status == 0
    assert said.count("seqbraid verify runs on the CPU: the stock model") == 1 and "holds" in said
    assert other_said == ""


def shown(seen: list[str], port: int, out: Path) -> tuple[int, str]:
    said = io.StringIO()
    with fake_gpus(seen, port), contextlib.redirect_stdout(said):
        trained = train_split(Settings(1, 0, 2, out))
    return len(trained.losses), said.getvalue()


def test_the_demo_runs_on_the_cpu_and_says_so_once(tmp_path: Path) -> None:
    found = run(shown, 2, ONE, free_port(), tmp_path)
    assert [steps for steps, _ in found] == [1, 1]
    assert [said.count("seqbraid demo runs on the CPU: ") for _, said in found] == [1, 0]


def test_what_is_wrong_is_said() -> None:
    two = [Claim("a", "GPU-0", 2), Claim("a", "GPU-1", 2)]
    assert not problem(two) and not problem([Claim("a", "", 0)] * 2)
    assert not problem([*two, Claim("b", "GPU-2", 1)])
    assert problem([*two, Claim("a", "GPU-0", 2)]).startswith("a has 2 GPUs for 3 ranks: ranks 0 and 2")
    assert problem([*two, Claim("b", "", 0)]) == "rank 2 on b sees no GPU, but rank 0 does"
    assert problem([Claim("a", "GPU-0", 8)] * 2).endswith("would share one; is LOCAL_RANK set?")
