"""The mesh: ranks and coordinates are two names for one place, and groups along an axis cover every rank once."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.mesh import Mesh

MESHES = st.dictionaries(st.sampled_from(["replicate", "shard", "stage", "tensor"]), st.integers(1, 4), max_size=4).map(
    lambda sizes: Mesh.of(**sizes)
)


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh.of(replicate=2, shard=4)
    assert mesh.size == 8
    assert mesh.coordinates(5) == {"replicate": 1, "shard": 1}
    assert mesh.rank(replicate=1, shard=1) == 5
    assert mesh.rank(shard=3) == 3
    assert mesh.group(5, "shard") == (4, 5, 6, 7)
    assert mesh.group(5, "replicate") == (1, 5)
    assert mesh.groups("replicate") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert dict(mesh.axes) == {"replicate": 2, "shard": 4}
    assert str(mesh) == "mesh(replicate 2 x shard 4)"


@given(mesh=MESHES)
def test_coordinates_name_each_rank_once(mesh: Mesh) -> None:
    places = list(itertools.product(*(range(size) for _, size in mesh.axes)))
    names = [name for name, _ in mesh.axes]
    assert [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)] == places
    assert [mesh.rank(**dict(zip(names, place, strict=True))) for place in places] == list(range(mesh.size))
    assert list(mesh.coordinates(0)) == names


@given(mesh=MESHES, data=st.data())
def test_groups_along_an_axis_cover_every_rank_once(mesh: Mesh, data: st.DataObject) -> None:
    if not mesh.axes:
        return
    axis, size = data.draw(st.sampled_from(mesh.axes))
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert all(len(group) == size and list(group) == sorted(group) for group in groups)
    for group in groups:
        for place, rank in enumerate(group):
            assert mesh.group(rank, axis) == group
            assert mesh.coordinates(rank)[axis] == place
        others = [{k: v for k, v in mesh.coordinates(rank).items() if k != axis} for rank in group]
        assert all(other == others[0] for other in others)


@given(mesh=MESHES, data=st.data())
def test_groups_along_two_axes_share_one_rank(mesh: Mesh, data: st.DataObject) -> None:
    if len(mesh.axes) < 2:
        return
    (one, _), (two, _) = data.draw(st.permutations(mesh.axes))[:2]
    rank = data.draw(st.integers(0, mesh.size - 1))
    assert set(mesh.group(rank, one)) & set(mesh.group(rank, two)) == {rank}


def test_a_mesh_without_axes_is_one_rank() -> None:
    assert Mesh.of().size == 1
    assert Mesh.of().coordinates(0) == {}
    assert Mesh.of().rank() == 0


def test_a_mesh_is_a_value() -> None:
    mesh = Mesh.of(replicate=2, shard=2)
    assert mesh == Mesh.of(replicate=2, shard=2)
    assert mesh != Mesh.of(shard=2, replicate=2)
    assert {mesh: 1}[pickle.loads(pickle.dumps(mesh))] == 1


def test_an_axis_of_no_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\{'shard': 0\}: every axis has at least one rank"):
        Mesh.of(replicate=2, shard=0)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_off_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} is not on a mesh of 8 ranks"):
        Mesh.of(replicate=2, shard=4).coordinates(rank)


@pytest.mark.parametrize("place", [-1, 4])
def test_a_coordinate_off_the_mesh_is_refused(place: int) -> None:
    with pytest.raises(UsageError, match=f"shard = {place} is off the mesh: the axis has 4 ranks"):
        Mesh.of(replicate=2, shard=4).rank(shard=place)


def test_an_unknown_axis_is_refused() -> None:
    mesh = Mesh.of(replicate=2)
    for call in (mesh.groups, lambda axis: mesh.group(0, axis), lambda axis: mesh.rank(**{axis: 0})):
        with pytest.raises(UsageError, match=r"no axis .*'stage'.* on mesh\(replicate 2\)"):
            call("stage")
