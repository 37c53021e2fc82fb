"""Faults as data: what is read, what is refused, and what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.chaos.faults import (
    TRAITS,
    Fault,
    check_faults,
    parse_faults,
    place_faults,
    random_faults,
    read_plan,
    write_plan,
)
from paceline.errors import ConfigError


def test_a_list_of_faults_is_read() -> None:
    found = parse_faults("kill:rank=1@step=20, slow:rank=0x2@step=30,disk-full@step=40,corrupt-checkpoint,nan:@step=15")
    assert [str(each) for each in found] == [
        "kill:rank=1@step=20",
        "slow:rank=0x2@step=30",
        "disk-full:rank=0@step=40",
        "corrupt-checkpoint:rank=0",
        "nan@step=15",
    ]
    assert [each.number for each in found] == [0, 1, 2, 3, 4]
    assert (found[1].factor, found[1].rank) == (2.0, 0)
    assert found[4].rank is None


def test_phases_factors_and_lengths_are_read() -> None:
    kill, slow, spike = parse_faults("kill:rank=2:phase=saving@step=3,slow:rank=1:x1.5:steps=4@step=2,spike:x10@step=9")
    assert (kill.phase, kill.rank) == ("checkpoint", 2)
    assert (slow.factor, slow.length) == (1.5, 4)
    assert spike.factor == 10.0


def test_all_problems_are_told_at_once_with_what_was_meant() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_faults("kil:rank=1@step=20,kill:rank=one@step=2,hang:phase=backwards@step=3,nan@20,slow:x1@step=4")
    text = str(refused.value)
    assert len(refused.value.problems) == 5
    for part in ("did you mean kill?", "'rank=one' says nothing here", "phase=backward?", "@20", "x1 changes nothing"):
        assert part in text


@pytest.mark.parametrize("text", ["", " , ", "kill@step=0", "kill:x2@step=1", "nan:phase=forward@step=1"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_faults(text)


def test_faults_that_cannot_happen_are_told() -> None:
    faults = parse_faults("kill:rank=4@step=2,kill:rank=1@step=30,kill:rank=1@step=20")
    problems = check_faults(faults, ranks=2, total_steps=20)
    assert [problem.what for problem in problems] == [
        "kill:rank=4@step=2: there is no rank 4",
        "kill:rank=1@step=30: step 30 never comes",
    ]


def test_a_fault_without_a_step_comes_after_the_second_checkpoint() -> None:
    assert [each.step for each in place_faults(parse_faults("nan,kill@step=3"), after=20)] == [21, 3]


def test_a_death_in_a_recovery_needs_a_fault_to_recover_from() -> None:
    found = place_faults(parse_faults("kill:rank=0@step=3,kill-in-recovery:rank=1,kill-in-recovery:rank=0"), after=20)
    assert [each.step for each in found] == [3, None, None]
    assert check_faults(found, ranks=2, total_steps=20) == []
    wrong = parse_faults("kill-in-recovery,slow:rank=1@step=4,kill-in-recovery:rank=1")
    assert [problem.what for problem in check_faults(wrong, ranks=2, total_steps=20)] == [
        "kill-in-recovery:rank=0: there is no fault before it",
        "kill-in-recovery:rank=1: nothing recovers from slow:rank=1x2@step=4",
    ]
    with pytest.raises(ConfigError, match="write kill:rank=0@step=4,kill-in-recovery:rank=1"):
        parse_faults("kill-in-recovery:rank=1@step=4")


def test_two_ranks_are_not_killed_where_there_is_one() -> None:
    (problem,) = check_faults(parse_faults("kill-two@step=3"), ranks=1, total_steps=20)
    assert problem.what == "kill-two:rank=0@step=3: there is one rank"


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    faults = parse_faults("kill-host:rank=1@step=3,kill-in-recovery")
    write_plan(tmp_path, 7, faults, meeting=29400, ranks=2)
    found = read_plan(tmp_path)
    assert (found.seed, found.faults, found.meeting, found.ranks) == (7, faults, 29400, 2)


@given(seed=st.integers(0, 50), number=st.integers(1, 8), ranks=st.integers(1, 4))
def test_random_faults_can_happen_and_are_the_same_again(seed: int, number: int, ranks: int) -> None:
    faults = random_faults(seed, number, ranks=ranks, last_step=40)
    assert faults == random_faults(seed, number, ranks=ranks, last_step=40)
    assert [each.number for each in faults] == list(range(number))
    assert check_faults(faults, ranks=ranks, total_steps=40) == []


@given(
    kind=st.sampled_from(sorted(TRAITS)),
    rank=st.integers(0, 9),
    step=st.integers(1, 99),
    factor=st.sampled_from([1.5, 2.0, 30.0]),
)
def test_what_is_written_reads_back(kind: str, rank: int, step: int, factor: float) -> None:
    trait = TRAITS[kind]
    phase = trait.phases[-1] if trait.phases else ""
    times = factor if trait.factor is not None else 1.0
    at = step if trait.has_step else None
    fault = Fault(number=0, kind=kind, rank=rank, step=at, phase=phase, factor=times)
    assert parse_faults(str(fault)) == [fault]
