"""What became of faults, from records alone; and the interval that follows from costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import RUN, STEP

from paceline.chaos.faults import MEETS, Fault, Fired, Passed, Started
from paceline.chaos.report import (
    Command,
    Handling,
    Notes,
    Report,
    SaveCost,
    compare_steps,
    expected_handling,
    handle,
    make_report,
    recommend,
    report_lines,
    straggler_verdict,
)
from paceline.config import Config
from paceline.records.records import EventRecord, Record, RunRecord, StepRecord
from paceline.records.summary import RankAttempt, final_steps, split_attempts


def policies(max_bad_steps: int = 10, **recovery: object) -> Config:
    return Config.model_validate(
        {
            "model": {"kind": "mlp"},
            "data": {"kind": "digits"},
            "train": {"steps": 1, "max_bad_steps": max_bad_steps},
            "recovery": recovery,
        }
    )


KILL = Fault(number=0, kind="kill", rank=1, step=6, phase="forward")


def run_record(time: float) -> RunRecord:
    return replace(RUN, time=time)


def step_record(step: int, time: float, loss: float = 1.0) -> StepRecord:
    return replace(STEP, step=step, position=8 * step, loss=loss, loss_sum=loss, step_s=1.0, time=time)


def event(name: str, step: int, time: float, **detail: object) -> EventRecord:
    return EventRecord(name=name, step=step, detail=detail, time=time)


def killed_run() -> list[RankAttempt]:
    """Steps 1 to 5, a checkpoint after 4; killed in step 6; again from 4 to 8."""
    records: list[Record] = [run_record(0.0)]
    records += [step_record(step, float(step)) for step in range(1, 6)]
    records.append(event("checkpoint", 4, 4.5, stall_seconds=0.2, seconds=0.5))
    records.append(run_record(8.0))
    records += [step_record(step, step + 4.0) for step in range(5, 9)]
    return split_attempts(records)


FIRED = Fired(number=0, rank=1, step=6, position=40, time=5.5)
RESTARTED = Notes(
    fired=(FIRED,),
    started=(Started(step=0, position=0, time=0.5), Started(step=4, position=32, time=8.5)),
    passed=(Passed(number=0, step=6, is_later=True, time=10.0),),
)
SENTENCE = "rank 1 was killed by SIGKILL after step 5"


def test_a_restart_is_told_with_what_it_cost() -> None:
    told = (
        (1.0, "paceline: something before"),
        (6.0, "paceline: passed over step-8: it is damaged"),
        (6.5, f"paceline: {SENTENCE}; restarting 2 ranks from step 4 (restart 1 of 3)"),
    )
    commands = [Command(start=0.0, end=20.0, code=0, told=told)]
    found = handle(KILL, RESTARTED, killed_run(), commands, policies())
    assert (found.how, found.is_right, found.lost_steps, found.lost_samples) == ("restarted", True, 1, 8)
    assert found.recovery_s == pytest.approx(4.5)
    assert found.verdict == SENTENCE


def test_a_fault_while_saving_loses_the_step_that_was_saved() -> None:
    fault = Fault(number=0, kind="kill-while-saving", rank=1, step=6)
    assert handle(fault, RESTARTED, killed_run(), [Command(start=0.0, end=20.0, code=0)], policies()).lost_steps == 2


def test_a_command_that_ended_and_was_run_again_has_stopped() -> None:
    commands = [
        Command(
            start=0.0, end=7.0, code=75, told=((6.9, "paceline: preempted: the state is saved"), (6.9, "  to go on"))
        ),
        Command(start=7.5, end=20.0, code=0),
    ]
    found = handle(KILL, RESTARTED, killed_run(), commands, policies())
    assert (found.how, found.is_right) == ("stopped", False)
    assert found.verdict == "preempted: the state is saved"


def test_a_signal_is_obeyed_after_a_step_or_two() -> None:
    fault = Fault(number=0, kind="preempt", rank=1, step=6)
    inside = Passed(number=0, step=6, is_later=False, time=6.0)
    notes = replace(RESTARTED, passed=(inside, *RESTARTED.passed))
    commands = [Command(start=0.0, end=7.0, code=75), Command(start=7.5, end=20.0, code=0)]
    assert handle(fault, notes, killed_run(), commands, policies()).how == "stopped"
    assert handle(replace(fault, kind="slow"), notes, killed_run(), commands, policies()).how == "went on"


def test_faults_that_did_not_happen_or_were_the_end_are_told() -> None:
    commands = [Command(start=0.0, end=7.0, code=1, told=((6.0, "paceline: rank 1 was killed"),))]
    attempts = killed_run()[:1]
    assert handle(KILL, Notes(fired=(), started=(), passed=()), attempts, commands, policies()).how == "never happened"
    found = handle(KILL, replace(RESTARTED, passed=()), attempts, commands, policies())
    assert (found.how, found.is_right, found.verdict) == ("not recovered", False, "rank 1 was killed")


def test_a_fault_in_the_last_step_of_a_finished_run_is_past() -> None:
    fault = Fault(number=0, kind="slow", rank=1, step=6)
    notes = Notes(fired=(FIRED,), started=RESTARTED.started[:1], passed=())
    assert handle(fault, notes, killed_run(), [Command(start=0.0, end=20.0, code=0)], policies()).how == "went on"
    assert handle(fault, notes, killed_run(), [Command(start=0.0, end=20.0, code=1)], policies()).how == "not recovered"


def test_a_signal_before_the_end_needs_not_be_obeyed() -> None:
    fault = Fault(number=0, kind="preempt", rank=1, step=6)
    notes = Notes(fired=(FIRED,), started=RESTARTED.started[:1], passed=())
    commands = [Command(start=0.0, end=20.0, code=0)]
    soon = split_attempts([run_record(0.0), step_record(6, 6.0)])
    assert handle(fault, notes, soon, commands, policies()).is_right
    late = split_attempts([run_record(0.0), step_record(6, 6.0), step_record(7, 7.0)])
    assert not handle(fault, notes, late, commands, policies()).is_right


def test_a_run_that_stopped_after_its_last_step_has_nothing_left() -> None:
    fault = Fault(number=0, kind="preempt", rank=1, step=6)
    started = (*RESTARTED.started[:1], Started(step=8, position=64, time=8.5))
    commands = [Command(start=0.0, end=7.0, code=75), Command(start=7.5, end=20.0, code=0)]
    found = handle(fault, Notes(fired=(FIRED,), started=started, passed=()), killed_run(), commands, policies())
    assert (found.how, found.is_right, found.lost_steps) == ("stopped", True, 0)


def test_a_run_that_went_on_or_went_back_is_told_apart() -> None:
    fault = Fault(number=0, kind="nan", rank=None, step=6)
    notes = replace(RESTARTED, started=RESTARTED.started[:1])
    on = handle(fault, notes, killed_run()[:1], [], policies())
    assert (on.how, on.is_right, on.lost_steps) == ("went on", True, 0)
    back = event("roll_back", 4, 6.5, reason="not finite", from_step=6, skipped_samples=16)
    attempts = split_attempts([run_record(0.0), step_record(6, 6.0), back])
    found = handle(fault, notes, attempts, [], policies(on_nan="roll_back", max_bad_steps=1))
    assert (found.how, found.is_right, found.lost_steps, found.verdict) == ("went back", True, 2, "not finite")


def test_a_slow_rank_is_named() -> None:
    fault = Fault(number=0, kind="slow", rank=1, step=3, factor=2.0)
    fast: list[Record] = [run_record(0.0), *(step_record(step, float(step)) for step in range(1, 15))]
    slow = [replace(each, forward_s=2.0) if isinstance(each, StepRecord) and each.step >= 3 else each for each in fast]
    handling = Handling(fault=fault, how="went on", expected=("went on",))
    named = straggler_verdict(handling, [split_attempts(fast), split_attempts(slow)])
    assert named.startswith("rank 1 is the last in 9 of 9 steps")
    assert straggler_verdict(handling, [split_attempts(fast)]) == ""


@pytest.mark.parametrize(
    ("kind", "policies", "expected"),
    [
        ("kill", policies(), ("restarted",)),
        ("kill", policies(max_restarts=0), ("stopped",)),
        ("hang", policies(on_hang="stop"), ("stopped",)),
        ("stop", policies(on_hang="stop"), ("stopped",)),
        ("oom", policies(), ("stopped",)),
        ("oom", policies(on_oom="halve"), ("restarted",)),
        ("disk-full", policies(), ("stopped",)),
        ("disk-full", policies(on_full_disk="warn"), ("went on",)),
        ("unwritable", policies(), ("stopped",)),
        ("preempt", policies(), ("stopped",)),
        ("nan", policies(on_nan="stop"), ("restarted",)),
        ("spike", policies(on_spike="roll_back", spike_window=4), ("went back",)),
        ("spike", policies(on_spike="roll_back", spike_window=50), ("went on",)),
        ("slow", policies(), ("went on",)),
        ("kill-two", policies(), ("restarted",)),
        ("kill-in-recovery", policies(max_restarts=0), ("stopped",)),
        ("kill-in-snapshot", policies(), ("restarted",)),
        ("kill-keeper", policies(max_restarts=0), ("went on",)),
        ("memory-full", policies(), ("went on",)),
        ("kill-launcher", policies(max_restarts=0), ("restarted",)),  # where hosts remain
    ],
)
def test_what_is_right_follows_from_the_policies(kind: str, policies: Config, expected: tuple[str, ...]) -> None:
    assert expected_handling(Fault(number=0, kind=kind, rank=0, step=6), policies) == expected


@pytest.mark.parametrize("kind", ["kill-launcher", "kill-host"])
def test_a_run_whose_meeting_launcher_goes_is_started_again(kind: str) -> None:
    fault = Fault(number=0, kind=kind, rank=0, step=6)
    assert expected_handling(fault, policies(), MEETS) == ("stopped",)
    soon = Passed(number=0, step=7, is_later=False, time=5.6)  # the ranks were not ended yet
    notes = replace(RESTARTED, fired=(replace(FIRED, detail=MEETS),), passed=(soon, *RESTARTED.passed))
    commands = [Command(start=0.0, end=7.0, code=-9), Command(start=7.5, end=20.0, code=0)]
    found = handle(fault, notes, killed_run(), commands, policies())
    assert (found.how, found.is_right, found.lost_steps) == ("stopped", True, 1)
    found = handle(fault, notes, killed_run(), [Command(start=0.0, end=20.0, code=0)], policies())
    assert (found.how, found.is_right) == ("restarted", False)


def test_memory_that_is_full_is_told_by_the_rank() -> None:
    fault = Fault(number=0, kind="memory-full", rank=1, step=6)
    off = event("no_snapshots", 6, 6.5, reason="No space left on device", ranks=1)
    notes = replace(RESTARTED, started=RESTARTED.started[:1])
    attempts = split_attempts([run_record(0.0), step_record(6, 6.0), off])
    found = handle(fault, notes, attempts, [], policies())
    assert (found.how, found.is_right) == ("went on", True)
    assert found.verdict == "no snapshots from here on: No space left on device"


def test_of_steps_that_were_done_again_the_last_counts() -> None:
    steps = final_steps(killed_run())
    assert list(steps) == list(range(1, 9))
    assert steps[5].time == 9.0


def make(code: int, handlings: list[Handling], mtbf_s: float | None = None) -> Report:
    commands = [Command(start=0.0, end=20.0, code=code)]
    return make_report("a", 2, killed_run(), commands, handlings, mtbf_s=mtbf_s, samples="64, each once an epoch")


def test_a_report_adds_up() -> None:
    right = Handling(fault=KILL, how="restarted", expected=("restarted",), lost_steps=1, lost_samples=8, recovery_s=4.5)
    report = make(0, [right])
    assert report.goodput == pytest.approx(8 / 20)
    assert report.save == SaveCost(number=1, stall_s=0.2, total_s=0.5)
    assert report.interval is not None
    assert (report.interval.mtbf_s, report.interval.is_observed) == (20.0, True)
    assert report.is_good
    assert report.to_json()["lost_samples"] == 8
    assert "kill:rank=1@step=6  restarted          1 steps  4.5 s         yes" in report_lines(report)
    assert not make(1, [right]).is_good
    wrong = Handling(fault=KILL, how="never happened", expected=("restarted",))
    assert not make(0, [wrong]).is_good


def test_losses_are_compared_bit_by_bit() -> None:
    twin = split_attempts([run_record(0.0), *(step_record(step, float(step)) for step in range(1, 9))])
    same = compare_steps([killed_run()], [twin], is_expected=True, samples="the same")
    assert same.is_same
    other = split_attempts([run_record(0.0), *(step_record(s, float(s), 1.0 + (s == 7) * 1e-9) for s in range(1, 9))])
    assert compare_steps([killed_run()], [other], is_expected=True, samples="").first_difference == 7
    longer = split_attempts([run_record(0.0), *(step_record(step, float(step)) for step in range(1, 10))])
    assert compare_steps([killed_run()], [longer], is_expected=True, samples="").first_difference == 9


def test_samples_are_compared_at_another_size_too() -> None:
    right = Handling(fault=KILL, how="restarted", expected=("restarted",))
    twin = split_attempts([run_record(0.0), *(step_record(step, float(step), 2.0) for step in range(1, 9))])
    for samples, is_good in (("the same", True), ("another 64", False)):
        other = compare_steps([killed_run()], [twin], is_expected=False, samples=samples)
        assert not other.is_same
        assert replace(make(0, [right]), comparison=other).is_good is is_good


@given(stall=st.floats(1e-3, 100.0), mtbf=st.floats(1e3, 1e7))
def test_the_interval_loses_less_than_its_neighbours(stall: float, mtbf: float) -> None:
    """Daly's interval is near the best of the expected time that he starts from."""
    found = recommend(SaveCost(number=1, stall_s=stall, total_s=stall), step_s=1.0, mtbf_s=mtbf, is_observed=False)
    assert found.young_s == pytest.approx(math.sqrt(2.0 * stall * mtbf))

    def cost(interval: float) -> float:
        return math.expm1((interval + stall) / mtbf) / interval

    assert cost(found.daly_s) <= 1.001 * min(cost(0.7 * found.daly_s), cost(1.4 * found.daly_s))


def test_a_save_is_over_before_the_next() -> None:
    found = recommend(SaveCost(number=1, stall_s=1e-4, total_s=60.0), step_s=1.0, mtbf_s=3600.0, is_observed=True)
    assert found.steps == 60
