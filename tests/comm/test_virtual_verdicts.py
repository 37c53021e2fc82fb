"""Virtual ranks that fail, disagree, or wait for what will not come: a verdict that names them, and no thread left."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.virtual.baton import call_site
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.apply import parallelize
from paceline.errors import CollectiveMismatchError, RankFailedError, StuckRankError

Rank = Callable[[VirtualCommunicator], Any]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank-")] == []


def place(function: Rank, marker: str) -> str:
    """Where in ``function`` the line with the comment ``marker`` is, as messages name it."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {marker}")]
    return f"{__file__}:{first + number} in {function.__name__}"


# A rank raises.


def fails_midway(comm: VirtualCommunicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        raise ValueError("a bad sample")
    comm.all_reduce(torch.ones(1)).wait()


def test_a_failure_carries_the_ranks_own_traceback() -> None:
    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: a bad sample") as caught:
        run_virtual(fails_midway, 3)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in fails_midway" in caught.value.traceback_text
    assert 'raise ValueError("a bad sample")' in str(caught.value)


def test_the_other_ranks_are_unwound_past_their_own_handlers() -> None:
    seen: list[str] = []

    def work(comm: VirtualCommunicator) -> None:
        try:
            fails_midway(comm)
        except ValueError:
            raise
        except Exception:
            seen.append(f"rank {comm.rank} caught it")
        finally:
            seen.append(f"rank {comm.rank} cleaned up")

    with pytest.raises(RankFailedError):
        run_virtual(work, 3)
    assert sorted(seen) == ["rank 0 cleaned up", "rank 1 cleaned up", "rank 2 cleaned up"]


def test_a_rank_cannot_go_on_after_the_end() -> None:
    """One that calls its communicator while it is unwound is unwound again, rather than left waiting."""

    def work(comm: VirtualCommunicator) -> None:
        try:
            fails_midway(comm)
        finally:
            if comm.rank != 1:
                comm.barrier()

    with pytest.raises(RankFailedError, match="a bad sample"):
        run_virtual(work, 3)


def test_a_rank_that_exits_is_a_failure() -> None:
    def work(comm: VirtualCommunicator) -> None:
        if comm.rank == 2:
            raise SystemExit(3)
        comm.barrier()

    with pytest.raises(RankFailedError, match="rank 2 failed: SystemExit: 3"):
        run_virtual(work, 3)


def test_the_first_failure_counts() -> None:
    def work(comm: VirtualCommunicator) -> None:
        try:
            comm.barrier()
        finally:
            raise ValueError(f"of rank {comm.rank}")

    with pytest.raises(RankFailedError, match="ValueError: of rank 2"):  # the last to come does not wait
        run_virtual(work, 3)


# Ranks disagree.


@pytest.mark.parametrize(
    ("zero", "one", "named"),
    [
        (
            lambda comm: comm.all_reduce(torch.ones(2)),
            lambda comm: comm.broadcast(torch.ones(2)),
            ["rank 0 called all_reduce(sum, float32 [2])", "rank 1 called broadcast(source=0, float32 [2])"],
        ),
        (
            lambda comm: comm.all_reduce(torch.ones(2)),
            lambda comm: comm.all_reduce(torch.ones(2), "max"),
            ["rank 0 called all_reduce(sum, float32 [2])", "rank 1 called all_reduce(max, float32 [2])"],
        ),
        (
            lambda comm: comm.all_reduce(torch.ones(2)),
            lambda comm: comm.all_reduce(torch.ones(1, 2)),
            ["rank 0 called all_reduce(sum, float32 [2])", "rank 1 called all_reduce(sum, float32 [1, 2])"],
        ),
        (
            lambda comm: comm.all_reduce(torch.ones(2)),
            lambda comm: comm.all_reduce(torch.ones(2, dtype=torch.float64)),
            ["rank 0 called all_reduce(sum, float32 [2])", "rank 1 called all_reduce(sum, float64 [2])"],
        ),
        (
            lambda comm: comm.broadcast(torch.ones(2), source=0),
            lambda comm: comm.broadcast(torch.ones(2), source=1),
            ["rank 0 called broadcast(source=0, float32 [2])", "rank 1 called broadcast(source=1, float32 [2])"],
        ),
        (
            lambda comm: comm.all_gather(torch.ones(4), torch.ones(2)),
            lambda comm: comm.reduce_scatter(torch.ones(2), torch.ones(4)),
            ["rank 0 called all_gather(float32 [4], float32 [2])", "rank 1 called reduce_scatter(sum, float32 [2]"],
        ),
        (
            lambda comm: comm.all_to_all(torch.ones(2, 2), torch.ones(2, 2)),
            lambda comm: comm.all_to_all(torch.ones(2, 1), torch.ones(2, 1)),
            ["rank 0 called all_to_all(float32 rows of [2])", "rank 1 called all_to_all(float32 rows of [1])"],
        ),
        (
            lambda comm: comm.barrier(),
            lambda comm: comm.all_reduce(torch.ones(2)),
            ["rank 0 called barrier()", "rank 1 called all_reduce(sum, float32 [2])"],
        ),
    ],
    ids=["kind", "op", "shape", "dtype", "source", "direction", "row", "barrier"],
)
def test_different_operations_are_named_by_rank(zero: Rank, one: Rank, named: list[str]) -> None:
    def work(comm: VirtualCommunicator) -> None:
        comm.barrier()
        (one if comm.rank == 1 else zero)(comm)
        comm.barrier()

    with pytest.raises(CollectiveMismatchError) as caught:
        run_virtual(work, 2)
    message = str(caught.value)
    assert "ranks of group [0, 1] called different operations (operation 1 of the group)" in message
    for call in named:
        assert f"  {call}" in message
    assert "every rank of a group issues the same operations in the same order" in message


def calls_by_rank(comm: VirtualCommunicator) -> None:
    if comm.rank == 0:
        comm.all_reduce(torch.ones(1))  # the sum
    else:
        comm.all_reduce(torch.ones(1), "min")  # the minimum


def test_a_mismatch_names_the_lines_and_who_had_not_arrived() -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        run_virtual(lambda comm: calls_by_rank(comm), 4)
    assert place(calls_by_rank, "the sum") in str(caught.value)
    assert place(calls_by_rank, "the minimum") in str(caught.value)
    assert "ranks 2, 3 had not arrived" in str(caught.value)


def steps_or_reduces(comm: VirtualCommunicator) -> None:
    engine = parallelize(torch.nn.Linear(2, 2), comm, "fsdp")
    if comm.rank == 0:
        engine(torch.ones(1, 2))  # the forward pass
    else:
        comm.all_reduce(torch.ones(1))  # the sum


def test_a_mismatch_inside_of_an_engine_names_the_users_line() -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        run_virtual(steps_or_reduces, 2)
    assert f"{place(steps_or_reduces, 'the forward pass')} through paceline/engines/" in str(caught.value)
    assert place(steps_or_reduces, "the sum") in str(caught.value)


def test_a_mismatch_in_a_subgroup_is_told_in_ranks_of_the_world() -> None:
    def work(comm: VirtualCommunicator) -> None:
        if comm.rank:
            comm.split([1, 2]).all_reduce(torch.ones(comm.rank)).wait()

    with pytest.raises(CollectiveMismatchError, match=r"group \[1, 2\]") as caught:
        run_virtual(work, 3)
    assert "rank 1 called all_reduce(sum, float32 [1])" in str(caught.value)
    assert "rank 2 called all_reduce(sum, float32 [2])" in str(caught.value)


def test_a_message_of_another_shape_is_named_on_both_sides() -> None:
    def work(comm: VirtualCommunicator) -> None:
        handle = comm.send(torch.ones(2), to=1, tag=7) if comm.rank == 0 else comm.recv(torch.ones(3), source=0, tag=7)
        handle.wait()

    with pytest.raises(CollectiveMismatchError, match="a send and its receive differ") as caught:
        run_virtual(work, 2)
    assert "send(rank 0 to 1, float32 [2], tag=7)" in str(caught.value)
    assert "recv(rank 1 from 0, float32 [3], tag=7)" in str(caught.value)


def test_splits_that_do_not_meet_are_named() -> None:
    def work(comm: VirtualCommunicator) -> None:
        splits = [1, 2] if comm.rank == 0 else [2, 1]
        comm.all_to_all(torch.ones(3), torch.ones(3), [1, 2], splits).wait()

    with pytest.raises(CollectiveMismatchError, match=r"rank 0 sends \[2\] to rank 1, which expects \[1\]") as caught:
        run_virtual(work, 2)
    assert "input_splits[1] of the one must be output_splits[0] of the other" in str(caught.value)


# Ranks wait in vain.


def skips_one(comm: VirtualCommunicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        return
    comm.all_reduce(torch.ones(2)).wait()  # stuck here


def test_a_skipped_collective_is_a_verdict_at_once() -> None:
    """It does not wait for the time limit, which here is longer than any test."""
    with pytest.raises(StuckRankError, match="no rank can go on") as caught:
        run_virtual(skips_one, 3, timeout_s=10_000)
    lines = str(caught.value).splitlines()
    where = (
        f"rank 1 in operation 1 of group [0, 1, 2]: all_reduce(sum, float32 [2]) at {place(skips_one, 'stuck here')}"
    )
    assert lines[1:] == [f"  rank 0 waits for {where}", "  rank 1 has finished", f"  rank 2 waits for {where}"]


def sends_to_nobody(comm: VirtualCommunicator) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), to=1, tag=4).wait()  # unmatched
    else:
        comm.recv(torch.ones(2), source=0, tag=5).wait()  # of another tag


