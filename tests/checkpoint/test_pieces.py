"""Pieces that are not in their files as the manifest says, copies beside a checkpoint, the best one of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoint import find
from paceline.checkpoint.find import find_best
from paceline.checkpoint.formats import piece_problems
from paceline.checkpoint.manifest import Manifest, SavedFile, SavedPiece, SavedTensor, manifest_text
from paceline.checkpoint.storage import LocalFiles
from paceline.checkpoint.tensors import encode
from paceline.errors import CheckpointError
from paceline.shards import whole_region
from paceline_classic.best import copy_checkpoint


def manifest_of(**values: Any) -> Manifest:
    """A tensor of six halves in one file, and one of two numbers in another."""
    pieces = {"a": ("one.safetensors", (2, 3), "F16"), "b": ("two.safetensors", (2,), "F32")}
    tensors = {
        name: SavedTensor(shape=shape, dtype=dtype, pieces=(SavedPiece(file=file, region=whole_region(shape)),))
        for name, (file, shape, dtype) in pieces.items()
    }
    files = {file: SavedFile(num_bytes=1000, sha256="0" * 64) for file, _, _ in pieces.values()}
    return Manifest(step=7, position=0, world=1, tensors=tensors, files=files, values=values)


HALVES, FLOATS = torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2)


@pytest.mark.parametrize(
    ("one", "two", "problems"),
    [
        ({"a": HALVES}, {"b": FLOATS}, []),
        ({"a": HALVES, "more": FLOATS}, {"b": FLOATS}, []),
        ({"c": HALVES}, {"b": FLOATS}, ["one.safetensors has no a"]),
        ({"a": HALVES.float()}, {"b": FLOATS}, ["one.safetensors has a as F32, not F16"]),
        ({"a": HALVES[:1].clone()}, {"b": FLOATS}, ["one.safetensors has 6 bytes of a, not 12"]),
        (
            {"a": torch.zeros(3000, dtype=torch.float16)},
            {"b": FLOATS[:1].clone()},
            ["one.safetensors has 6,000 bytes of a, not 12", "two.safetensors has 4 bytes of b, not 8"],
        ),
    ],
)
def test_each_piece_is_in_its_file_at_its_full_size(
    one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], problems: list[str], tmp_path: Path
) -> None:
    save_file(one, tmp_path / "one.safetensors")
    save_file(two, tmp_path / "two.safetensors")
    assert piece_problems(tmp_path, manifest_of(), LocalFiles()) == problems
    left = [each for each in problems if not each.startswith("one")]
    assert piece_problems(tmp_path, manifest_of(), LocalFiles(), skip=["one.safetensors"]) == left


def test_a_file_that_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(b"short")
    found = piece_problems(tmp_path, manifest_of(), LocalFiles())
    assert found == [
        f"{tmp_path}/one.safetensors is not a safetensors file: it has 5 bytes",
        f"{tmp_path}/two.safetensors is not a safetensors file: it has 0 bytes",
    ]


# Copies.


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000007"
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    (path / "data").write_bytes(b"numbers")
    return path


def test_a_copy_shares_its_files_and_takes_the_place_of_an_older_one(checkpoint: Path) -> None:
    older = checkpoint.parent / "kept"
    older.mkdir()
    (older / "old").write_text("old")
    (checkpoint.parent / ".kept.new").mkdir()  # of one that was killed
    found = copy_checkpoint(checkpoint, "kept")
    assert found == older
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {"manifest.json": b"{}", "data": b"numbers"}
    assert (found / "data").samefile(checkpoint / "data")
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["kept", "step-00000007"]


def test_where_there_are_no_links_files_are_copied(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    found = copy_checkpoint(checkpoint, "kept")
    assert (found / "data").read_bytes() == b"numbers"
    assert not (found / "data").samefile(checkpoint / "data")


@pytest.mark.usefixtures("checkpoint")
def test_a_copy_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    missing = tmp_path / "step-00000009"
    with pytest.raises(CheckpointError) as told:
        copy_checkpoint(missing, "kept")
    assert str(told.value).startswith(f"cannot copy {missing} to {tmp_path / 'kept'}: ")
    assert str(told.value).endswith(f"\n  {missing} itself is complete")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


# The best.


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    checked: list[tuple[str, str]] = []
    monkeypatch.setattr(find, "verify_checkpoint", lambda path, depth: checked.append((path.name, depth)))
    monkeypatch.setattr(find, "find_checkpoint", lambda *_: tmp_path / "step-00000012")
    monkeypatch.setattr(find, "checked", checked, raising=False)
    return tmp_path


def write(folder: Path, step: int, **values: Any) -> None:
    path = folder / f"step-{step:08d}"
    path.mkdir()
    (path / "manifest.json").write_text(manifest_text(manifest_of(**{k: encode(v) for k, v in values.items()})))


def test_the_best_checkpoint_is_the_one_that_the_newest_names(run_folder: Path) -> None:
    write(run_folder, 12, best={"step": 7, "value": 0.5})
    write(run_folder, 7)
    assert find_best(run_folder) == run_folder / "step-00000007"
    assert find.checked == [("step-00000007", "full")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("best", [None, {}, {"step": -1}, {"step": "7"}, 7])
def test_a_run_without_a_best_one_says_how_to_have_one(best: Any, run_folder: Path) -> None:
    write(run_folder, 12, **({} if best is None else {"best": best}))
    with pytest.raises(CheckpointError, match="has no best checkpoint\n  evaluations on the way tell it\n  set train"):
        find_best(run_folder)


def test_a_best_one_that_was_not_kept_is_told(run_folder: Path) -> None:
    write(run_folder, 12, best={"step": 7})
    with pytest.raises(CheckpointError, match=r"of step 7, was not kept\n  checkpoint.keep newest ones are"):
        find_best(run_folder)
