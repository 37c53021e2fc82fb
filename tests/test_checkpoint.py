"""Checkpoints: there whole or not at all, checked when they are read, and kept as many as asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import (
    TrainingState,
    copy_checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from paceline.errors import CheckpointError
from paceline.train.randomness import capture_random_states, restore_random_states

CPU = torch.device("cpu")


def make_state(step: int, **changes: Any) -> TrainingState:
    model = {"weight": torch.full((3, 2), float(step), dtype=torch.float64), "count": torch.tensor(step)}
    values: dict[str, Any] = {
        "step": step,
        "position": 8 * step,
        "model": model,
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "random": [capture_random_states(CPU)] * 2,
        "extra": {"loss": 0.5},
    }
    return TrainingState(**(values | changes))


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def everything(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Round trip.


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = make_state(7)
    path = save_checkpoint(tmp_path / "deep" / "folder", state)
    assert path == tmp_path / "deep" / "folder" / "step-00000007"
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.position, loaded.extra) == (7, 56, {"loss": 0.5})
    assert loaded.optimizer["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert torch.equal(loaded.model["weight"], state.model["weight"])
    assert loaded.model["weight"].dtype == torch.float64
    assert len(loaded.random) == 2


def test_random_states_come_back_through_a_file(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(1, random=[capture_random_states(CPU)]))

    def draw() -> tuple[list[float], list[float], float, float]:
        # A normal number leaves half a pair behind in numpy's and Python's state.
        return torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), random.random()

    first = draw()
    assert draw() != first
    restore_random_states(load_checkpoint(path).random[0], CPU)
    assert draw() == first


def test_the_manifest_names_what_is_there(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(3))
    manifest = json.loads((path / "manifest.json").read_text())
    assert {name: manifest[name] for name in ("schema", "step", "position", "world_size")} == {
        "schema": 1,
        "step": 3,
        "position": 24,
        "world_size": 2,
    }
    assert manifest["bytes"] == (path / "state.pt").stat().st_size
    assert everything(path) == ["manifest.json", "state.pt"]


# Damage.


@given(st.data())
@settings(max_examples=50)
def test_a_changed_byte_anywhere_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = save_checkpoint(tmp_path_factory.mktemp("run"), make_state(1, random=[]))
    file = path / "state.pt"
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(path)


def overwrite(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))


DAMAGE = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
    "an empty manifest": (lambda path: (path / "manifest.json").write_text(""), "cannot be read"),
    "half a manifest": (lambda path: (path / "manifest.json").write_text('{"schema": 1, "st'), "cannot be read"),
    "a list for a manifest": (lambda path: (path / "manifest.json").write_text("[1]"), "cannot be read"),
    "bytes that are no text": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "no hash": (lambda path: overwrite(path, sha256=None), "cannot be read"),
    "a newer schema": (lambda path: overwrite(path, schema=99), "has schema 99; this version reads 1"),
    "no state": (lambda path: (path / "state.pt").unlink(), "cannot be read"),
    "an empty state": (lambda path: (path / "state.pt").write_bytes(b""), "is damaged"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_told_as_such(damage: Any, message: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(2))
    damage(path)
    with pytest.raises(CheckpointError) as failure:
        load_checkpoint(path)
    assert message in str(failure.value)
    assert str(path) in str(failure.value)


def test_a_file_of_another_kind_under_a_matching_hash_is_told_too(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(2))
    for content in (b"not a torch file", b""):
        (path / "state.pt").write_bytes(content)
        overwrite(path, sha256=hashlib.sha256(content).hexdigest())
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(path)


class Stranger:
    """Something of the user's own code, which a checkpoint must not run when it is read."""


def test_what_could_not_be_read_again_is_told(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(2, extra={"thing": Stranger()}))
    with pytest.raises(CheckpointError, match=r"cannot be read(?s:.*)Stranger"):
        load_checkpoint(path)


# Atomic.


class Kill(BaseException):
    """The process ends here: nothing is cleaned up."""


