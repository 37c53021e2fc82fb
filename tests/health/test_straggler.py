"""Who is late, and where it loses the time."""

from __future__ import annotations

from dataclasses import replace

import made_records as records
import pytest
import torch

from paceline.comm.ledger.ledger import Ledger
from paceline.comm.traced import LedgerCommunicator, ledger_clock
from paceline.comm.virtual.clock import VirtualTime
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.health.straggler import StragglerPolicy, find_straggler, last_arrivals
from paceline.records.records import StepRecord

EVEN = {"data_s": 0.01, "forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.01}
STEP = replace(records.STEP, step_s=0.2, comm_s=0.1, **EVEN)


def run(steps: int, slow: dict[int, dict[str, float]], ranks: int = 4) -> list[dict[int, StepRecord]]:
    """Steps in which ranks are alike, but for what ``slow`` adds to their phases."""
    added = {rank: {name: EVEN[name] + more for name, more in slow.get(rank, {}).items()} for rank in range(ranks)}
    return [{rank: replace(STEP, step=step, **added[rank]) for rank in range(ranks)} for step in range(1, steps + 1)]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_the_rank_and_the_phase_are_named(phase: str) -> None:
    found = find_straggler(run(20, {2: {f"{phase}_s": 0.06}}))
    assert found is not None
    assert (found.rank, found.phase, found.steps_last, found.steps) == (2, phase, 18, 18)
    assert found.lost_s == pytest.approx(0.06)
    assert found.loss == pytest.approx(0.3)
    told = "rank 2 is the last in 18 of 18 steps: the others wait 60.0 ms for it, 30 % of a step;"
    assert str(found).startswith(told)


def test_a_small_or_rare_delay_is_nobodys_fault() -> None:
    assert find_straggler(run(20, {2: {"data_s": 0.015}})) is None
    mixed = [(slow if number % 3 else even) for number, (slow, even) in enumerate(zip(SLOW, run(20, {}), strict=True))]
    assert find_straggler(mixed) is None
    assert find_straggler(mixed, StragglerPolicy(min_share=0.6)) is not None


SLOW = run(20, {1: {"backward_s": 0.1}})


def test_few_steps_or_one_rank_say_nothing() -> None:
    assert find_straggler(SLOW[:5]) is None
    assert find_straggler(SLOW[:6]) is not None
    assert find_straggler(run(20, {}, ranks=1)) is None
    assert find_straggler([]) is None


def test_the_first_steps_do_not_count() -> None:
    found = find_straggler([*SLOW[:2], *run(18, {3: {"data_s": 0.1}})])
    assert found is not None
    assert (found.rank, found.phase) == (3, "data")


def view(rank: int, *times: float) -> LedgerView:
    group, call = GroupName((0, 1, 2)), LedgerCall(kind="barrier")
    entries = [
        LedgerEntry(number=at + 1, group=group, sequence=at, call=call, phase="forward", issued_s=seconds)
        for at, seconds in enumerate(times)
    ]
    return LedgerView(rank=rank, entries=tuple(entries))


def test_the_last_at_each_operation_is_named_by_corrected_clocks() -> None:
    views = [view(0, 1.0, 2.0, 9.0), view(1, 1.1, 2.5), view(2, 1.2, 2.1)]
    assert [(each.sequence, each.rank) for each in last_arrivals(views)] == [(0, 2), (1, 1)]
    assert last_arrivals(views)[1].late_s == pytest.approx(0.45)
    ahead = {1: 0.6}
    assert [(each.sequence, each.rank) for each in last_arrivals(views, ahead)] == [(0, 2), (1, 2)]


def test_a_slow_virtual_rank_is_the_last_by_its_clock() -> None:
    def work(comm: VirtualCommunicator) -> LedgerView:
        ledger = Ledger(rank=comm.rank, world=comm.size, now=ledger_clock(comm))
        kept = LedgerCommunicator(comm, ledger)
        ledger.enter("backward")
        assert comm.clock is not None
        for _ in range(5):
            comm.clock.spend(0.3 if comm.rank == 2 else 0.1)
            kept.all_reduce(torch.ones(1)).wait()
        return ledger.reader().view()

    views = run_virtual(work, 4, timing=VirtualTime(measures=False))
    arrivals = last_arrivals(views)
    assert [(each.sequence, each.rank, each.phase) for each in arrivals] == [(n, 2, "backward") for n in range(5)]
    assert all(each.late_s == pytest.approx(0.2) for each in arrivals)
