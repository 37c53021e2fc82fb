"""What memory a save takes: none at once, and in the background one copy of what a rank writes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import CheckpointWriter, State, verify_checkpoint
from paceline.comm.solo import SoloCommunicator
from paceline.shards import Shard, whole_region

CPU = torch.device("cpu")
SHARD = 64 * 2**20
EXTRA = SHARD // 10  # what a save may take besides: a sixteenth of the state would still be seen


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak() -> int:
    """Sets the kernel's high-water mark of this process to what is resident now, which it returns."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        resident, peak = status("VmRSS"), status("VmHWM")
    except (OSError, StopIteration):
        pytest.skip("this kernel does not tell a process its peak")
    if peak - resident > EXTRA // 4:
        pytest.skip("this kernel does not reset the peak")
    return resident


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setattr("os.fsync", lambda _: None)
    tensors = {f"model/{number}": torch.ones(SHARD // 16) for number in range(4)}
    shards = [Shard(name=name, region=whole_region(t.shape), tensor=t) for name, t in tensors.items()]
    return State(step=1, position=0, shards=shards)


def test_a_save_at_once_takes_none(tmp_path: Path, state: State) -> None:
    writer = CheckpointWriter(tmp_path, SoloCommunicator(CPU))
    before = reset_peak()
    writer.save(state)
    assert status("VmHWM") - before < EXTRA


def test_a_save_in_the_background_takes_one_copy(tmp_path: Path, state: State) -> None:
    writer = CheckpointWriter(tmp_path, SoloCommunicator(CPU))
    before = reset_peak()
    assert writer.reserve(state)
    path = writer.save(state, in_background=True)
    writer.finish()
    first = writer._stage.buffer.data_ptr()
    writer.save(state, in_background=True)  # in the same memory
    writer.finish()
    assert writer._stage.buffer.data_ptr() == first
    assert SHARD * 0.9 < status("VmHWM") - before < SHARD + EXTRA
    verify_checkpoint(path)


def test_nothing_is_reserved_for_what_is_small(tmp_path: Path, state: State) -> None:
    writer = CheckpointWriter(tmp_path, SoloCommunicator(CPU))
    assert not writer.reserve(state, at_least=SHARD + 1)
    assert writer._stage.buffer.numel() == 0
