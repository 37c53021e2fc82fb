"""Checkpoints behind fsspec URLs: saved, killed at any point, found, resharded and removed as local ones are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from trained_gpt import LLAMA, Save, save_trained

from paceline.checkpoint.find import (
    Retention,
    apply_retention,
    clear_leftovers,
    find_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from paceline.checkpoint.manifest import MANIFEST, State
from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.storage import RemoteFiles, absolute_path, is_remote, storage_of, url_of
from paceline.checkpoint.tools.audit import audit
from paceline.checkpoint.tools.listing import compare, list_folder
from paceline.checkpoint.tools.stream import reshard
from paceline.checkpoint.write import SaveTarget, commit, write_part
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CheckpointError, UsageError
from paceline.plan.layout import Layout
from paceline.shards import Shard, whole_region


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, and one on disk that fsspec reaches as it does a store."""
    yield Path(f"memory://{tmp_path.name}/run") if request.param == "memory" else Path(f"file://{tmp_path}/run")
    fsspec.filesystem("memory").store.clear()


in_file, in_memory = (
    pytest.mark.parametrize("place", [first, pytest.param(other, marks=pytest.mark.exhaustive)], indirect=True)
    for first, other in (("file", "memory"), ("memory", "file"))
)


def test_paths_keep_their_protocol() -> None:
    assert url_of(Path("s3://bucket/run") / "step-1") == "s3://bucket/run/step-1"
    assert url_of(Path("file:///tmp/x")) == "file:///tmp/x"
    assert is_remote("gs://bucket")
    assert not is_remote("runs/a")
    assert not is_remote("C:/runs")
    assert absolute_path(Path("s3://bucket/run")) == Path("s3://bucket/run")
    with pytest.raises(UsageError, match="nosuch://bucket cannot be opened"):
        storage_of(Path("nosuch://bucket"))


@in_file
def test_ranks_save_into_a_url_and_any_tool_reads_it(saved: Save, place: Path) -> None:
    run_virtual(lambda comm: save_trained(comm, place, "fsdp", LLAMA), 2)
    found = find_checkpoint(str(place), place)
    assert found == place / "step-00000007"
    assert storage_of(place).names(place) == ["step-00000007"]
    assert audit(found).is_good
    assert compare(open_checkpoint(saved()), open_checkpoint(found)).is_same_state
    moved = reshard(open_checkpoint(found), place / "moved", Layout(strategy="fsdp").for_ranks(3))
    assert compare(open_checkpoint(saved()), open_checkpoint(moved)).is_same_state
    assert [each.step for each in list_folder(place, now=0.0)] == [7]


@in_memory
def test_a_flipped_bit_in_a_store_is_found(saved: Save, place: Path) -> None:
    path = reshard(open_checkpoint(saved()), place, Layout(strategy="fsdp").for_ranks(1))
    storage = storage_of(place)
    content = bytearray(storage.read(path / "rank-00000.f32.safetensors"))
    content[-5] ^= 8
    storage.write(path / "rank-00000.f32.safetensors", [bytes(content)])
    with pytest.raises(CheckpointError, match=r"rank-00000\.f32\.safetensors is damaged"):
        verify_checkpoint(path)


class Killed(BaseException):
    """Stands for the end of the process."""


class Dying:
    """A file system whose user is killed before its n-th change."""

    def __init__(self, files: Any, changes: int) -> None:
        self._files = files
        self._left = changes

    def __getattr__(self, name: str) -> Any:
        if name in ("copy", "rm_file", "rm", "open"):
            self._left -= 1
            if self._left < 0:
                raise Killed
        return getattr(self._files, name)


@in_memory
def test_killed_at_any_change_the_older_one_is_found_whole(saved: Save, place: Path) -> None:
    storage = storage_of(place)
    storage.rename(
        reshard(open_checkpoint(saved()), place, Layout(strategy="fsdp").for_ranks(1)), place / "step-00000003"
    )
    plain = State(step=7, position=0, own={"dict": []})
    share = Shard(name="model/a", region=whole_region((3,)), tensor=torch.arange(3))
    num_kills = 0
    for changes in range(60):
        dying = RemoteFiles(Dying(fsspec.filesystem(str(place).partition(":")[0]), changes))
        target = SaveTarget(folder=place, step=7, rank=0, world=1, token="t", storage=dying)
        try:
            write_part(target, [share], plain)
            commit(target, plain)
        except Killed:
            num_kills += 1
            whole = [path.name for path in list_checkpoints(place)]
            assert whole[0] == "step-00000003"
            for name in whole:
                verify_checkpoint(place / name)
            clear_leftovers(place)
            assert all(not name.startswith(".") for name in storage.names(place))
            continue
        break
    else:
        pytest.fail("it never came to its end")
    assert num_kills > 5
    assert [path.name for path in list_checkpoints(place)] == ["step-00000003", "step-00000007"]


@in_file
def test_what_is_no_longer_kept_goes_manifest_first(saved: Save, place: Path) -> None:
    storage = storage_of(place)
    for step in (1, 2, 3):
        made = reshard(open_checkpoint(saved()), place, Layout(strategy="fsdp").for_ranks(1))
        storage.rename(made, place / f"step-{step:08d}")
    assert apply_retention(place, 3, Retention(last=1), storage) == [1, 2]
    assert storage.names(place) == ["step-00000003"]
    assert storage.size(place / "step-00000003" / MANIFEST) is not None
