"""What limited a run, from its records alone: the cause, the evidence, and the two changes that would help most.

For steps after the warm-up, as shares of their time:

    data             the device (or the rank) waited for the next batch
    communication    it waited for other ranks: exposed, nothing hides it
    link             the same, where the wait is several times what this traffic should take on these links
    rank             the others waited for one rank that has more to do in most steps (``health/straggler.py``)
    host             the device had done all that was issued when the host was done issuing the step: it waits for
                     kernels to be launched (GPUs only)
    memory           memory ran out and the microbatch was cut, or a device is nearly full
    restarts         of the time in steps and between them: steps made again, and waiting for the next attempt

What a run spends less than the threshold on does not limit it; a run that nothing else limits is limited by compute.
Shares of the step count less where restarts took a part of the run, so that all causes compare. ``gains.py`` says what
a change would bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal

from paceline.records.facts import RunFacts
from paceline.records.gains import Gains, Improvement
from paceline.records.records import strict_json
from paceline.records.summary import StepTable
from paceline.units import format_bytes, format_flops, format_seconds

Cause = Literal["compute", "data", "communication", "link", "rank", "host", "memory", "restarts", "unknown"]
FEWEST_STEPS = 5
"""A run is judged by so many steps at least, after the warm-up."""

_DATA, _COMMUNICATION, _HOST, _RESTARTS = 0.05, 0.15, 0.5, 0.1
_NEARLY_FULL = 0.92  # of a device's memory: the allocator needs the rest
_SLOW_LINK = 4.0  # times what the traffic should take
_WAITS = {
    "data": "of the step waits for the next batch",
    "communication": "of the step waits for other ranks",
    "link": "of the step waits for a slow link",
    "host": "of the step waits for the host to launch kernels",
    "restarts": "of the time went to restarts: steps made again, and waiting for ranks to start",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One thing that limits a run: its share of the time, and the numbers that show it."""

    what: Cause
    share: float
    words: str  # what the share is of, or what happened
    evidence: tuple[str, ...] = ()
    name: str = ""  # where the cause alone does not say it

    def __str__(self) -> str:
        name = self.name or {"rank": "a slow rank", "link": "a slow link"}.get(self.what, self.what)
        share = f"{100 * self.share:.0f} % " if self.words.startswith("of ") else ""
        return f"limited by {name}: {share}{self.words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The verdict on a run: what limited it most, all that did (the largest first), and what would help."""

    what: Cause
    sentence: str
    found: tuple[Limit, ...] = ()
    changes: tuple[Improvement, ...] = ()

    @property
    def evidence(self) -> tuple[str, ...]:
        """The numbers that the verdict rests on."""
        return self.found[0].evidence if self.found else ()

    def lines(self) -> list[str]:
        """Returns the verdict for people: the sentence, what it rests on, what else limits the run, what would help."""
        told = [self.sentence, *(f"  {line}" for line in self.evidence)]
        told += [f"  also {limit}" for limit in self.found[1:]]
        return told + [f"  {number}. {change}" for number, change in enumerate(self.changes, start=1)]

    def to_json(self) -> dict[str, Any]:
        """Returns values of strict JSON, with the lines."""
        return dict(strict_json(asdict(self))) | {"lines": self.lines()}


UNKNOWN = Limits(what="unknown", sentence="")


def judge_run(facts: RunFacts, gains: Gains | None = None) -> Limits:
    """Says what limited a run, by which evidence, and which two changes would help most. Pure: reads no file.

    ``gains`` predicts what a change of the config brings; without it gains are arithmetic bounds.
    """
    steps = facts.steps.without_warm_up()
    total = steps.mean_s("step_s")
    if len(steps) < FEWEST_STEPS or total <= 0:
        few = f"{len(steps)} steps after the warm-up are too few to judge the run by: {FEWEST_STEPS} are needed"
        return Limits(what="unknown", sentence=few)
    found = [*_step_limits(facts, steps, total), *_memory_limits(facts, steps)]
    left = 1.0 - facts.goodput.lost_share
    weighed = [(left * limit.share, limit) for limit in found]
    if (goodput := facts.goodput).restarts and goodput.lost_share >= _RESTARTS:
        count = "1 restart" if goodput.restarts == 1 else f"{goodput.restarts} restarts"
        repeated_s, down_s = format_seconds(goodput.repeated_s), format_seconds(goodput.down_s)
        told = (
            f"{count}: {goodput.repeated_steps:,} recorded steps were made again ({repeated_s}), and "
            f"{down_s} passed before training went on; goodput {100 * goodput.share:.0f} %"
        )
        weighed.append((goodput.lost_share, _limit("restarts", goodput.lost_share, (told,))))
    ranked = [limit for _, limit in sorted(weighed, key=lambda each: -each[0])] or [_compute(facts, steps, total)]
    changes = (gains or Gains(facts.run)).best_changes({limit.what: limit.share for limit in ranked}, facts)
    return Limits(what=ranked[0].what, sentence=str(ranked[0]), found=tuple(ranked), changes=changes)


