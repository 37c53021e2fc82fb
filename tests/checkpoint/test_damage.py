"""A flipped bit in any file of a checkpoint: found, named, and passed over; older ones are taken."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from trained_gpt import CLASSIC, save_trained

from paceline.checkpoint import find_checkpoint, list_checkpoints, verify_checkpoint
from paceline.checkpoint.find import PassedOver
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints of two ranks."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    for step in (3, 7):
        run_virtual(lambda comm, step=step: save_trained(comm, tmp_path, "zero2", CLASSIC, step), 2)
    assert len(list_checkpoints(tmp_path)) == 2
    return tmp_path


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def check_flips(folder: Path, number: int) -> None:
    """Flips bits of every file of the newest checkpoint, one at a time."""
    newest, draw = folder / "step-00000007", random.Random(number)
    files = sorted(newest.iterdir())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        for _ in range(number):
            place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
            flip(path, place, bit)
            passed: list[PassedOver] = []
            assert find_checkpoint("auto", folder, "full", passed.append) == folder / "step-00000003"
            assert [each.path for each in passed] == [newest]
            named = "manifest" if path.name == "manifest.json" else path.name
            assert named in passed[0].reason, (path.name, place, bit, passed[0].reason)
            with pytest.raises(CheckpointError):
                verify_checkpoint(newest)
            flip(path, place, bit)
    assert find_checkpoint("auto", folder) == newest


def test_a_flipped_bit_in_any_file_is_found_and_named(folder: Path) -> None:
    check_flips(folder, 3)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_flipped_bits_in_every_file(folder: Path, record_property: Callable[[str, object], None]) -> None:
    record_property("faults", 200)
    check_flips(folder, 200)


def test_a_file_that_is_gone_or_shorter_is_named(folder: Path) -> None:
    newest = folder / "step-00000007"
    data = next(newest.glob("*.safetensors"))
    content = data.read_bytes()
    for damage in (content[:-1], b""):
        data.write_bytes(damage)
        passed: list[PassedOver] = []
        assert find_checkpoint("auto", folder, "fast", passed.append).name == "step-00000003"
        assert data.name in passed[0].reason
    data.unlink()
    assert find_checkpoint("auto", folder, "fast").name == "step-00000003"