def killed_at(monkeypatch: pytest.MonkeyPatch, target: str, *, after: int = 0) -> None:
    """Ends the process at the call of ``target`` that follows ``after`` others."""
    owner, _, name = target.rpartition(".")
    module: Any = {"Path": Path, "os": os, "checkpoint": __import__("paceline.checkpoint").checkpoint}[owner]
    original, calls = getattr(module, name), [0]

    def kill(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise Kill
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, kill)


MOMENTS = {
    "before anything": ("Path.mkdir", 0),
    "with an empty folder": ("checkpoint._write", 0),
    "before the state is on the disk": ("os.fsync", 0),
    "before the hash": ("checkpoint._digest", 0),
    "before the manifest": ("checkpoint._write_text", 0),
    "before the manifest is on the disk": ("os.fsync", 1),
    "before the rename": ("Path.rename", 0),
}


@pytest.mark.parametrize(("target", "after"), MOMENTS.values(), ids=MOMENTS.keys())
def test_a_kill_at_any_moment_leaves_the_older_checkpoints(
    target: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, make_state(step), keep=2)
    with monkeypatch.context() as patch:
        killed_at(patch, target, after=after)
        with pytest.raises(Kill):
            save_checkpoint(tmp_path, make_state(3), keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert load_checkpoint(find_checkpoint("auto", tmp_path)).step == 2
    # The same process number may come again, as in a container: what it left is no obstacle.
    save_checkpoint(tmp_path, make_state(3), keep=2)
    assert everything(tmp_path) == ["step-00000002", "step-00000003"]
    assert load_checkpoint(tmp_path / "step-00000003").step == 3


def failing(error: Exception) -> Any:
    def write(path: Path, payload: Any) -> None:
        path.write_bytes(b"half of " + str(payload)[:20].encode())
        raise error

    return write


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("unexpected pos 704 vs 598"), TypeError("cannot pickle")],
    ids=lambda error: type(error).__name__,
)
def test_a_save_that_raises_leaves_nothing_behind(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, make_state(1))
    monkeypatch.setattr("paceline.checkpoint._write", failing(error))
    with pytest.raises(CheckpointError, match="older checkpoints are intact") as failure:
        save_checkpoint(tmp_path, make_state(2))
    assert failure.value.__cause__ is error
    assert everything(tmp_path) == ["step-00000001"]
    assert load_checkpoint(tmp_path / "step-00000001").step == 1


def test_something_that_cannot_be_pickled_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write a checkpoint"):
        save_checkpoint(tmp_path, make_state(2, extra={"thing": (number for number in range(3))}))
    assert everything(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write a checkpoint"):
        save_checkpoint(tmp_path / "file", make_state(1))


def test_a_step_that_is_saved_again_replaces_the_older_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_state(1, position=5))
    save_checkpoint(tmp_path, make_state(1, position=6))
    assert load_checkpoint(tmp_path / "step-00000001").position == 6
    assert everything(tmp_path) == ["step-00000001"]


def test_a_replacement_that_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_state(1, position=5))
    monkeypatch.setattr("paceline.checkpoint._digest", failing_digest)
    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path, make_state(1, position=6))
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "step-00000001").position == 5


def renaming(error: type[BaseException]) -> Any:
    """Lets a folder step aside, and fails when the new one is to take its name."""
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(f".{os.getpid()}"):
            raise error
        return original(self, target)

    return rename


