"""Who is told to be late while a run goes on, and who is not."""

from __future__ import annotations

import pytest

from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.health.straggler import Lateness, LatenessPolicy, PhaseTimes, RankLook, Straggler

RANKS = 3
EVEN = {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}
POLICY = LatenessPolicy(windows=2, min_steps=4)


def look(
    steps: int,
    late: dict[int, tuple[str, float]],
    *,
    last: int | None = None,
    turns: bool = False,
    ahead: dict[int, float | None] | None = None,
) -> list[RankLook]:
    """All ranks after some steps: ``late`` is who takes longer in a phase, ``last`` who comes last if not that one."""
    looks = []
    group = GroupName(tuple(range(RANKS)))
    for rank in range(RANKS):
        phase, more = late.get(rank, ("data", 0.0))
        phases = {name: steps * (s + (more if name == phase else 0.0)) for name, s in EVEN.items()}
        behind = (0.1 if rank == last else 0.0) if last is not None else more
        clock = (ahead or {}).get(rank, 0.0)
        entries = tuple(
            LedgerEntry(
                number=step + 1,
                group=group,
                sequence=step,
                call=LedgerCall(kind="barrier"),
                step=step,
                issued_s=step + behind + (clock or 0.0),
            )
            for step in range(max(0, steps - 3), steps)
        )
        view = LedgerView(rank=rank, entries=entries, pid=7 if turns else 7 + rank)
        times = PhaseTimes(steps=steps, step_s=steps * 0.2, phases=phases)
        looks.append(RankLook(view=view, times=times, ahead_s=clock))
    return looks


def told(looks: list[list[RankLook]]) -> list[Straggler]:
    lateness = Lateness(POLICY)
    return [found for each in looks if (found := lateness.look(each)) is not None]


@pytest.mark.parametrize("phase", list(EVEN))
@pytest.mark.parametrize("turns", [False, True])
def test_a_rank_that_is_late_in_a_row_of_windows_is_told_once(phase: str, turns: bool) -> None:
    (found,) = told([look(5 * n, {1: (phase, 0.06)}, turns=turns) for n in range(1, 8)])
    assert (found.rank, found.phase) == (1, phase)
    assert found.lost_s == pytest.approx(0.06)
    assert found.loss == pytest.approx(0.3)


def test_it_takes_as_many_windows_as_the_policy_says() -> None:
    looks = [look(5 * n, {1: ("data", 0.06)}) for n in range(1, 4)]
    assert told(looks[:2]) == []
    assert len(told(looks)) == 1
    assert told([look(3 * n, {1: ("data", 0.06)}) for n in (1, 2)]) == []  # too few steps for a window


def test_who_comes_last_but_has_no_more_to_do_is_not_late() -> None:
    """As a stage of a pipeline does, whose turn comes after the others'."""
    assert told([look(5 * n, {}, last=2) for n in range(1, 6)]) == []
    assert told([look(5 * n, {1: ("data", 0.06)}, last=2) for n in range(1, 6)]) == []


def test_clocks_are_corrected() -> None:
    ahead: dict[int, float | None] = {0: 40.0, 2: -3.0}
    (found,) = told([look(5 * n, {1: ("data", 0.06)}, ahead=ahead) for n in range(1, 6)])
    assert found.rank == 1
    unknown: dict[int, float | None] = {0: None}
    assert [each.rank for each in told([look(5 * n, {1: ("data", 0.06)}, ahead=unknown) for n in range(1, 6)])] == [1]


def test_another_phase_is_told_too() -> None:
    first = [look(5 * n, {1: ("data", 0.06)}) for n in range(1, 4)]
    later = [look(15 + 5 * n, {1: ("forward", 0.5)}) for n in range(1, 5)]
    assert [each.phase for each in told([*first, *later])] == ["data", "forward"]


def test_ranks_that_come_anew_begin_anew() -> None:
    looks = [look(5, {1: ("data", 0.06)}), look(10, {1: ("data", 0.06)}), look(15, {1: ("data", 0.06)})[:2]]
    assert told([*looks, look(20, {1: ("data", 0.06)})]) == []