def _step_limits(facts: RunFacts, steps: StepTable, total: float) -> list[Limit]:
    """Returns what the steps themselves say, above the thresholds."""
    found = []
    per_step = total / len(steps)
    data = steps.mean_s("data_s") / total
    if data >= _DATA:
        found.append(_limit("data", data, (f"{_of(data * per_step, per_step)} a step, mean of the ranks",)))
    if facts.straggler is not None:
        late = facts.straggler
        words = f"rank {late.rank} holds the others up"
        found.append(Limit(what="rank", share=late.loss, words=words, evidence=(str(late),)))
    waited = own_wait_share(steps) if facts.straggler is not None else steps.mean_s("comm_s") / total
    if waited >= _COMMUNICATION:
        found.append(_communication(facts, steps, waited, per_step))
    waits = [each.host_s for each in chain.from_iterable(row.values() for row in steps.rows) if each.host_s is not None]
    host = sum(waits) / steps.totals().total_s
    if host >= _HOST:
        idle = sum(wait > 0 for wait in waits)
        told = f"in {idle:,} of {len(waits):,} steps the device had nothing left to do when the host had issued them"
        found.append(_limit("host", host, (told,)))
    return found


def own_wait_share(steps: StepTable) -> float:
    """Returns the least share of its steps that a rank waited: the rank that comes last waits for the network alone."""
    ranks = {rank for row in steps.rows for rank in row}
    records = [steps.of_rank(rank) for rank in ranks]
    return min(
        (sum(each.comm_s for each in own) / max(sum(each.step_s for each in own), 1e-12) for own in records),
        default=0.0,
    )


def _communication(facts: RunFacts, steps: StepTable, share: float, per_step: float) -> Limit:
    """Tells waiting for a slow link from waiting for much traffic, where it is known what the traffic should take."""
    told = f"{_of(share * per_step, per_step)} a step"
    told += ", of the rank that waits least" if facts.straggler is not None else ", mean of the ranks"
    priced = facts.priced_comm_s
    if priced is None:
        return _limit("communication", share, (told,))
    links = f"what a step sends should take {format_seconds(priced)} on these links, with nothing hidden"
    # A processor or a network that others use too makes some steps wait; a slow link makes all of them.
    waits = sorted(min(record.comm_s for record in row.values()) for row in steps.rows)
    always = waits[len(waits) // 10]  # what every rank waits for at least, in nine of ten steps
    if always > _SLOW_LINK * priced:
        times = f"{always / priced:.0f} times as long"
        slow = f"in nine of ten steps every rank waits {format_seconds(always)} or more, {times}"
        found = _limit("link", share, (told, links, slow))
        if facts.is_inside_a_host:  # no network: other work takes the cores or the bus that ranks exchange with
            return replace(found, name="slow exchanges", words="of the step waits for other ranks of this busy host")
        return found
    return _limit("communication", share, (told, links))


def _memory_limits(facts: RunFacts, steps: StepTable) -> list[Limit]:
    memory, evidence = facts.memory, []
    if memory.by_category:
        largest = sorted(memory.by_category.items(), key=lambda each: -each[1])[:3]
        evidence = ["the plan expects most of " + ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest)]
    if memory.cuts:
        step, microbatch = max(memory.cuts.items())
        words = f"memory ran out, and ranks went on with microbatches of {microbatch} from step {step} on"
        first = min(memory.cuts)
        rows = [(next(iter(row.values())).step, row) for row in steps.rows]
        before = StepTable(row for step, row in rows if step < first).step_s
        after = StepTable(row for step, row in rows if step > first).step_s
        if not before or not after:
            return [Limit(what="memory", share=0.0, words=words, evidence=tuple(evidence))]
        told = f"a step took {format_seconds(before)} before and {format_seconds(after)} after"
        share = max(0.0, 1.0 - before / after)
        return [Limit(what="memory", share=share, words=words, evidence=(told, *evidence))]
    if memory.filled >= _NEARLY_FULL and memory.capacity_bytes:
        words = f"{100 * memory.filled:.0f} % of {format_bytes(memory.capacity_bytes)} is in use at the peak"
        return [Limit(what="memory", share=0.0, words=words, evidence=tuple(evidence))]
    return []


def _compute(facts: RunFacts, steps: StepTable, total: float) -> Limit:
    parts = {name: steps.mean_s(f"{name}_s") / total for name in ("forward", "backward", "optimizer")}
    share = min(1.0, sum(parts.values()))
    words = ", ".join(f"{name} {100 * part:.0f} %" for name, part in parts.items())
    run, rate = facts.run, steps.samples_per_s or 0.0
    told = [words.replace("optimizer", "update")]
    if run.flops_per_sample and run.peak_flops:
        mfu = rate * run.flops_per_sample / run.world_size / run.peak_flops
        told.append(f"MFU {100 * mfu:.1f} % of {format_flops(run.peak_flops)} ({run.compute}, data sheet)")
    return Limit(what="compute", share=share, words="of the step is the model's own work", evidence=tuple(told))


def _limit(what: Cause, share: float, evidence: Sequence[str]) -> Limit:
    return Limit(what=what, share=share, words=_WAITS[what], evidence=tuple(evidence))


def _of(part_s: float, whole_s: float) -> str:
    return f"{format_seconds(part_s)} of {format_seconds(whole_s)}"
