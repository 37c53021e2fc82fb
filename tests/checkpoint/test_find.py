"""Finding the newest checkpoint that is whole, whatever happened to the others."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import CheckpointWriter, State, find_checkpoint, list_checkpoints, verify_checkpoint
from paceline.comm.solo import SoloCommunicator
from paceline.errors import CheckpointError
from paceline.shards import Shard, whole_region


def save(folder: Path, step: int) -> Path:
    values = torch.arange(30, dtype=torch.float32) * step
    shard = Shard(name="model/weight", region=whole_region((30,)), tensor=values)
    state = State(step=step, position=step, shards=[shard], values={"a": [1, "b"]}, own={"c": 0.5})
    return CheckpointWriter(folder, SoloCommunicator(torch.device("cpu"))).save(state)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2, 10):
        save(folder, step)
    return folder


def test_names_are_found_in_any_of_their_ways(three: Path) -> None:
    newest = three / "step-00000010"
    for where in (str(newest), str(three), str(three.parent)):
        assert find_checkpoint(where, Path("nowhere")) == newest
    assert find_checkpoint("auto", three.parent) == newest
    assert find_checkpoint(str(three / "step-00000002"), three) == three / "step-00000002"
    assert [path.name for path in list_checkpoints(three)] == [f"step-{step:08d}" for step in (1, 2, 10)]


def test_without_any_the_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in (.|\n)*start without --resume"):
        find_checkpoint("auto", tmp_path)
    assert list_checkpoints(tmp_path / "none") == []


@settings(max_examples=40)
@given(data=st.data())
def test_a_flipped_bit_in_any_file_is_found(three: Path, data: st.DataObject) -> None:
    path = three / "step-00000010"
    name = data.draw(st.sampled_from(sorted(each.name for each in path.iterdir())))
    content = (path / name).read_bytes()
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    told: list[str] = []
    try:
        (path / name).write_bytes(changed)
        found = find_checkpoint("auto", three, tell=lambda passed: told.append(str(passed)))
    finally:
        (path / name).write_bytes(content)
    assert found == three / "step-00000002"
    assert [text.partition(":")[0] for text in told] == ["passed over step-00000010"]


@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "no manifest", "other schema", "no json"])
def test_each_damage_is_named(tmp_path: Path, damage: str) -> None:
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    file, manifest = path / "rank-00000.f32.safetensors", path / "manifest.json"
    reason = {
        "cut": "bytes, not",
        "longer": "bytes, not",
        "gone": "is missing",
        "no manifest": "it has no manifest.json, which a save writes last",
        "other schema": "has schema 99",
        "no json": "is no manifest",
    }[damage]
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "longer":
        file.write_bytes(file.read_bytes() + b"1")
    elif damage == "gone":
        file.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "other schema":
        manifest.write_text(json.dumps({"schema": 99}))
    else:
        manifest.write_text("{")
    told: list[str] = []
    assert find_checkpoint("auto", tmp_path, "fast", lambda passed: told.append(passed.reason)) == older
    assert len(told) == 1
    assert reason in told[0]
    with pytest.raises(CheckpointError):
        verify_checkpoint(path, "fast")


def test_when_none_is_whole_every_reason_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "rank-00000.json").unlink()
    with pytest.raises(CheckpointError) as failure:
        find_checkpoint("auto", tmp_path)
    lines = str(failure.value).splitlines()
    assert lines[0] == "no checkpoint is whole"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [f"passed over step-0000000{step}" for step in (2, 1)]


def test_a_fast_check_reads_no_tensors(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = path / "rank-00000.f32.safetensors"
    content = bytearray(file.read_bytes())
    content[random.Random(1).randrange(len(content) // 2, len(content))] ^= 1
    file.write_bytes(content)
    assert verify_checkpoint(path, "fast").step == 1
    with pytest.raises(CheckpointError, match="its hash is not the manifest's"):
        verify_checkpoint(path, "full")


def test_looking_for_a_checkpoint_takes_no_torch(three: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from paceline.checkpoint import find_checkpoint; "
        "print(find_checkpoint('auto', Path(sys.argv[1])).name, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(three)], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["step-00000010", "False"]