def test_a_replacement_that_cannot_take_the_name_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_state(1, position=5))
    monkeypatch.setattr(Path, "rename", renaming(PermissionError))
    with pytest.raises(CheckpointError, match="older checkpoints are intact"):
        save_checkpoint(tmp_path, make_state(1, position=6))
    assert everything(tmp_path) == ["step-00000001"]
    assert load_checkpoint(tmp_path / "step-00000001").position == 5


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older one is complete under another name, and so is the newer one."""
    save_checkpoint(tmp_path, make_state(1, position=5))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renaming(Kill))
        with pytest.raises(Kill):
            save_checkpoint(tmp_path, make_state(1, position=6))
    assert load_checkpoint(tmp_path / ".step-00000001.old").position == 5
    assert load_checkpoint(tmp_path / f".step-00000001.{os.getpid()}").position == 6


def failing_digest(path: Path) -> str:
    raise OSError(5, f"cannot read {path.name}")


# Retention.


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
@settings(max_examples=30)  # each saves for real, down to the disk
def test_the_newest_are_kept_and_always_the_one_just_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep: int
) -> None:
    """Steps need not rise: a run may be taken up again further back, in a folder that holds later ones."""
    folder = tmp_path_factory.mktemp("run")
    there: set[int] = set()
    for step in steps:
        assert load_checkpoint(save_checkpoint(folder, make_state(step, random=[]), keep=keep)).step == step
        there = {step, *sorted(there - {step}, reverse=True)[: keep - 1]}
        assert names(folder) == [f"step-{each:08d}" for each in sorted(there)]
        assert everything(folder) == names(folder)


def test_without_a_number_all_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        save_checkpoint(tmp_path, make_state(step))
    assert len(names(tmp_path)) == 5


def test_an_old_one_that_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_state(1))
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "step-00000001":
            raise PermissionError(13, "not yours")
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match=r"cannot remove .*step-00000001"):
        save_checkpoint(tmp_path, make_state(2), keep=1)
    assert load_checkpoint(tmp_path / "step-00000002").step == 2


# Lists and copies.


def test_only_complete_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save_checkpoint(tmp_path, make_state(step))
    (tmp_path / "step-00000200").mkdir()  # no manifest
    (tmp_path / ".step-00000300.17").mkdir()
    (tmp_path / "notes.txt").write_text("step-")
    assert names(tmp_path) == ["step-00000009", "step-00000010", "step-00000100"]
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_checkpoint_is_found_by_its_folder_its_run_or_auto(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", make_state(4))
    save_checkpoint(tmp_path / "checkpoints", make_state(3))
    assert find_checkpoint("auto", tmp_path) == path
    assert find_checkpoint(str(tmp_path), Path("elsewhere")) == path
    assert find_checkpoint(str(tmp_path / "checkpoints"), Path("elsewhere")) == path
    older = tmp_path / "checkpoints" / "step-00000003"
    assert find_checkpoint(str(older), Path("elsewhere")) == older
    with pytest.raises(CheckpointError, match=r"no checkpoint in (?s:.*)start without --resume"):
        find_checkpoint("auto", tmp_path / "nowhere")


def test_a_copy_is_left_alone_by_retention_and_replaced_by_the_next(tmp_path: Path) -> None:
    best = copy_checkpoint(save_checkpoint(tmp_path, make_state(1), keep=1), "best")
    save_checkpoint(tmp_path, make_state(2), keep=1)
    assert load_checkpoint(best).step == 1
    assert names(tmp_path) == ["step-00000002"]
    copy_checkpoint(tmp_path / "step-00000002", "best")
    assert load_checkpoint(best).step == 2
    assert everything(tmp_path) == ["best", "step-00000002"]


def test_a_copy_that_fails_leaves_the_older_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (save_checkpoint(tmp_path, make_state(step)) for step in (1, 2))
    copy_checkpoint(first, "best")

    def full_disk(source: Path, target: Path) -> Iterator[None]:
        Path(target).mkdir()
        raise OSError(28, f"No space left for {source.name}")

    monkeypatch.setattr("paceline.checkpoint.shutil.copytree", full_disk)
    with pytest.raises(CheckpointError, match="itself is complete"):
        copy_checkpoint(second, "best")
    assert load_checkpoint(tmp_path / "best").step == 1
    assert everything(tmp_path) == ["best", "step-00000001", "step-00000002"]


def test_a_state_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_state(1).step = 2  # type: ignore[misc]