def test_an_unmatched_send_is_a_verdict() -> None:
    with pytest.raises(StuckRankError) as caught:
        run_virtual(sends_to_nobody, 2, timeout_s=10_000)
    send, receive = place(sends_to_nobody, "unmatched"), place(sends_to_nobody, "of another tag")
    assert str(caught.value).splitlines()[1:] == [
        f"  rank 0 waits for rank 1 to match send(rank 0 to 1, float32 [2], tag=4) at {send}",
        f"  rank 1 waits for rank 0 to match recv(rank 1 from 0, float32 [2], tag=5) at {receive}",
    ]


def test_two_groups_used_crosswise_are_a_verdict() -> None:
    def work(comm: VirtualCommunicator) -> None:
        groups = [comm.split([0, 1]), comm.split([1, 0])]
        for group in groups if comm.rank == 0 else reversed(groups):
            group.barrier()

    with pytest.raises(StuckRankError) as caught:
        run_virtual(work, 2, timeout_s=10_000)
    assert "rank 0 waits for rank 1 in operation 0 of group [0, 1]: barrier()" in str(caught.value)
    assert "rank 1 waits for rank 0 in operation 0 of group [1, 0]: barrier()" in str(caught.value)


def test_a_rank_that_never_comes_back_is_named_with_its_line() -> None:
    release = threading.Event()

    def spins(comm: VirtualCommunicator) -> None:
        if comm.rank == 0:
            comm.split([0, 1]).barrier()  # completed by rank 1, which keeps the baton
        elif comm.rank == 1:
            comm.split([0, 1]).barrier()
            while not release.is_set():
                time.sleep(0.001)  # spins here
        comm.barrier()

    lines, first = inspect.getsourcelines(spins)
    loop = [first + i for i, line in enumerate(lines) if "while not release" in line or "spins here" in line]
    try:
        with pytest.raises(StuckRankError) as caught:
            run_virtual(spins, 3, timeout_s=1.5)
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name.startswith("rank-"):
                thread.join()
    head, *ranks = str(caught.value).splitlines()
    assert head.startswith("rank 1 has given no sign of life for")
    assert "(limit 1.5 s); it stands at" in head
    assert any(f"{__file__}:{number} in spins" in head for number in loop)
    assert ranks[0] == "  rank 0 is ready to run"
    assert any(ranks[1] == f"  rank 1 runs at {__file__}:{number} in spins" for number in loop)
    assert ranks[2] == "  rank 2 is ready to run"


