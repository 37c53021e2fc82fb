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

A run that nothing limits beyond its threshold is limited by compute. What a change of the config would bring is
predicted by the formulas of ``predict/``; else it is a bound, the most that it can bring, wholly or in half. With
shares of the step d (data), c (communication), l (lost to a rank):

    no waiting for data 1/(1-d)      half the exchanges 1/(1-c/2)      a rank as fast as the others 1/(1-l)
    twice the ranks     1/((1-c)/2 + c), where communication stays as it is
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from paceline.cluster.devices import load_cluster
from paceline.config import Config, load_config
from paceline.config.load import dotted_values, leaf_values, read_values
from paceline.errors import PacelineError
from paceline.records.event_words import WORDS
from paceline.records.facts import RunFacts
from paceline.records.records import RunRecord, strict_json
from paceline.records.summary import StepTable, add_up, middle
from paceline.units import format_bytes, format_flops, format_seconds

_FEWEST = 1.005  # a speed-up below is none
_LONGEST = 50.0  # a bound beyond says nothing
_COMPILE = "compile the model (model.compile = auto)"
_OWN_WORDS = {re.compile(pattern): words for pattern, words in WORDS["of a loop of one's own"].items()}
# Returns how many times as fast a run would be with these overrides of its config; None where that is not known.
Predict = Callable[[Sequence[str]], float | None]
Cause = Literal["compute", "data", "communication", "link", "rank", "host", "memory", "restarts", "unknown"]
FEWEST_STEPS = 5  # after the warm-up: a run is judged by so many at least
_DATA, _COMMUNICATION, _HOST, _RESTARTS = 0.05, 0.15, 0.5, 0.1
_NEARLY_FULL = 0.92  # of a device's memory: the allocator needs the rest
_SLOW_LINK = 4.0  # times what the traffic should take


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What to change, and how many times as fast the run would be: predicted by formulas, or at most (a bound)."""

    text: str
    gain: float
    basis: Literal["predicted", "bound"]
    why: str = ""

    def __str__(self) -> str:
        most = "" if self.basis == "predicted" else "at most "
        basis = "predicted by formulas" if self.basis == "predicted" else "arithmetic bound"
        return f"{self.text}: {most}{self.gain:.2f} x as fast ({basis}{f': {self.why}' if self.why else ''})"


@dataclass(frozen=True, slots=True)
class Gains:
    """Knows what can be changed about a run: its first record, the values of its config, and who predicts."""

    run: RunRecord
    settings: Mapping[str, Any] = field(default_factory=dict)  # by dotted key
    predict: Predict = lambda _: None

    def best_changes(self, shares: Mapping[str, float], facts: RunFacts) -> tuple[Improvement, ...]:
        """Returns the two changes that help most against what limits a run: those of the first cause come first."""
        found: list[Improvement] = []
        for cause in [*shares, "compute"]:
            changes: Iterator[Improvement] = getattr(self, f"_for_{cause}")(shares.get(cause, 0.0), facts)
            own = sorted(changes, key=lambda change: -change.gain)
            found += [each for each in own if each.gain >= _FEWEST and each.text not in {one.text for one in found}]
        return tuple(replace(each, text=self._in_words(each.text)) for each in found[:2])

    def _in_words(self, text: str) -> str:
        for pattern, words in _OWN_WORDS.items() if self.run.is_own_loop else ():
            text = pattern.sub(words, text)
        return text

    def _change(self, text: str, bound: float, why: str, overrides: Sequence[str] = ()) -> Improvement:
        """Makes a change with the gain that formulas predict for the overrides; else with the bound."""
        predicted = self.predict(overrides) if overrides else None
        if predicted is not None:
            return Improvement(text=text, gain=predicted, basis="predicted")
        return Improvement(text=text, gain=min(bound, _LONGEST), basis="bound", why=why)

    def _for_data(self, share: float, _: RunFacts) -> Iterator[Improvement]:
        bound, text = 1.0 / max(1.0 - share, 1e-9), "raise data.workers"
        if isinstance(workers := self.settings.get("data.workers", 0), int):
            # Workers that are always busy read one step in (workers x step); without any, the rank itself reads.
            wanted = math.ceil((workers or share) / max(1.0 - share, 0.02))
            text += f" from {workers} to {max(wanted, workers + 1)}"
        yield self._change(text, bound, "no waiting for data")
        yield self._change("prepare samples once, ahead of the run", bound, "no waiting for data")

    def _for_communication(self, share: float, _: RunFacts) -> Iterator[Improvement]:
        half = 1.0 / (1.0 - share / 2)
        yield self._accumulate(half)
        if self.settings.get("comm.compression.policy", "none") == "none":
            yield self._change("send half the bytes (comm.compression.policy = bf16)", half, "half the bytes")

    def _accumulate(self, bound: float) -> Improvement:
        """Twice the samples a step; in a pipeline also half the bubble for each of them."""
        run = self.run
        twice = [f"train.accumulate={2 * run.accumulate}", f"train.global_batch={2 * run.global_batch}"]
        text = f"raise train.accumulate from {run.accumulate} to {2 * run.accumulate}, and the global batch with it"
        return self._change(text, bound, "half the exchanges for each sample", twice)

    def _for_link(self, share: float, facts: RunFacts) -> Iterator[Improvement]:
        exposed = share * (facts.steps.without_warm_up().step_s or 0.0)
        kept = min(1.0, (facts.priced_comm_s or 0.0) / exposed) if exposed > 0 else 0.0
        bound = 1.0 / max(1.0 - share * (1.0 - kept), 1e-9)
        ranks = self.run.world_size
        look = f"find the slow link (paceline doctor --ranks {ranks}), or leave its host out"
        if facts.is_inside_a_host:
            look = f"end what else runs on {self.run.host}; paceline doctor --ranks {ranks} measures its links again"
        yield self._change(look, bound, "links as fast as expected")
        yield self._accumulate(1.0 / (1.0 - share / 2))

    def _for_rank(self, share: float, facts: RunFacts) -> Iterator[Improvement]:
        if facts.straggler is None:
            return
        rank, ranks, bound = facts.straggler.rank, self.run.world_size, 1.0 / max(1.0 - share, 1e-9)
        text = f"make rank {rank} as fast as the others: look at its {facts.straggler.phase}"
        if (load := facts.by_load) is not None:
            text = load.advice
        yield self._change(text, bound, "no waiting for it")
        if ranks > 2 and load is None:
            yield self._change(f"leave rank {rank} out", bound * (ranks - 1) / ranks, f"{ranks - 1} equal ranks")

    def _for_host(self, _: float, facts: RunFacts) -> Iterator[Improvement]:
        if self._is_eager:
            yield self._change(_COMPILE, 2.0, "half the launches", ["model.compile=auto"])
        run = facts.run
        text = f"raise train.microbatch from {run.microbatch} to {2 * run.microbatch}"
        twice = [f"train.microbatch={2 * run.microbatch}", f"train.global_batch={2 * run.global_batch}"]
        yield self._change(text, 2.0, "twice the samples in as many launches", twice)

    @property
    def _is_eager(self) -> bool:
        return str(self.settings.get("model.compile", "none")).lower() in ("none", "false")

    def _for_memory(self, share: float, _: RunFacts) -> Iterator[Improvement]:
        run, bound = self.run, 1.0 / max(1.0 - share, 1e-9) if share > 0 else 2.0
        why = "as before memory ran out" if share > 0 else "half as many passes over the model"
        if run.world_size > 1 and run.strategy == "ddp":
            yield self._change("shard the states (parallel.strategy = fsdp) and raise train.microbatch", bound, why)
        if self.settings.get("memory.checkpoint_activations", "none") == "none":
            text = "compute activations again (memory.checkpoint_activations = full) and raise train.microbatch"
            yield self._change(text, max(1.0, bound * 0.75), f"{why}, less a forward pass of four parts")
        if not self.settings.get("train.precision", "").startswith("bf16"):
            yield self._change("halve activations (train.precision = bf16) and raise train.microbatch", bound, why)

    def _for_restarts(self, share: float, facts: RunFacts) -> Iterator[Improvement]:
        goodput, text = facts.goodput, "remove what ends the ranks (paceline report names it)"
        yield self._change(text, 1.0 / max(1.0 - share, 1e-9), "no restarts")
        total = goodput.useful_s + goodput.repeated_s + goodput.down_s
        bound = 1.0 / (1.0 - (goodput.repeated_s / 2 / total if total > 0 else 0.0))
        yield self._change("save twice as often (checkpoint.every_steps)", bound, "half the steps made again")

    def _for_compute(self, _: float, facts: RunFacts) -> Iterator[Improvement]:
        run, steps = self.run, facts.steps.without_warm_up()
        total = steps.mean_s("step_s")
        waited = steps.mean_s("comm_s") / total if total > 0 else 0.0
        text, why = f"twice the ranks ({2 * run.world_size})", "compute halves, the rest stays"
        yield self._change(text, 1.0 / ((1.0 - waited) / 2 + waited), why)
        if run.device != "cpu" and run.compute in ("fp32", "tf32"):
            times, text = 16.0 if run.compute == "fp32" else 2.0, "train in bf16 (train.precision = bf16)"
            yield self._change(text, times, "products at the peak of bf16", ["train.precision=bf16"])
        if run.device != "cpu" and self._is_eager and (gain := self.predict(["model.compile=auto"])) is not None:
            yield Improvement(text=_COMPILE, gain=gain, basis="predicted")
        peak, rate = run.measured_peak_flops, steps.samples_per_s
        if peak and rate and run.flops_per_sample:
            bound = peak * run.world_size / (rate * run.flops_per_sample)
            yield self._change("larger products: raise train.microbatch", bound, "the measured peak of products")


def settings_of(folder: Path) -> tuple[Config | None, dict[str, Any]]:
    """Reads a run's config, and its values by dotted key; a loop of one's own, or another version, has values alone."""
    with contextlib.suppress(PacelineError, OSError, ValueError):
        config = load_config(folder / "config.yaml")
        return config, leaf_values(config)
    with contextlib.suppress(PacelineError, OSError, ValueError):
        return None, dotted_values(read_values(folder / "config.yaml"))
    return None, {}


def gains_of(folder: Path, run: RunRecord, cluster: str) -> Gains:
    """Reads the config of a run, and predicts changes of it where its model and ``cluster`` can be priced."""
    config, settings = settings_of(folder)
    if config is None or config.model.kind != "gpt" or not cluster:
        return Gains(run, settings)

    @cache
    def samples_per_s(*overrides: str) -> float | None:
        from paceline.search.request import task_of, workload_as_written
        from paceline.search.search import rank_one

        try:
            changed, place = load_config(folder / "config.yaml", list(overrides)), load_cluster(cluster)
            task = task_of(changed, run.world_size)
            workload = workload_as_written(changed, task, place)
            return None if workload is None else task.global_batch / rank_one(workload, place).seconds
        except (PacelineError, ValueError, KeyError, ArithmeticError):  # this change, or this device, has no price
            return None

    def predict(overrides: Sequence[str]) -> float | None:
        now = samples_per_s()
        changed = samples_per_s(*overrides) if now else None
        return changed / now if changed and now else None

    return Gains(run, settings, predict)


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
        return self.found[0].evidence if self.found else ()

    def lines(self) -> list[str]:
        """Returns the verdict for people: the sentence, what it rests on, what else limits the run, what would help."""
        told = [self.sentence, *(f"  {line}" for line in self.evidence)]
        told += [f"  also {limit}" for limit in self.found[1:]]
        return told + [f"  {number}. {change}" for number, change in enumerate(self.changes, start=1)]

    def to_json(self) -> dict[str, Any]:
        return dict(strict_json(asdict(self))) | {"lines": self.lines()}


UNKNOWN = Limits(what="unknown", sentence="")


def judge_run(facts: RunFacts, gains: Gains | None = None) -> Limits:
    """Says what limited a run, by which evidence, and which two changes would help most: without ``gains``, bounds."""
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
        told = f"{count}: {goodput.repeated_steps:,} recorded steps were made again ({repeated_s}), and "
        told += f"{down_s} passed before training went on; goodput {100 * goodput.share:.0f} %"
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
        told = f"{format_seconds(data * per_step)} of {format_seconds(per_step)} a step, mean of the ranks"
        found.append(_limit("data", data, (told,)))
    waited = steps.mean_s("comm_s") / total
    if (late := facts.straggler) is not None:
        words, load = f"rank {late.rank} holds the others up", facts.by_load
        name, why = ("uneven experts", (str(load),)) if load else ("", ())
        found.append(Limit(what="rank", share=late.loss, words=words, evidence=(str(late), *why), name=name))
        # The rank that comes last waits for the network alone.
        ranks = [add_up(steps.of_rank(rank)) for rank in {rank for row in steps.rows for rank in row}]
        waited = min(own.comm_s / max(own.total_s, 1e-12) for own in ranks)
    if waited >= _COMMUNICATION:
        found.append(_communication(facts, steps, waited, per_step))
    each_step = chain.from_iterable(row.values() for row in steps.rows)
    waits = [(each.host_s, each.steps) for each in each_step if each.host_s is not None]
    host = sum(wait * number for wait, number in waits) / steps.totals().total_s if waits else 0.0
    if host >= _HOST:
        idle, known = sum(number for wait, number in waits if wait > 0), sum(number for _, number in waits)
        told = f"in {idle:,} of {known:,} steps the device had nothing left to do when the host had issued them"
        found.append(_limit("host", host, (told,)))
    return found


def _communication(facts: RunFacts, steps: StepTable, share: float, per_step: float) -> Limit:
    """Tells waiting for a slow link from waiting for much traffic, where it is known what the traffic should take."""
    told = f"{format_seconds(share * per_step)} of {format_seconds(per_step)} a step"
    told += ", of the rank that waits least" if facts.straggler is not None else ", mean of the ranks"
    priced = facts.priced_comm_s
    if not priced:  # not known, or there was nothing to send
        return _limit("communication", share, (told,))
    links = f"what a step sends should take {format_seconds(priced)} on these links, with nothing hidden"
    # A processor or a network that others use too makes some steps wait; a slow link makes all of them.
    waits = [min(record.comm_s for record in row.values()) for row in steps.rows]
    always = middle(waits, steps.weights, 0.1)  # what every rank waits for at least, in nine of ten steps
    if always > _SLOW_LINK * priced:
        times = f"{always / priced:.0f} times as long"
        slow = f"in nine of ten steps every rank waits {format_seconds(always)} or more, {times}"
        found = _limit("link", share, (told, links, slow))
        if facts.is_inside_a_host:  # no network: other work takes the cores or the bus that ranks exchange with
            return replace(found, name="slow exchanges", words="of the step waits for other ranks of this busy host")
        return found
    return _limit("communication", share, (told, links))


def _memory_limits(facts: RunFacts, steps: StepTable) -> list[Limit]:
    memory, share, words, evidence = facts.memory, 0.0, "", list[str]()
    if memory.cuts:
        step, microbatch = max(memory.cuts.items())
        words = f"memory ran out, and ranks went on with microbatches of {microbatch} from step {step} on"
        first = min(memory.cuts)
        rows = [(next(iter(row.values())).step, row) for row in steps.rows]
        before = StepTable(row for step, row in rows if step < first).step_s
        after = StepTable(row for step, row in rows if step > first).step_s
        if before and after:
            share = max(0.0, 1.0 - before / after)
            evidence = [f"a step took {format_seconds(before)} before and {format_seconds(after)} after"]
    elif memory.filled >= _NEARLY_FULL and memory.capacity_bytes:
        words = f"{100 * memory.filled:.0f} % of {format_bytes(memory.capacity_bytes)} is in use at the peak"
    if memory.by_category:
        largest = sorted(memory.by_category.items(), key=lambda each: -each[1])[:3]
        told = ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest)
        evidence.append(f"the plan expects most of {told}")
    return [Limit(what="memory", share=share, words=words, evidence=tuple(evidence))] if words else []


def _compute(facts: RunFacts, steps: StepTable, total: float) -> Limit:
    run, phases = facts.run, {"forward": "forward_s", "backward": "backward_s", "update": "optimizer_s"}
    parts = {name: steps.mean_s(phase) / total for name, phase in phases.items()}
    share = min(1.0, sum(parts.values()))
    told = [", ".join(f"{name} {100 * part:.0f} %" for name, part in parts.items())]
    if run.flops_per_sample and run.peak_flops:
        mfu = (steps.samples_per_s or 0.0) * run.flops_per_sample / run.world_size / run.peak_flops
        told.append(f"MFU {100 * mfu:.1f} % of {format_flops(run.peak_flops)} ({run.compute}, data sheet)")
    return Limit(what="compute", share=share, words="of the step is the model's own work", evidence=tuple(told))


def _limit(what: Cause, share: float, evidence: Sequence[str]) -> Limit:
    return Limit(what=what, share=share, words=WORDS["waits"][what], evidence=tuple(evidence))
