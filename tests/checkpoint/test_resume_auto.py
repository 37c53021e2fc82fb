"""``--resume auto`` never dies of one bad checkpoint while an older one is whole, and says why it took that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trained_gpt import CLASSIC, change_manifest, make_model, rehash, save_trained

from paceline.checkpoint import find_checkpoint, list_checkpoints, load
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    run_virtual(lambda comm: save_trained(comm, folder, "ddp", CLASSIC), 2)
    return folder / "step-00000007"


@pytest.fixture
def newer(older: Path, tmp_path: Path) -> Path:
    shutil.copytree(older, tmp_path / older.name)
    return Path(shutil.copytree(older, tmp_path / "step-00000009"))


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def pipe_as_manifest(path: Path) -> None:
    no_manifest(path)
    os.mkfifo(path / "manifest.json")


def folder_as_manifest(path: Path) -> None:
    no_manifest(path)
    (path / "manifest.json").mkdir()


def deep_line(path: Path) -> None:
    text = '{\n  "line": [[' + "[" * 5_000 + "]" * 5_000 + "]],\n"
    (path / "manifest.json").write_text(text)


def infinite_step(path: Path) -> None:
    change_manifest(path, lambda found: found.update(step=float("inf")))


def lost_piece(path: Path) -> None:
    change_manifest(path, lambda found: found["tensors"]["model/norm.weight"]["pieces"].clear())


def lost_tensor(path: Path) -> None:
    name = "rank-00000.f32.safetensors"
    content = (path / name).read_bytes()
    (path / name).write_bytes(content.replace(b'"model/layers.0.', b'"model/layers.9.'))
    rehash(path, name)


def lost_values(path: Path) -> None:
    (path / "rank-00001.json").write_text('{"values": {"dict": 3}}')
    rehash(path, "rank-00001.json")


def loop(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.name)


def file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


DAMAGES: dict[Callable[[Path], None], str] = {
    no_manifest: "it has no manifest.json, which a save writes last",
    pipe_as_manifest: "it is a named pipe, and not a file",
    folder_as_manifest: "Is a directory",
    deep_line: "is no manifest",
    infinite_step: "step is a number, and not from 0 to",
    lost_piece: "model/norm.weight: 0 of 32 elements are saved",
    lost_tensor: "has no model/layers.0.",
    lost_values: "a value of a checkpoint is damaged",
    loop: "Too many levels of symbolic links",
    file: "it has no manifest.json",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_the_older_one_is_taken_and_the_reason_is_told(
    newer: Path, older: Path, damage: Callable[[Path], None]
) -> None:
    damage(newer)
    told: list[str] = []
    assert find_checkpoint("auto", newer.parent, "full", lambda each: told.append(str(each))).name == older.name
    assert len(told) == 1
    assert told[0].startswith("passed over step-00000009: ")
    assert DAMAGES[damage] in told[0]


def test_names_that_only_look_like_steps_harm_nobody(newer: Path) -> None:
    (newer.parent / ("step-" + "9" * 200)).mkdir()
    (newer.parent / "step-١٢").mkdir()
    assert list_checkpoints(newer.parent)[-1] == newer
    assert find_checkpoint("auto", newer.parent) == newer


def test_a_checkpoint_without_its_files_is_passed_over_whatever_is_verified(newer: Path, older: Path) -> None:
    (newer / "rank-00000.json").unlink()
    assert find_checkpoint("auto", newer.parent, "none").name == older.name


def test_a_loop_is_warned_of_what_it_passes_over(newer: Path) -> None:
    lost_piece(newer)
    engine = parallelize(make_model(CLASSIC), SoloCommunicator(torch.device("cpu")), "ddp")
    with pytest.warns(UserWarning, match="passed over step-00000009: .*elements are saved"):
        assert load(newer.parent, engine).step == 7


@pytest.mark.parametrize("damage", [pipe_as_manifest, loop], ids=lambda each: each.__name__)
def test_a_folder_behind_a_url_is_no_way_around_it(newer: Path, older: Path, damage: Callable[[Path], None]) -> None:
    pytest.importorskip("fsspec")
    damage(newer)
    assert find_checkpoint(f"file://{newer.parent}", newer.parent).name == older.name
