"""Manifests that were written to do harm, and damage with good hashes: every command refuses them."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_gpt import CLASSIC, change_manifest, make_model, rehash, save_trained

from paceline.checkpoint import find_checkpoint, load
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.errors import CheckpointError

# torch leaves the files of redirected output to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

Call = Callable[..., Any]
FILE = "rank-00001.f32.safetensors"
NAME = "model/layers.0.mlp.up.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_virtual(lambda comm: save_trained(comm, folder, "fsdp", CLASSIC), 2)
    return folder / "step-00000007"


@pytest.fixture
def bad(whole: Path, project: Path) -> Path:
    """A copy, to be made bad."""
    return Path(shutil.copytree(whole, project / "bad" / whole.name))


def absolute(found: dict[str, Any]) -> None:
    found["files"]["/etc/passwd"] = found["files"].pop(FILE)


def upward(found: dict[str, Any]) -> None:
    found["files"]["../../secret"] = found["files"].pop(FILE)


def piece_elsewhere(found: dict[str, Any]) -> None:
    found["tensors"][NAME]["pieces"][0]["file"] = "../../secret"


def endless(found: dict[str, Any]) -> None:
    found["tensors"][NAME]["shape"] = [2**60]
    found["tensors"][NAME]["pieces"] = [{"file": FILE, "begin": 0, "end": 2**60}]


def endless_owed(found: dict[str, Any]) -> None:
    found["tensors"]["compression/a"] = {"dtype": "F32", "shape": [2**59], "pieces": []}


def past_the_end(found: dict[str, Any]) -> None:
    found["tensors"][NAME]["pieces"][0]["end"] += 10**6


def number(found: dict[str, Any]) -> None:
    found["step"] = 10**90


def nested(found: dict[str, Any]) -> None:
    for _ in range(150):
        found["about"] = {"a": {"b": found["about"]}}


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("inspect", "{}"),
    ("verify", "{}"),
    ("diff", "{}", "{}"),
    ("export", "{}", "out"),
    ("export", "{}", "out.pt", "--fast"),
    ("reshard", "{}", "out", "--ranks", "3"),
    ("reshard", "{}", "out", "--ranks", "3", "--fast"),
)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (absolute, "'/etc/passwd' leads out of the folder"),
        (upward, "'../../secret' leads out of the folder"),
        (piece_elsewhere, "is in ../../secret, which is none of its files"),
        (endless, "its tensors would have"),
        (endless_owed, "compression/a has 2,305,843,009,213,693,952 bytes"),
        (past_the_end, "elements"),
        (number, "step is 1000"),
        (nested, "nested more than 200 levels deep"),
    ],
)
def test_manifests_that_cannot_be_are_refused_by_every_command(
    bad: Path, call: Call, project: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    change_manifest(bad, change)
    for words in COMMANDS:
        called = call("checkpoint", *(word.format(bad) for word in words))
        assert called.code == 2, (words, called)
        assert told in called.err, (words, called)
    listed = call("checkpoint", "ls", str(bad.parent))
    assert (listed.code, told in listed.out) == (1, True)
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        find_checkpoint("auto", bad.parent)
    assert not [path for path in project.iterdir() if "out" in path.name]


def plant(bad: Path, kind: str) -> None:
    """Puts something in the place of a file that is no file of the checkpoint."""
    (bad / FILE).unlink()
    if kind == "pipe":
        os.mkfifo(bad / FILE)
    elif kind == "device":
        (bad / FILE).symlink_to("/dev/zero")
    else:
        (bad.parent / "secret").write_bytes(b"secret")
        (bad / FILE).symlink_to("../secret")
    if kind != "link":  # a pipe and a device have a size of 0
        change_manifest(bad, lambda found: found["files"][FILE].update(bytes=0))


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_files_that_are_elsewhere_or_no_files_are_refused_at_once(
    bad: Path, call: Call, project: Path, kind: str
) -> None:
    plant(bad, kind)
    for words in COMMANDS[1:]:
        called = call("checkpoint", *(word.format(bad) for word in words))
        assert called.code in (1, 2), (words, called)
        shown = called.out + called.err
        assert any(each in shown for each in ("leads out of the folder", "bytes, and its tensors", "is damaged")), shown
    assert not [path for path in project.iterdir() if "out" in path.name]


def lose(found: dict[str, Any]) -> None:
    """Takes a piece of a tensor away."""
    assert len(found["tensors"][NAME]["pieces"]) > 1
    found["tensors"][NAME]["pieces"].pop()


def twice(found: dict[str, Any]) -> None:
    """Moves a piece, so that some elements are there twice and others not at all; their number is right."""
    second = max(found["tensors"][NAME]["pieces"], key=lambda piece: int(piece["begin"]))
    second.update(begin=second["begin"] - 1, end=second["end"] - 1)


@pytest.mark.parametrize(("change", "told"), [(lose, "elements are saved"), (twice, "are saved twice")])
def test_damage_is_not_laundered(
    bad: Path, call: Call, project: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    change_manifest(bad, change)
    for words in COMMANDS[2:]:
        called = call("checkpoint", *(word.format(bad) for word in words))
        assert called.code == 2, (words, called)
        assert f"{NAME}: " in called.err
        assert told in called.err
    verified = call("checkpoint", "verify", str(bad))
    assert (verified.code, "DAMAGED" in verified.out) == (1, True)
    engine = parallelize(make_model(CLASSIC), SoloCommunicator(torch.device("cpu")), "ddp")
    with pytest.raises(CheckpointError, match=told):
        load(bad, engine, verify="none")
    assert not [path for path in project.iterdir() if "out" in path.name]


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.path,)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["manifest.json", FILE, "rank-00000.json", ".metadata"])
def test_no_command_unpickles_what_lies_in_a_checkpoint(bad: Path, call: Call, project: Path, name: str) -> None:
    (bad / name).write_bytes(pickle.dumps(Planted(project / "ran")))
    if name == "rank-00000.json":
        rehash(bad, name)
    run = Path(shutil.copytree(bad.parent, project / "runs" / "bad" / "checkpoints")).parent
    (run / "records").mkdir()
    for each in ("records/rank-0.jsonl", "plan.json", "prediction.json"):
        (run / each).write_bytes((bad / name).read_bytes())
    for number, words in enumerate((*COMMANDS, ("import", "{}", "out"))):
        called = call("checkpoint", *(word.format(bad).replace("out", f"out-{number}") for word in words))
        assert called.code in (0, 1, 2), (words, called)  # what a command does not read may be anything
    assert call("report", str(run)).code == 2
    assert not (project / "ran").exists()


@pytest.mark.parametrize("out", ["nowhere/out.safetensors", "nowhere/out.pt", "nowhere/dcp"])
def test_an_export_into_a_folder_that_is_not_there_makes_none(whole: Path, call: Call, project: Path, out: str) -> None:
    kind = ("--format", "dcp") if out.endswith("dcp") else ()
    called = call("checkpoint", "export", str(whole), out, *kind)
    assert called.code == 2
    assert "nowhere is no folder" in called.err
    assert "mkdir -p nowhere" in called.err
    assert not (project / "nowhere").exists()
    moved = call("checkpoint", "reshard", str(whole), "nowhere/deeper", "--ranks", "2")
    assert (moved.code, (project / "nowhere").exists()) == (2, False)


def test_what_a_failed_export_has_written_is_removed(bad: Path, call: Call, project: Path) -> None:
    content = (bad / FILE).read_bytes()
    (bad / FILE).write_bytes(content[:-2_000] + b"\0" * 2_000)
    before = sorted(path.name for path in project.iterdir())
    change_manifest(bad, lambda found: found["found"].update({"optimizer/norm.weight": {"dict": []}}))
    for words in (("out.pt", "--optimizer"), ("out", "--format", "dcp", "--optimizer"), ("out.safetensors",)):
        called = call("checkpoint", "export", str(bad), *words)
        assert called.code == 2, called
    assert sorted(path.name for path in project.iterdir()) == before
