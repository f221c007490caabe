"""The mesh's arithmetic."""

from __future__ import annotations

import itertools

import pytest

from seqbraid import Mesh


def test_every_rank_has_its_own_place_and_ulysses_ranks_are_neighbours() -> None:
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "ring": 2, "ulysses": 2, "tp": 2}
    meshes = [Mesh(**sizes, rank=rank, world_size=64) for rank in range(64)]
    places = [tuple(mesh.axis_rank(axis) for axis in sizes) for mesh in meshes]
    assert places == list(itertools.product(range(2), repeat=6))
    assert [mesh.sequence_rank for mesh in meshes[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert meshes[40].data_rank == 1 and meshes[0].data_world_size == 4


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
