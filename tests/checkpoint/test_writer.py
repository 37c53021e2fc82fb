"""Saving, by all ranks together: at once and in the background, with ranks that fail and with leftovers."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import CheckpointWriter, Retention, State, list_checkpoints, open_checkpoint, verify_checkpoint
from paceline.checkpoint.storage import LocalFiles
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CheckpointError
from paceline.shards import Region, Shard, whole_region

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def make_state(comm: Communicator, step: int, **values: Any) -> State:
    """A tensor that ranks hold a third of each, one that all hold, and values of each kind."""
    rank, size = comm.rank, comm.size
    region = Region(shape=(size, 4), begin=4 * rank, end=4 * rank + 4)
    own = Shard(name="model/cut", region=region, tensor=torch.full((4,), float(rank + step)))
    big = torch.arange(40_000.0) + step
    shared = Shard(name="model/shared", region=whole_region(big.shape), tensor=big, copy=rank, copies=size)
    return State(
        step=step,
        position=10 * step,
        shards=[own, shared],
        values={"scale": 2.5, **values},
        own={"random": torch.tensor([rank])},
        found={f"by {rank}": rank},
    )


def check_saved(path: Path, ranks: int, step: int) -> None:
    verify_checkpoint(path)
    found = open_checkpoint(path)
    assert (found.step, found.manifest.position, found.manifest.world) == (step, 10 * step, ranks)
    assert found.read("model/cut").tolist() == [[float(rank + step)] * 4 for rank in range(ranks)]
    assert torch.equal(found.read("model/shared"), torch.arange(40_000.0) + step)
    assert found.values["scale"] == 2.5
    assert found.found == {f"by {rank}": rank for rank in range(ranks)}
    assert [found.own(rank)["random"].item() for rank in range(ranks)] == list(range(ranks))


@pytest.mark.parametrize("in_background", [False, True])
def test_all_ranks_save_together(tmp_path: Path, in_background: bool) -> None:
    def work(comm: Communicator) -> list[tuple[int, bool, int]]:
        writer = CheckpointWriter(tmp_path, comm)
        for step in (1, 2):
            writer.save(make_state(comm, step), in_background=in_background)
        writer.finish()
        reports = writer.reports()
        assert writer.reports() == []
        assert all(0 <= took["stall_seconds"] <= took["seconds"] for _, took in reports)
        return [(step, took["background"], took["bytes"]) for step, took in reports]

    found = run_virtual(work, 3)
    for reports in found:
        assert [(step, kind) for step, kind, _ in reports] == [(1, in_background), (2, in_background)]
    for step in (1, 2):
        check_saved(tmp_path / f"step-0000000{step}", 3, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    path = CheckpointWriter(tmp_path, SoloCommunicator(CPU)).save(make_state(SoloCommunicator(CPU), 3))
    tensors = load_file(path / "rank-00000.f32.safetensors")
    assert tensors["model/cut"].tolist() == [[3.0] * 4]  # in its own shape
    assert torch.equal(tensors["model/shared"], torch.arange(40_000.0) + 3)


def test_several_threads_write_a_large_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoint.write._LARGE_BYTES", 100_000)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    threads: set[int] = set()
    inside, write = threading.Barrier(2), LocalFiles.write

    def write_together(self: LocalFiles, path: Path, chunks: Any) -> Any:
        if path.suffix == ".safetensors":
            threads.add(threading.get_ident())
            inside.wait(60)  # each waits until the other is under way
        return write(self, path, chunks)

    monkeypatch.setattr(LocalFiles, "write", write_together)
    state = make_state(SoloCommunicator(CPU), 3)
    path = CheckpointWriter(tmp_path, SoloCommunicator(CPU)).save(state)
    check_saved(path, 1, 3)
    assert sorted(each.name for each in path.glob("*.safetensors")) == [
        "rank-00000.f32-0.safetensors",
        "rank-00000.f32-1.safetensors",
    ]
    assert len(threads) == 2


def test_several_threads_read_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = SoloCommunicator(CPU)
    path = CheckpointWriter(tmp_path, comm).save(make_state(comm, 3))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    inside, read_into = threading.Barrier(2), LocalFiles.read_into

    def read_together(self: LocalFiles, path: Path, spans: Any) -> None:
        inside.wait(60)  # each waits until the other is under way
        read_into(self, path, spans)

    empty = [replace(each, tensor=torch.zeros_like(each.tensor)) for each in make_state(comm, 0).shards]
    found = open_checkpoint(path)
    found.read("model/cut")  # and the header, once
    monkeypatch.setattr(LocalFiles, "read_into", read_together)
    found.fill_all([(each, each.name) for each in empty])
    assert empty[0].tensor.tolist() == [3.0] * 4
    assert torch.equal(empty[1].tensor, torch.arange(40_000.0) + 3)
    with pytest.raises(CheckpointError, match="has no tensor model/other"):
        found.fill_all([(empty[0], "model/other"), (empty[1], "model/other")])


def test_training_goes_on_while_a_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is the state of the step, although it changes before a byte is written."""
    may_write = threading.Event()
    write = LocalFiles.write

    def wait_and_write(self: LocalFiles, path: Path, chunks: Any) -> Any:
        assert may_write.wait(60)
        return write(self, path, chunks)

    monkeypatch.setattr(LocalFiles, "write", wait_and_write)
    comm = SoloCommunicator(CPU)
    writer = CheckpointWriter(tmp_path, comm)
    state = make_state(comm, 1)
    writer.save(state, in_background=True)
    assert list_checkpoints(tmp_path) == []
    assert writer.reports() == []
    for shard in state.shards:
        shard.tensor.fill_(-1.0)
    may_write.set()
    writer.finish()
    check_saved(tmp_path / "step-00000001", 1, 1)


