"""What a run did, from its records alone.

    runs/<name>/records/rank-*.jsonl  --summarize-->  RunSummary  --to_json--> strict JSON
                                                                  --render-->  tables for a console (tables.py)

Nothing here can tell a measured run from a simulated one: both leave the same records.

How ranks and steps become one number is said in ``summary.py``. Here besides, for step s and ranks r that took part:

    communication    sum over s of      mean_r comm_s                    exposed: what the steps waited
    its share        communication  /   sum over s of mean_r step_s
    model FLOP/s     samples/s x FLOPs of a sample, forward and backward
    MFU              model FLOP/s / (ranks x peak of a device)

Rate and step time leave out the warm-up. A prediction is of the last attempt that made a step, and compared with its
steps alone.

A resumed run appends to the same files, so a step may be there twice, and from another number of ranks: ``RunRecords``
in ``summary.py`` says what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.health.straggler import Straggler
from paceline.notebook import Shown
from paceline.records.facts import Goodput, MemoryUse, catalog_name, find_facts
from paceline.records.gains import gains_of
from paceline.records.limits import UNKNOWN, Limits, judge_run
from paceline.records.records import CommRecord, RunRecord, strict_json
from paceline.records.summary import FINAL_STEPS, RankAttempt, RankSummary, RunRecords, open_run
from paceline.search.expectation import Compared, compare, read_expectation
from paceline.units import format_seconds
from paceline.untrusted import is_number

_TRAFFIC = ("kind", "group", "ranks", "calls", "bytes", "seconds", "bandwidth", "bus_bandwidth")
# Parts of the event ``first_step``, as a reader calls them.
STARTING = {
    "processes": "starting and loading",
    "joining": "joining",
    "data": "data",
    "model": "model",
    "checkpoint": "checkpoint",
    "step": "the step",
    "compiling": "of it compiling",
}
RunStatus = Literal["done", "failed", "stopped", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunSummary(Shown):
    """What a run did. ``unfinished`` means that no end was recorded: the run goes on, or was killed.

    ``units_per_s`` counts ``unit``: tokens, images or samples. ``mfu`` is of the peak in the device's data sheet, in
    the dtype ``compute``; ``mfu_measured`` of the most that products were measured to reach.
    """

    name: str
    folder: Path
    status: RunStatus
    message: str
    strategy: str
    backend: str
    world_size: int
    num_parameters: int
    global_batch: int
    steps: int
    seconds: float
    final_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    samples_per_s: float | None
    comm_share: float
    comm_s: float
    ranks: tuple[RankSummary, ...]
    prediction: Compared | None = None
    straggler: Straggler | None = None
    late: tuple[str, ...] = ()  # who was told to be late while the run went on
    unit: str = "samples"
    units_per_s: float | None = None
    flops_per_s: float | None = None
    compute: str = ""
    peak_flops: float | None = None
    measured_peak_flops: float | None = None
    mfu: float | None = None
    mfu_measured: float | None = None
    num_trained: int | None = None
    limits: Limits = UNKNOWN  # what limited the run, and what would help
    goodput: Goodput | None = None
    traffic: tuple[CommRecord, ...] = ()  # most bytes first
    memory: MemoryUse = field(default_factory=MemoryUse)
    test_metrics: dict[str, float] = field(default_factory=dict)  # perplexity, and those of one's own
    start: dict[str, float] = field(default_factory=dict)  # seconds to the first step of the last attempt, and parts

    def facts(self) -> dict[str, object]:
        return {
            "run": self.name,
            "status": self.status,
            "strategy": f"{self.strategy} on {self.world_size} ranks",
            "steps": self.steps,
            "loss": self.final_loss,
            "test loss": self.test_loss,
            "test accuracy": self.test_accuracy,
            "took": format_seconds(self.seconds),
            f"{self.unit}/s": self.units_per_s,
        }


def summarize(run_folder: Path) -> RunSummary:
    """Reads the records of a run. Raises RunFolderError for a folder without records, or with a damaged one."""
    records = open_run(run_folder)
    run, table, evaluation, end = records.run, records.steps, records.evaluation, records.end
    comm_s, step_s = table.mean_s("comm_s"), table.mean_s("step_s")
    samples_per_s = table.without_warm_up().samples_per_s
    prediction = _compared(run_folder, records)
    cluster = "" if prediction is None else catalog_name(prediction.predicted.cluster)
    facts = find_facts(run_folder, records, cluster)
    return RunSummary(
        name=run_folder.resolve().name,
        folder=run_folder,
        status="unfinished" if end is None else end.status,
        message="" if end is None else end.message,
        steps=max(records.attempts, default=0),
        seconds=sum(attempt.seconds for attempt in records.lead),
        final_loss=table.last(FINAL_STEPS).totals().loss,
        test_loss=None if evaluation is None else evaluation.loss,
        test_accuracy=None if evaluation is None else evaluation.accuracy,
        test_metrics={} if evaluation is None else evaluation.metrics,
        samples_per_s=samples_per_s,
        comm_share=comm_s / step_s if step_s > 0 else 0.0,
        comm_s=comm_s,
        ranks=tuple(map(records.of_rank, records.ranks)),
        prediction=prediction,
        straggler=facts.straggler,
        late=tuple(f"at step {each.step}: {each.detail.get('sentence', '')}" for each in records.events("straggler")),
        limits=judge_run(facts, gains_of(run_folder, run, cluster)),
        goodput=facts.goodput,
        traffic=facts.traffic,
        memory=facts.memory,
        start=_start(records.lead),
        **_about(run, samples_per_s),
    )


def _start(attempts: Sequence[RankAttempt]) -> dict[str, float]:
    """Returns the seconds to the first step of the last attempt that made one, with its parts."""
    for attempt in reversed(attempts):
        found = {event.name: event for event in reversed(attempt.events)}  # the first of each name
        first, compiled = found.get("first_step"), found.get("compiled")
        if first is not None and is_number(first.detail.get("seconds")):
            took = compiled.detail.get("seconds") if compiled is not None and compiled.step == first.step else None
            parts = {name: first.detail.get(name) for name in ("seconds", *STARTING)} | {"compiling": took}
            return {name: seconds for name, seconds in parts.items() if is_number(seconds)}
    return {}


def _about(run: RunRecord, samples_per_s: float | None) -> dict[str, Any]:
    """Returns what the first record says, how fast the run was in what it counts, and how good that is, if known."""
    names = ("strategy", "backend", "world_size", "num_parameters", "num_trained", "global_batch", "unit")
    about = {name: getattr(run, name) for name in names}
    if samples_per_s is None:
        return about
    flops = samples_per_s * run.flops_per_sample if run.flops_per_sample else None

    def share(peak: float | None) -> float | None:
        return flops / peak / run.world_size if flops and peak else None

    return about | {
        "units_per_s": samples_per_s * run.units_per_sample,
        "flops_per_s": flops,
        "compute": run.compute,
        "peak_flops": run.peak_flops,
        "measured_peak_flops": run.measured_peak_flops,
        "mfu": share(run.peak_flops),
        "mfu_measured": share(run.measured_peak_flops),
    }


def to_json(summary: RunSummary) -> dict[str, Any]:
    """Returns the summary as values that strict JSON can hold; floats that are not finite become strings."""
    values: dict[str, Any] = strict_json(asdict(summary))
    more = {
        "folder": str(summary.folder),
        "limits": summary.limits.to_json(),
        "goodput": None if summary.goodput is None else strict_json(summary.goodput.to_json()),
        "traffic": [strict_json({name: getattr(row, name) for name in _TRAFFIC}) for row in summary.traffic],
    }
    return values | more


def _compared(run_folder: Path, records: RunRecords) -> Compared | None:
    """Returns what was expected of the last attempt that made a step, beside what it did; None if nothing was."""
    expected = read_expectation(run_folder)
    if expected is None:
        return None
    last = next(reversed(records.attempts.values()), None)
    if last is None or last.run.world_size != expected.ranks:
        return compare(expected, None, None)
    made = records.steps.only({step for step, attempt in records.attempts.items() if attempt is last})
    return compare(expected, made.without_warm_up().step_s, made.totals().memory_bytes)
