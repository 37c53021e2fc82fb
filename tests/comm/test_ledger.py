"""What a rank writes into its ledger, and what another process reads there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.base import Communicator
from paceline.comm.ledger.call_sites import LoopCounters
from paceline.comm.ledger.file import NUM_RECORDS, TABLE_BYTES, LedgerReader
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import LedgerCommunicator, Trace, TracedCommunicator, ledger_clock
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerView
from paceline.health.pairing import Update
from paceline.health.verdict import HangLimits, judge


def around(comm: Communicator, path: Path | None = None) -> LedgerCommunicator:
    return LedgerCommunicator(comm, Ledger(rank=comm.ranks[comm.rank], world=comm.size, path=path))


def solo(path: Path | None = None) -> LedgerCommunicator:
    return around(SoloCommunicator(torch.device("cpu")), path)


def all_verbs(comm: Communicator) -> LedgerView:
    """Calls every verb once, on two ranks, in this order."""
    other = 1 - comm.rank
    comm.all_reduce(torch.ones(3), "avg").wait()
    comm.reduce_scatter(torch.empty(2), torch.ones(2, 2)).wait()
    comm.all_gather(torch.empty(4), torch.ones(2)).wait()
    comm.broadcast(torch.ones(5, dtype=torch.float64), source=1).wait()
    comm.all_to_all(torch.empty(2), torch.ones(2)).wait()
    works = [comm.send(torch.ones(1), to=other, tag=3), comm.recv(torch.empty(1), source=other, tag=3)]
    for work in works:
        work.wait()
    comm.barrier()
    comm.split([1, 0]).all_reduce(torch.ones(1)).wait()
    ledger = comm.ledger
    assert ledger is not None
    return ledger.reader().view()


def test_every_verb_is_written_down_with_what_ranks_must_agree_on() -> None:
    first, second = run_virtual(lambda comm: all_verbs(around(comm)), 2)
    told = [(str(entry.group), entry.sequence, str(entry.call)) for entry in first.entries]
    world = "[0, 1]"
    assert told == [
        (world, 0, "all_reduce(avg, float32 [3])"),
        (world, 1, "reduce_scatter(sum, float32 [2, 2])"),
        (world, 2, "all_gather(float32 [4])"),
        (world, 3, "broadcast(from rank 1, float64 [5])"),
        (world, 4, "all_to_all(float32 [2])"),
        (world, 0, "send(to rank 1, float32 [1], tag 3)"),
        (world, 0, "recv(from rank 1, float32 [1], tag 3)"),
        (world, 5, "barrier()"),
        ("[1, 0]", 0, "split()"),
        ("[1, 0]", 1, "all_reduce(sum, float32 [1])"),
    ]
    assert first.issued == {GroupName((0, 1)): 6, GroupName((1, 0)): 2} == second.issued
    assert all(entry.done_s is not None and entry.done_s >= entry.issued_s for entry in first.entries)
    assert judge([first, second], 0.0, HangLimits()) is None


def test_results_are_those_of_the_communicator_inside() -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        value = torch.tensor([float(comm.rank + 1)])
        around(comm).all_reduce(value).wait()
        return [float(item) for item in value]

    assert run_virtual(work, 3) == [[6.0]] * 3


def test_the_line_is_that_of_the_caller_and_of_its_user() -> None:
    comm = solo()
    comm.all_reduce(torch.ones(1)).wait()  # by hand
    code = compile("def engine(comm, x):\n    comm.all_reduce(x).wait()\n", ENGINE_FILE, "exec")
    names: dict[str, object] = {}
    exec(code, names)
    names["engine"](TracedCommunicator(comm, Trace(torch.device("cpu"))), torch.ones(2))  # type: ignore[operator]
    by_hand, by_engine = comm.ledger.reader().view().entries
    assert by_hand.site.startswith(f"{__file__}:")
    assert by_hand.site.endswith("in test_the_line_is_that_of_the_caller_and_of_its_user")
    assert by_engine.site.startswith(f"{__file__}:")
    assert by_engine.site.endswith(" through paceline/engines/made_up.py:2 in engine")


ENGINE_FILE = str(Path(sys.modules["paceline.comm.ledger.ledger"].__file__ or "").parents[2] / "engines" / "made_up.py")


def test_the_same_line_is_told_once_however_often_it_is_passed() -> None:
    comm = solo()
    for _ in range(3):
        comm.all_reduce(torch.ones(1)).wait()
    assert len({entry.site for entry in comm.ledger.reader().view().entries}) == 1


def test_the_ring_keeps_the_last_operations_and_counts_all(tmp_path: Path) -> None:
    comm = solo(tmp_path / "a.ledger")
    number = 2 * NUM_RECORDS + 7
    for _ in range(number):
        comm.all_reduce(torch.ones(1)).wait()
    reader = LedgerReader.open(tmp_path / "a.ledger")
    assert reader is not None
    view = reader.view(last=NUM_RECORDS)
    assert [entry.sequence for entry in view.entries] == list(range(number - NUM_RECORDS + 1, number))
    assert view.issued == {GroupName((0,)): number}


def test_a_wait_of_an_operation_whose_place_is_taken_harms_no_other() -> None:
    comm = solo()
    early = comm.all_reduce(torch.ones(1))
    for _ in range(NUM_RECORDS + 1):
        comm.all_reduce(torch.ones(1))
    before = comm.ledger.reader().view(last=NUM_RECORDS).entries
    early.wait()
    assert comm.ledger.reader().view(last=NUM_RECORDS).entries == before


def test_a_full_table_leaves_out_names_and_nothing_else() -> None:
    comm = solo()
    size = 1
    while comm.ledger.cells[4] < TABLE_BYTES - 200:
        comm.ledger.add_call(("all_reduce", (size,) * 40, torch.float32, "sum", None))
        size += 1
    for extra in range(8):
        comm.all_reduce(torch.ones(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, extra + 1)).wait()
    view = comm.ledger.reader().view()
    assert view.issued == {GroupName((0,)): 8}
    assert view.entries[-1].call == LedgerCall(kind="an operation")


def test_phases_are_seen_and_a_rank_that_leaves_is_finished() -> None:
    comm = solo()
    reader = comm.ledger.reader()
    assert (reader.view().phase, reader.view().state) == ("setup", "running")
    before = reader.pulse()
    comm.ledger.enter("data")
    assert reader.pulse() != before
    assert reader.view().phase == "data"
    comm.ledger.finish()
    assert reader.view().state == "finished"


def test_a_rank_inside_an_operation_is_seen_there_and_not_after_an_error() -> None:
    seen: list[LedgerView] = []

    class Failing(SoloCommunicator):
        def barrier(self) -> None:
            seen.append(comm.ledger.reader().view())
            raise RuntimeError("lost")

    comm = around(Failing(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="lost"):
        comm.barrier()
    inside = seen[0].waits_in
    assert inside is not None
    assert str(inside.call) == "barrier()"
    assert comm.ledger.reader().view().waits_in is None


def write_and_die(path: Path) -> None:
    ledger = Ledger(rank=5, world=8, path=path)
    comm = LedgerCommunicator(SoloCommunicator(torch.device("cpu"), world_rank=5), ledger)
    comm.all_reduce(torch.ones(7))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_written_outlives_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "health" / "rank-5.ledger"
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    reader = LedgerReader.open(path)
    assert reader is not None
    assert (reader.rank, reader.pid == os.getpid()) == (5, False)
    (entry,) = reader.view().entries
    assert (str(entry.call), entry.done_s) == ("all_reduce(sum, float32 [7])", None)


def test_what_is_no_ledger_is_not_read(tmp_path: Path) -> None:
    assert LedgerReader.open(tmp_path / "none.ledger") is None
    (tmp_path / "empty.ledger").touch()
    assert LedgerReader.open(tmp_path / "empty.ledger") is None
    (tmp_path / "other.ledger").write_bytes(b"no ledger" * 100)
    assert LedgerReader.open(tmp_path / "other.ledger") is None


def test_a_wrapped_rank_is_still_what_it_was() -> None:
    def work(comm: VirtualCommunicator) -> tuple[bool, bool]:
        wrapped = TracedCommunicator(around(comm), Trace(comm.device))
        return wrapped.takes_real_time, wrapped.ledger is not None

    assert run_virtual(work, 2) == [(False, True)] * 2
    assert SoloCommunicator(torch.device("cpu")).ledger is None
    assert ledger_clock(solo())() > 0.0


def test_a_ledger_has_no_holes_that_a_full_disk_could_not_fill(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.ledger"
    Ledger(rank=0, world=1, path=path)
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_in_a_loop_of_ones_own_each_of_several_lines_is_told() -> None:
    """Two files of the user's call the same place of an engine, whose file is one of ours."""
    ledger = Ledger(rank=0, world=1, is_own_loop=True)
    scope: dict[str, Any] = {
        "comm": LedgerCommunicator(SoloCommunicator(torch.device("cpu")), ledger),
        "ones": torch.ones(1),
    }
    exec(compile("def land():\n    comm.all_reduce(ones).wait()\n", str(ENGINE_FILE), "exec"), scope)
    for name in ("first", "second"):
        exec(compile("land()", f"/home/me/{name}.py", "exec"), scope)
    assert [entry.site for entry in ledger.reader().view().entries] == [
        "/home/me/first.py:1 in <module> through paceline/engines/made_up.py:2 in land",
        "/home/me/second.py:1 in <module> through paceline/engines/made_up.py:2 in land",
    ]


def test_the_counters_of_a_loop_are_found() -> None:
    counters, seen = LoopCounters(), []
    fixed, samples = 7, 0
    for step in range(40):
        samples += 4 + step % 2
        seen.append(counters.read(sys._getframe()))
    assert set(counters.names.values()) == {"step", "samples"}
    (number,) = (number for number, name in counters.names.items() if name == "step")
    assert seen[0] == {}
    assert [each[number] for each in seen[5:]] == list(range(5, 40))
    assert fixed not in seen[-1].values()


def test_updates_are_read_back_by_the_number_of_collectives() -> None:
    ledger = Ledger(rank=0, world=2)
    reader = ledger.reader()
    assert reader.update_at(3) is None
    for number in range(1, 100):
        ledger.note_update(Update(collectives=3 * number, updates=number, counters={5: number, 9: 2**40}))
    assert reader.update_at(297) == Update(collectives=297, updates=99, counters={5: 99, 9: 2**40})
    assert reader.update_at(294) == Update(collectives=294, updates=98, counters={5: 98, 9: 2**40})
    assert reader.update_at(296) is None
    assert reader.update_at(300) is None  # not yet
    assert reader.update_at(3) is None  # no more
