"""The mesh's arithmetic."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from seqbraid import Mesh
from seqbraid.mesh import AXES, TABLE
from seqbraid.train.config import MeshConfig
from tests.helpers import ranks


def test_every_rank_has_its_own_place_and_ulysses_ranks_are_neighbours() -> None:
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "ring": 2, "ulysses": 2, "tp": 2}
    meshes = [Mesh(**sizes, rank=rank, world_size=64) for rank in range(64)]
    places = [tuple(mesh.axis_rank(axis) for axis in sizes) for mesh in meshes]
    assert places == list(itertools.product(range(2), repeat=6))
    assert [mesh.sequence_rank for mesh in meshes[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert meshes[40].data_rank == 1 and meshes[0].data_world_size == 4


def test_one_rank_speaks_for_all_that_see_the_same_samples() -> None:
    """Whatever axis is added, no label is counted twice."""
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "ring": 2, "ulysses": 1, "tp": 2}
    meshes = [Mesh(**sizes, rank=rank, world_size=48) for rank in range(48)]
    labels = [[10 ** meshes[rank].data_rank] for rank in range(48)]
    assert all(mesh.sum_over_data(labels) == [111111] for mesh in meshes)
    leaders = meshes[0].leaders
    assert [meshes[rank].data_rank for rank in leaders] == list(range(6))
    assert all(meshes[rank].axis_rank(axis) == 0 for rank in leaders for axis in ("pp", "ring", "tp"))


def groups(sizes: dict[str, int], names: list[str]) -> dict[str, list[int]]:
    mesh = Mesh(**sizes)
    mesh.cpu_group  # noqa: B018  # joins the job
    found = {name: dist.get_process_group_ranks(mesh.device_meshes[name].get_group()) for name in names}
    found["sum"] = [int(mesh.sum_over_parts(torch.tensor(10.0**mesh.rank)))]
    return found


def test_parts_are_summed_over_the_ranks_that_hold_them() -> None:
    """Replicas hold the same parts; the experts are shared by neighbours."""
    for rank, found in enumerate(ranks.run(groups, 4, {"dp_replicate": 2, "tp": 2}, ["parts", "tp"])):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert found == {"parts": pair, "tp": pair, "sum": [11 if rank < 2 else 1100]}
    for rank, found in enumerate(ranks.run(groups, 4, {"dp_shard": 4, "ep": 2}, ["parts", "ep", "efsdp"])):
        assert found["parts"] == [0, 1, 2, 3] and found["sum"] == [1111]
        assert found["ep"] == ([0, 1] if rank < 2 else [2, 3])
        assert found["efsdp"] == ([0, 2] if rank % 2 == 0 else [1, 3])


def test_one_table_of_axes() -> None:
    """The help of the mesh and of the configuration is the table's."""
    assert tuple(axis.name for axis in TABLE) == AXES
    for axis in TABLE:
        assert f"{axis.name}: {axis.what}" in str(Mesh.__doc__)
    assert tuple(field.name for field in fields(MeshConfig)) == (*AXES, "ep")
    source = inspect.getsource(MeshConfig)
    for axis in TABLE:
        help_text = source.partition(f"    {axis.name}: int = ")[2].splitlines()[1]
        assert help_text.strip(' "').startswith(f"{axis.what[0].upper()}{axis.what[1:]}")
    mesh = Mesh(dp_replicate=2, ring=2, ep=2, rank=1, world_size=4)
    assert Mesh(**mesh.sizes, rank=1, world_size=4) == mesh


def test_dp_shard_takes_the_rest() -> None:
    assert Mesh(ring=2, dp_shard=-1, rank=0, world_size=8).dp_shard == 4


def test_torchrun_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    mesh = Mesh(ring=2, ulysses=2)
    assert (mesh.ring_rank, mesh.ulysses_rank) == (1, 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ring": 2}, "needs 2 processes .* world size is 1"),
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"dp_shard": -2}, "dp_shard=-2"),
        ({"dp_shard": -1, "ring": 3, "world_size": 8}, "3 does not divide the world size 8"),
        ({"dp_shard": 4, "ep": 3, "world_size": 4}, "use one of 1, 2, 4"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(**sizes)