def save_and_wait(writer: CheckpointWriter, state: State, *, in_background: bool) -> None:
    writer.save(state, in_background=in_background)
    writer.finish()


def failing_on(rank: int, at: int) -> Callable[..., Any]:
    """A disk that is full for one rank's tensors, in its n-th save; some bytes were written before."""
    write, count = LocalFiles.write, 0

    def full(self: LocalFiles, path: Path, chunks: Any) -> Any:
        nonlocal count
        if path.name.startswith(f"rank-{rank:05d}.f"):
            count += 1
            if count == at:
                path.write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, path, chunks)

    return full


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_stops_all_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, in_background: bool
) -> None:
    monkeypatch.setattr(LocalFiles, "write", failing_on(rank, at=2))

    def work(comm: Communicator) -> str:
        writer = CheckpointWriter(tmp_path, comm)
        writer.save(make_state(comm, 1), in_background=in_background)
        with pytest.raises(CheckpointError) as failure:
            save_and_wait(writer, make_state(comm, 2), in_background=in_background)
        assert [step for step, _ in writer.reports()] == [1]
        comm.barrier()
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        comm.barrier()
        writer.save(make_state(comm, 3), in_background=in_background)  # there is room again
        writer.finish()
        return str(failure.value)

    first, second = run_virtual(work, 2)
    assert first == second
    assert first.startswith(f"rank {rank}: cannot write a checkpoint to {tmp_path / 'step-00000002'}: ")
    assert "No space left on device" in first
    assert "older checkpoints are intact" in first
    for step in (1, 3):
        check_saved(tmp_path / f"step-0000000{step}", 2, step)


def test_a_value_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    comm = SoloCommunicator(CPU)
    writer = CheckpointWriter(tmp_path, comm)
    with pytest.raises(CheckpointError, match=r"plan\.model is of type object, which cannot be saved"):
        writer.save(make_state(comm, 1, plan={"model": object()}))
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    comm = SoloCommunicator(CPU)
    writer = CheckpointWriter(tmp_path, comm)
    writer.save(make_state(comm, 1, attempt=1))
    path = writer.save(make_state(comm, 1, attempt=2))
    assert open_checkpoint(path).values["attempt"] == 2
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_what_killed_saves_left_is_cleared_at_the_next_start(tmp_path: Path) -> None:
    """Also the checkpoint that had stepped aside for one that never came: it gets its name back."""
    comm = SoloCommunicator(CPU)
    path = CheckpointWriter(tmp_path, comm).save(make_state(comm, 1))
    path.rename(tmp_path / ".step-00000001.old")
    (tmp_path / ".step-00000002.abcd").mkdir()
    (tmp_path / ".step-00000002.abcd" / "rank-00000.json").write_text("{}")
    (tmp_path / ".step-00000003.old").mkdir()
    (tmp_path / "notes").mkdir()
    writer = CheckpointWriter(tmp_path, comm)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes", "step-00000001"]
    check_saved(path, 1, 1)
    writer.save(make_state(comm, 2))
    check_saved(tmp_path / "step-00000002", 1, 2)


def test_parts_of_another_attempt_are_not_taken_for_ours(tmp_path: Path) -> None:
    """A rank of an attempt that was killed had written its part: it lies under another name."""
    comm = SoloCommunicator(CPU)
    first, second = CheckpointWriter(tmp_path, comm), CheckpointWriter(tmp_path, comm)
    assert first._target.token != second._target.token


def test_retention_follows_each_save(tmp_path: Path) -> None:
    comm = SoloCommunicator(CPU)
    writer = CheckpointWriter(tmp_path, comm, Retention(last=1, every=4, best=1))
    for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0, 6.0], start=1):
        writer.save(make_state(comm, step, metrics={"eval_loss": loss}), in_background=step % 2 == 0)
    writer.finish()
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["2", "4", "6"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
