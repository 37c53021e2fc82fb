"""What became of each fault, what a run with faults cost, and how often it should be saved: pure functions.

fault at t ---- the ranks stop ---- the next attempt begins ---- first new step at t'

    work lost        steps that had been trained at t, less the step that the next attempt began with
    time to recover  t' - t
    how              went on (the same attempt), went back (it loaded a checkpoint itself), restarted (another attempt
                     of the same command), stopped (the command ended, and was run again as a scheduler would)
    goodput          seconds of the steps that the result is made of / seconds from the first start to the end
    interval         W = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C     Daly 2006; the root alone is Young's

C is what a checkpoint costs the training (its stall), M the mean time between failures. A save in the background takes
longer than it stalls: the interval is never shorter than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from paceline.chaos import faults as known
from paceline.chaos.faults import Fault, Fired, Passed, Started
from paceline.config import Config
from paceline.health.straggler import find_straggler
from paceline.predict.formulas.saving import best_interval, refined_interval
from paceline.records.records import StepRecord
from paceline.records.summary import RankAttempt, RunRecords, StepTable, add_up, final_steps
from paceline.terminal import table_lines
from paceline.units import format_seconds

SAME = "the same"
How = Literal["went on", "went back", "restarted", "stopped", "not recovered", "never happened"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What saving took in the median: how long training stood still, how long it was under way; how often."""

    number: int
    stall_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How often to save. ``mtbf_s`` is the mean time between failures that it is for."""

    mtbf_s: float
    is_observed: bool
    young_s: float
    daly_s: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """How a run compares with the undisturbed one. ``first_difference``: the step, None if there is none."""

    num_steps: int
    first_difference: int | None
    is_expected: bool
    samples: str

    @property
    def is_same(self) -> bool:
        return self.first_difference is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    name: str
    ranks: int
    code: int
    steps: int
    wall_s: float
    goodput: float
    handlings: tuple[Handling, ...]
    save: SaveCost | None
    interval: Interval | None
    samples: str
    told: tuple[str, ...]
    comparison: LossComparison | None = None

    @property
    def is_good(self) -> bool:
        """Whether the run came to its end, every fault was handled as its policy says, and the samples are right."""
        twin = self.comparison
        same = twin is None or not twin.is_expected or twin.is_same
        if twin is not None and not any(each.fault.kind in known.ON_LOSS for each in self.handlings):
            same = same and twin.samples == SAME  # at another size, too
        handled = all(each.is_right for each in self.handlings)
        return self.code == 0 and handled and same and not self.samples.startswith("wrong")

    def to_json(self) -> dict[str, Any]:
        whole, same = asdict(self), self.comparison
        faults = []
        for each in self.handlings:
            own = {name: getattr(each.fault, name) for name in ("kind", "rank", "step")}
            faults.append(asdict(each) | own | {"fault": str(each.fault), "handled": each.is_right})
        found = {name: whole[name] for name in ("name", "ranks", "steps", "interval", "samples")}
        found |= {"handled": self.is_good, "exit_code": self.code}
        for name in ("lost_steps", "lost_samples"):
            found[name] = sum(getattr(each, name) for each in self.handlings)
        found |= {"wall_s": round(self.wall_s, 3), "goodput": round(self.goodput, 4), "faults": faults}
        found |= {"checkpoint": whole["save"], "told": list(self.told)}
        return found | {"undisturbed": None if same is None else {**asdict(same), "is_same": same.is_same}}


def recommend(save: SaveCost, *, step_s: float, mtbf_s: float, is_observed: bool) -> Interval:
    """Returns how often to save, by Young and Daly."""
    cost = max(save.stall_s, 1e-6)
    young, daly = best_interval(cost, mtbf_s), refined_interval(cost, mtbf_s)
    interval = max(daly, save.total_s)
    steps = max(1, round(interval / step_s)) if step_s > 0 else 1
    return Interval(mtbf_s=mtbf_s, is_observed=is_observed, young_s=young, daly_s=daly, steps=steps)


def make_report(
    name: str,
    ranks: int,
    attempts: Sequence[RankAttempt],
    commands: Sequence[Command],
    handlings: Sequence[Handling],
    *,
    mtbf_s: float | None,
    samples: str,
    comparison: LossComparison | None = None,
) -> Report:
    steps = final_steps(attempts)
    wall = sum(command.end - command.start for command in commands)
    saves = [each.detail for attempt in attempts for each in attempt.events if each.name == "checkpoint"]
    save = None
    if saves:
        stall, total = ([float(each[key]) for each in saves] for key in ("stall_seconds", "seconds"))
        save = SaveCost(number=len(saves), stall_s=median(stall), total_s=median(total))
    num_failures = sum(each.how in ("restarted", "stopped") for each in handlings)
    observed = mtbf_s or (wall / num_failures if num_failures else None)
    totals, last = add_up(steps.values()), max(steps, default=0)
    step_s = totals.step_s
    # Steps whose records a killed rank had not written count as the median one.
    useful = totals.total_s + step_s * (last - len(steps))
    interval = None
    if save is not None and observed is not None and step_s:
        interval = recommend(save, step_s=step_s, mtbf_s=observed, is_observed=mtbf_s is None)
    return Report(
        name=name,
        ranks=ranks,
        code=commands[-1].code if commands else 1,
        steps=last,
        wall_s=wall,
        goodput=useful / wall if wall else 0.0,
        handlings=tuple(handlings),
        save=save,
        interval=interval,
        samples=samples,
        told=tuple(text for command in commands for _, text in command.told),
        comparison=comparison,
    )


def compare_steps(
    ours: Sequence[Sequence[RankAttempt]], theirs: Sequence[Sequence[RankAttempt]], *, is_expected: bool, samples: str
) -> LossComparison:
    """Compares the losses of all ranks, step by step and bit by bit, with those of an undisturbed run."""
    different, num_steps = [], 0
    for own, other in zip(ours, theirs, strict=True):
        mine, twin = final_steps(own), final_steps(other)
        num_steps = max(num_steps, len(twin))
        # Records that a killed rank had not written are not there: what is there must be equal, and the last step be.
        wrong = [step for step, record in twin.items() if step in mine and _numbers(mine[step]) != _numbers(record)]
        missing = [max(twin)] if twin and max(twin) not in mine else []
        different += wrong + missing
    first = min(different, default=None)
    return LossComparison(num_steps=num_steps, first_difference=first, is_expected=is_expected, samples=samples)


def _numbers(record: StepRecord) -> tuple[str, ...]:
    # As text: a norm that is not a number equals itself.
    return tuple(map(repr, (record.loss_sum, record.count, record.position, record.lr, record.grad_norm)))


def report_lines(report: Report) -> list[str]:
    rows = [("fault", "what became of it", "lost", "recovered in", "as its policy says")]
    for each in report.handlings:
        lost = f"{each.lost_steps} steps" if each.lost_steps else "-"
        took = "-" if each.recovery_s is None else format_seconds(each.recovery_s)
        is_right = "yes" if each.is_right else f"no: {' or '.join(each.expected)}"
        rows.append((str(each.fault), each.how, lost, took, is_right))
    lines = table_lines(rows)
    lines += ["", f"{report.steps} steps in {format_seconds(report.wall_s)}; goodput {100 * report.goodput:.1f} %"]
    lines += [f"{each.fault}: {each.verdict}" for each in report.handlings if each.verdict]
    if cost := report.save:
        stall, total = format_seconds(cost.stall_s), format_seconds(cost.total_s)
        lines.append(f"a checkpoint stalls training for {stall} and takes {total} ({cost.number} saves)")
    if found := report.interval:
        source = "as in this run" if found.is_observed else "as given"
        lines.append(
            f"with a failure every {format_seconds(found.mtbf_s)} ({source}): save every {found.steps} steps, "
            f"{format_seconds(found.daly_s)} (Daly; Young {format_seconds(found.young_s)})"
        )
    lines.append(f"samples: {report.samples}")
    same = report.comparison
    if same is not None:
        whose = f"those of an undisturbed run, bit for bit, in {same.num_steps} steps"
        if not same.is_same:
            why = "" if same.is_expected else ", as a fault changed what was trained, or on how many ranks"
            whose = f"another than an undisturbed run's from step {same.first_difference} on{why}"
        lines.append(f"losses: {whose}; samples {same.samples}")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One run of ``paceline train``: when, its exit code, and what it told at which time."""

    start: float
    end: float
    code: int
    told: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the ranks noted, each in the order of time."""

    fired: Sequence[Fired]
    started: Sequence[Started]
    passed: Sequence[Passed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    fault: Fault
    how: How
    expected: tuple[How, ...]
    lost_steps: int = 0
    lost_samples: int = 0
    recovery_s: float | None = None
    verdict: str = ""
    detail: str = ""

    @property
    def is_right(self) -> bool:
        return self.how in self.expected


def expected_handling(fault: Fault, config: Config, detail: str = "") -> tuple[How, ...]:
    """Says what the policies of a config make of a fault; ``detail`` is what was told when it happened."""
    kind, policies = fault.kind, config.recovery
    if kind in known.OF_HOSTS:  # hosts that go are not charged
        return ("stopped",) if detail == known.MEETS else ("restarted",)
    starts_again: tuple[How, ...] = ("restarted",) if policies.max_restarts else ("stopped",)
    if kind == "preempt":
        return ("stopped",)
    if kind in known.SLOW or kind in ("kill-keeper", "memory-full"):
        return ("went on",)
    if kind in ("hang", "stop"):
        return starts_again if policies.on_hang == "restart" else ("stopped",)
    if kind == "oom":
        rest: tuple[How, ...] = ("stopped",) if policies.on_oom == "stop" else starts_again
        return ("went on", *rest) if config.train.microbatch == "auto" else rest
    if kind in ("disk-full", "unwritable"):
        return ("went on",) if policies.on_full_disk == "warn" else ("stopped",)
    if kind == "nan" and policies.on_nan != "stop":
        goes_back = policies.on_nan != "skip" and config.train.max_bad_steps == 1
        return ("went back",) if goes_back else ("went on",)
    if kind == "spike":
        is_found = fault.step is not None and fault.step > policies.spike_window // 2  # it needs half a window
        if not is_found or policies.on_spike in ("ignore", "note"):
            return ("went on",)
        return starts_again if policies.on_spike == "stop" else ("went back",)
    return starts_again


def handle(
    fault: Fault, notes: Notes, attempts: Sequence[RankAttempt], commands: Sequence[Command], config: Config
) -> Handling:
    found = Handling(fault=fault, how="never happened", expected=expected_handling(fault, config))
    at = next((each for each in notes.fired if each.number == fault.number), None)
    if at is None:
        return found
    found = replace(found, detail=at.detail, expected=expected_handling(fault, config, at.detail))
    passed = _passed(fault, notes.passed, found.expected)
    is_done = bool(commands) and commands[-1].code == 0
    later = next((each for each in notes.started if each.time > at.time and each.step >= at.step), None)
    if passed is None and is_done and later is not None:  # nothing was left to train
        passed = Passed(number=fault.number, step=later.step, is_later=True, time=later.time)
    if passed is None and not (is_done and not any(each.time > at.time for each in notes.started)):
        return replace(found, how="not recovered", verdict=_verdict(commands, at.time))
    if passed is None:  # in the last step, and the run came to its end all the same
        return _handled_inside(replace(found, recovery_s=0.0), at, attempts, commands)
    found = replace(found, recovery_s=max(0.0, passed.time - at.time))
    began = next((each for each in notes.started if at.time < each.time <= passed.time), None)
    if began is None:
        return _handled_inside(found, at, attempts, commands)
    # While saving or evaluating, the step itself has been trained too.
    is_after = fault.phase in ("evaluation", "checkpoint") or fault.kind in (*known.WHILE_SAVING, *known.IN_SNAPSHOT)
    is_same_command = any(each.start <= at.time and passed.time <= each.end for each in commands)
    how: How = "restarted" if is_same_command else "stopped"
    lost_steps = max(0, at.step - (not is_after) - began.step)
    lost_samples, why = max(0, at.position - began.position), _verdict(commands, at.time)
    return replace(found, how=how, lost_steps=lost_steps, lost_samples=lost_samples, verdict=why)


def _passed(fault: Fault, noted: Sequence[Passed], expected: tuple[How, ...]) -> Passed | None:
    """Returns where the run was past a fault: signals and bad losses are obeyed a step or two later."""
    own = [each for each in noted if each.number == fault.number]
    later = [each for each in own if each.is_later]
    is_late = fault.kind in ("preempt", *known.ON_LOSS, *known.OF_HOSTS, "kill-in-snapshot")
    if later and is_late and expected in (("restarted",), ("stopped",)):
        return later[0]
    return own[0] if own else None


def _handled_inside(
    found: Handling, at: Fired, attempts: Sequence[RankAttempt], commands: Sequence[Command]
) -> Handling:
    """Tells of a fault after which the same attempt went on, or went back to a checkpoint by itself."""
    events = [each for attempt in attempts for each in attempt.events]
    if found.fault.kind == "kill-keeper":
        return replace(found, how="went on", verdict=_verdict(commands, at.time))
    if found.fault.kind == "memory-full":
        off = next((each for each in events if each.name == "no_snapshots" and each.time >= at.time), None)
        told = "" if off is None else f"no snapshots from here on: {off.detail['reason']}"
        return replace(found, how="went on", verdict=told)
    back = next((each for each in events if each.name == "roll_back" and each.time >= at.time), None)
    last = max((record.time for attempt in attempts for record in attempt.steps), default=at.time)
    if found.fault.kind == "preempt" and last - at.time < 1.0:
        found = replace(found, expected=(*found.expected, "went on"))  # ranks ask one another some times a second
    if back is None or found.fault.kind not in known.ON_LOSS:
        return replace(found, how="went on")
    lost_steps = int(back.detail.get("from_step", back.step)) - back.step
    lost_samples, why = int(back.detail.get("skipped_samples", 0)), str(back.detail.get("reason", ""))
    return replace(found, how="went back", lost_steps=lost_steps, lost_samples=lost_samples, verdict=why)


def straggler_verdict(handling: Handling, by_rank: Sequence[Sequence[RankAttempt]]) -> str:
    """Says which rank was the slow one in the steps of a slow rank, as every run's report does; empty if none was."""
    first = handling.fault.step or 0
    there = {rank: own for rank, own in enumerate(by_rank) if own}
    steps = RunRecords(there).steps.only(range(first, first + handling.fault.length)) if there else StepTable([])
    found = find_straggler(steps.rows)
    return "" if found is None else str(found)


def _verdict(commands: Sequence[Command], moment: float) -> str:
    """Returns what was told first after a moment, by the command that ran then, and what was to be done."""
    running = [each for each in commands if each.start <= moment <= each.end]
    told = [text for each in running for when, text in each.told if when >= moment]
    said = [text.removeprefix("paceline: ") for text in told if text.startswith("paceline: ")]
    return next((text.partition("; restarting ")[0] for text in said if not text.startswith("passed over")), "")