# Waiting inside of backward.


def test_a_rank_may_wait_inside_a_backward_hook() -> None:
    def work(comm: VirtualCommunicator) -> list[list[float]]:
        layers = [torch.nn.Parameter(torch.full((2,), float(i + 1), dtype=torch.float64)) for i in range(3)]
        for layer in layers:
            layer.register_post_accumulate_grad_hook(lambda p: comm.all_reduce(p.grad, "avg").wait())
        x = torch.tensor([1.0, 2.0], dtype=torch.float64) * (comm.rank + 1)
        for layer in layers:
            x = x * layer
        x.sum().backward()
        return [layer.grad.tolist() for layer in layers if layer.grad is not None]

    mean = sum(rank + 1 for rank in range(3)) / 3
    expected = [[mean * 6.0 / (i + 1), mean * 12.0 / (i + 1)] for i in range(3)]
    assert run_virtual(work, 3) == [expected] * 3


def test_a_failure_reaches_ranks_that_wait_inside_a_backward_hook() -> None:
    def work(comm: VirtualCommunicator) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))

        def hook(p: torch.nn.Parameter) -> None:
            if comm.rank == 1:
                raise ValueError("in the hook")
            comm.all_reduce(p.grad).wait()

        parameter.register_post_accumulate_grad_hook(hook)
        parameter.sum().backward()

    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: in the hook"):
        run_virtual(work, 3)


def test_ranks_stuck_inside_backward_hooks_are_a_verdict() -> None:
    def work(comm: VirtualCommunicator) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))
        if comm.rank != 1:
            parameter.register_post_accumulate_grad_hook(lambda p: comm.all_reduce(p.grad).wait())
        parameter.sum().backward()

    with pytest.raises(StuckRankError, match="rank 1 has finished"):
        run_virtual(work, 3, timeout_s=10_000)


# The line that is named.


def test_the_line_is_that_of_the_users_code_wherever_it_lies(tmp_path: Path) -> None:
    """A project may lie in a folder called torch, or have a threading.py of its own."""
    folder = tmp_path / "torch"
    folder.mkdir()
    file = folder / "threading.py"
    file.write_text("def ask(comm, tensor):\n    comm.all_reduce(tensor).wait()\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)

    def work(comm: VirtualCommunicator) -> None:
        if comm.rank == 0:
            names["ask"](comm, torch.ones(1))

    with pytest.raises(StuckRankError) as caught:
        run_virtual(work, 2, timeout_s=10_000)
    assert f"at {file}:2 in ask" in str(caught.value)


def test_without_a_frame_the_line_is_unknown() -> None:
    assert call_site(None) == "an unknown line"
