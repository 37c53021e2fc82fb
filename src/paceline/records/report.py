"""What a run did, from its records alone: as values, and as text that the terminal and the page share.

    runs/<name>/records/rank-*.jsonl  --summarize-->  RunSummary  --to_json--> strict JSON
                                                                  --render-->  tables for a console

``summary.py`` says how attempts, ranks and steps become one number. Here besides, for step s and ranks r in it:

    communication    sum over s of      mean_r comm_s                    exposed: what the steps waited
    its share        communication  /   sum over s of mean_r step_s
    model FLOP/s     samples/s x FLOPs of a sample, forward and backward
    MFU              model FLOP/s / (ranks x peak of a device), causal attention as computed: half of the square

Rate and step time leave out the warm-up; a prediction is compared with the last attempt that made a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from paceline.health.experts import WINDOWS, ExpertsVerdict
from paceline.health.straggler import Straggler
from paceline.notebook import Shown
from paceline.records.console import format_loss, parameters_text
from paceline.records.event_words import ELSEWHERE, event_name, event_text
from paceline.records.facts import Goodput, MemoryUse, catalog_name, find_facts
from paceline.records.limits import UNKNOWN, Limits, gains_of, judge_run
from paceline.records.records import CommRecord, ExpertsRecord, RunRecord, strict_json
from paceline.records.summary import FINAL_STEPS, PHASES, RankAttempt, RankSummary, RunRecords, open_run, settled
from paceline.records.thin import add_loads, lengths_of, percentile
from paceline.search.expectation import Compared, compare, read_expectation
from paceline.units import format_bytes, format_count, format_flops, format_percent, format_seconds
from paceline.untrusted import is_number

_TRAFFIC = ("kind", "group", "ranks", "calls", "bytes", "seconds", "bandwidth", "bus_bandwidth")
# Parts of the event ``first_step``, as a reader calls them.
STARTING = {"processes": "starting and loading"} | {name: name for name in ("joining", "data", "model", "checkpoint")}
STARTING |= {"step": "the step", "compiling": "of it compiling"}
RunStatus = Literal["done", "failed", "stopped", "unfinished"]
COMMUNICATION = "communication of a rank"
_MOST_RANKS = 32  # of a table
_NAMES = {"comm_s": "communication", "optimizer_s": "update"}


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
    unsaved: tuple[str, ...] = ()  # what could not be kept, while the run went on without
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
    steps_per_line: int = 1  # that the records add up at most
    step_percentiles: dict[str, float] = field(default_factory=dict)  # where lines add up: seconds of a step
    experts: tuple[ExpertsRecord, ...] = ()  # by layer, of the last windows that were logged
    experts_wrong: tuple[ExpertsVerdict, ...] = ()
    exchange_share: float | None = None  # of the steps' time, in exchanges of rows between ranks with other experts

    def facts(self) -> dict[str, object]:
        strategy = f"{self.strategy} on {self.world_size} ranks"
        found = {"run": self.name, "status": self.status, "strategy": strategy, "steps": self.steps}
        found |= {"loss": self.final_loss, "test loss": self.test_loss, "test accuracy": self.test_accuracy}
        return found | {"took": format_seconds(self.seconds), f"{self.unit}/s": self.units_per_s}

    def to_json(self) -> dict[str, Any]:
        """Returns values that strict JSON can hold; floats that are not finite become strings."""
        values: dict[str, Any] = strict_json(asdict(self))
        return values | {
            "folder": str(self.folder),
            "limits": self.limits.to_json(),
            "goodput": None if self.goodput is None else strict_json(self.goodput.to_json()),
            "traffic": [strict_json({name: getattr(row, name) for name in _TRAFFIC}) for row in self.traffic],
        }


def summarize(run_folder: Path, records: RunRecords | None = None) -> RunSummary:
    """Adds up the records of a run. Reads them if they are not given: RunFolderError for none, or a damaged one."""
    records = open_run(run_folder) if records is None else records
    run, table, evaluation, end = records.run, records.steps, records.evaluation, records.end
    comm_s, step_s = table.mean_s("comm_s"), table.mean_s("step_s")
    samples_per_s = table.without_warm_up().samples_per_s
    prediction = _compared(run_folder, records)
    cluster = "" if prediction is None else catalog_name(prediction.predicted.cluster)
    facts = find_facts(run_folder, records, cluster)
    lead = [record for attempt in records.lead for record in attempt.steps]
    loads = records.loads()
    steps_per_line = max((record.steps for record in lead), default=1)
    lengths = lengths_of(lead) if steps_per_line > 1 else {}  # to 2.5 %: single steps are in the records themselves
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
        late=tuple(f"at step {each.step}: {each.detail.get('sentence', '')}" for each in records.events("straggler")),
        unsaved=tuple(dict.fromkeys(_unsaved(records))),
        limits=judge_run(facts, gains_of(run_folder, run, cluster)),
        start=_start(records.lead),
        steps_per_line=steps_per_line,
        experts=tuple(add_loads(own[1 - WINDOWS :]) for own in loads.values()),
        exchange_share=_exchange_share(facts.traffic, step_s) if loads else None,
        step_percentiles={f"p{share}": percentile(lengths, share / 100) for share in (50, 90, 99, 100) if lengths},
        **{name: getattr(facts, name) for name in ("straggler", "goodput", "traffic", "memory", "experts_wrong")},
        **_about(run, samples_per_s),
    )


def _exchange_share(traffic: Sequence[CommRecord], step_s: float) -> float | None:
    """Returns the share of the steps that rows of experts were under way, also beside compute; None without any."""
    seconds = [each.seconds for each in traffic if each.kind == "all_to_all" and each.group != "context"]
    return min(1.0, sum(seconds) / step_s) if seconds and step_s > 0 else None


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
    if samples_per_s is None:
        return {name: getattr(run, name) for name in names}
    flops = samples_per_s * run.flops_per_sample if run.flops_per_sample else None
    about = {name: getattr(run, name) for name in (*names, "compute", "peak_flops", "measured_peak_flops")}
    peaks = {"mfu": run.peak_flops, "mfu_measured": run.measured_peak_flops}
    shares = {name: flops / peak / run.world_size if flops and peak else None for name, peak in peaks.items()}
    return about | shares | {"units_per_s": samples_per_s * run.units_per_sample, "flops_per_s": flops}


def _compared(run_folder: Path, records: RunRecords) -> Compared | None:
    """Sets what was expected of the last attempt that made a step beside what it did; None if nothing was."""
    expected = read_expectation(run_folder)
    if expected is None:
        return None
    last = next(reversed(records.attempts.values()), None)
    if last is None or last.run.world_size != expected.ranks:
        return compare(expected, None, None)
    made = records.steps.only({step for step, attempt in records.attempts.items() if attempt is last})
    return compare(expected, made.without_warm_up().step_s, made.totals().memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTable:
    """A table as text: a column of words, the others of numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # none: there is nothing to say
    note: str = ""


def render(summary: RunSummary) -> RenderableType:
    """Draws the summary for a console of 80 columns or more: what limited the run, the headline, then the tables."""
    styles = {"done": "green", "failed": "bold red", "stopped": "yellow", "unfinished": "yellow"}
    title = Text().append(summary.name, style="bold").append("  ").append(summary.status, style=styles[summary.status])
    ranks = "1 rank" if summary.world_size == 1 else f"{summary.world_size} ranks"
    size = parameters_text(summary.num_parameters, summary.num_trained)
    about = f"{summary.strategy} on {ranks} ({summary.backend}), {size}, global batch {summary.global_batch}"
    title.append(f"  {summary.message}" if summary.message else "").append(f"\n{about}", style="dim")
    parts: list[RenderableType] = [title, ""]
    if told := summary.limits.lines() if summary.limits.found else []:
        parts += [Text(told[0], style="bold"), *map(Text, told[1:]), ""]
    figures = Table.grid("", Column(style="bold", no_wrap=True), Column(style="dim"), padding=(0, 3, 0, 0))
    for row in headline(summary):
        figures.add_row(*row)
    parts.append(figures)
    for plain in plain_tables(summary):
        table = new_table(plain.title, *plain.columns)
        for cells in plain.rows:
            table.add_row(*cells)
        parts += [Text(), table, *([Text(plain.note, style="dim")] if plain.note else [])]
    if summary.prediction is not None and (told := summary.prediction.lines()):
        parts += ["", *map(Text, told)]
    if summary.straggler is None:  # for a part of the run
        parts += [Text(line, style="yellow") for line in summary.late]
    elif summary.limits.what != "rank":  # else the verdict has said so
        parts.append(Text(str(summary.straggler), style="yellow"))
    for wrong in summary.experts_wrong:
        parts += [Text(str(wrong), style="yellow"), Text(f"  {wrong.advice}")]
    return Group(*parts, *(Text(line, style="yellow") for line in _doubts(summary)))


def headline(summary: RunSummary) -> Iterator[tuple[str, str, str]]:
    """Yields the figures of a run that come first: name, value, and what there is to know about it."""
    if summary.test_accuracy is not None:
        yield "test accuracy", format_percent(summary.test_accuracy), ""
    if summary.test_loss is not None:
        yield "test loss", format_loss(summary.test_loss), ""
    yield from ((f"test {name}", format_loss(value), "") for name, value in summary.test_metrics.items())
    if summary.final_loss is not None:
        last = "the last step" if summary.steps == 1 else f"the last {min(FINAL_STEPS, summary.steps)} steps"
        yield "training loss", format_loss(summary.final_loss), f"all samples of {last}"
    if summary.samples_per_s is not None:
        rate = summary.samples_per_s if summary.units_per_s is None else summary.units_per_s
        note = "all ranks, median step after warm-up"
        if rate != summary.samples_per_s:
            note = f"median step after warm-up, {summary.samples_per_s:,.1f} samples/s"
        yield f"{summary.unit}/s", f"{rate:,.0f}", note
        if summary.flops_per_s is not None:
            told = "forward and backward of the model alone, causal attention in half"
            yield "model FLOP/s", format_flops(summary.flops_per_s), told
        if summary.mfu is not None and summary.peak_flops is not None:
            told = f"of {format_flops(summary.peak_flops)} ({summary.compute}, data sheet)"
            if summary.mfu_measured is not None and summary.measured_peak_flops is not None:
                measured = f"{format_flops(summary.measured_peak_flops)} (measured)"
                told += f", {format_percent(summary.mfu_measured)} of {measured}"
            yield "MFU", format_percent(summary.mfu), told
        share = f"{format_percent(summary.comm_share)} of step time, mean of the ranks"
        yield "time in communication", format_seconds(summary.comm_s), share
    if summary.memory.peak_bytes:
        yield "memory", format_bytes(summary.memory.peak_bytes), "of the rank that needs most"
    took = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in summary.step_percentiles.items())
    told = f"older ones in lines of up to {summary.steps_per_line:,} each; one took {took}"
    yield "steps", f"{summary.steps:,}", told if summary.steps_per_line > 1 else ""
    yield "duration", format_seconds(summary.seconds), ""
    if summary.start:  # parts that took next to nothing are left out
        parts = {STARTING[name]: summary.start[name] for name in STARTING if summary.start.get(name, 0.0) >= 0.05}
        told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
        yield "first step after", format_seconds(summary.start["seconds"]), told


def plain_tables(summary: RunSummary) -> list[PlainTable]:
    """Returns the tables that there is something to say in."""
    ranks = [_rank_table(summary.ranks)] if summary.steps else []
    others = _traffic_table(summary.traffic), _memory_table(summary.memory), _goodput_table(summary.goodput)
    tables = (*ranks, _phase_table(summary.ranks), _experts_table(summary), *others)
    return [table for table in tables if table.rows]


def new_table(title: str, *columns: str) -> Table:
    """Makes a table as all of a report look; on a narrow terminal the first column is broken, and no number is cut."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
    return table


def _rank_table(ranks: Sequence[RankSummary]) -> PlainTable:
    """Shows the ranks, with parts of the step as shares, so that a rank that others wait for stands out."""
    width = max(len(str(rank.rank)) for rank in ranks)
    slowest = sorted(ranks, key=lambda rank: -rank.compute_s)[:_MOST_RANKS]
    shown = {rank.rank for rank in (slowest if len(ranks) > 2 * _MOST_RANKS else ranks)}
    rows = []
    hosts: dict[str, list[str]] = {}
    parts: dict[tuple[int, int], list[str]] = {}  # ranks that were not there all the time
    for rank in ranks:
        name = f"{rank.rank:>{width}} {rank.device.removeprefix('NVIDIA ')}"
        shares = [f"{100 * getattr(rank, phase) / rank.total_s:.1f}" if rank.total_s > 0 else "-" for phase in PHASES]
        took, memory = format_seconds(rank.step_s), format_bytes(rank.memory_bytes)
        if rank.rank in shown:
            rows.append((name, format_count(rank.samples), took, *shares, memory))
        hosts.setdefault(rank.host, []).append(str(rank.rank))
        if rank.absent_steps and rank.steps:
            parts.setdefault((rank.steps, rank.steps + rank.absent_steps), []).append(str(rank.rank))
    where = ", ".join(f"{host} (rank {' '.join(own)})" for host, own in hosts.items())
    if len(shown) < len(ranks):
        where = f"{len(hosts):,} hosts; of {len(ranks):,} ranks those with most work of their own (--json has all)"
    note = f"step: median   data to update: % of step time   comm: waiting for others\non {where}"
    there = (f"\nrank {' '.join(own)}: there in {steps:,} of {of:,} steps" for (steps, of), own in parts.items())
    columns = ("rank", "samples", "step", "data", "forward", "backward", "comm", "update", "memory")
    return PlainTable(title="what each rank did", columns=columns, rows=tuple(rows), note=note + "".join(there))


def _phase_table(ranks: Sequence[RankSummary]) -> PlainTable:
    """Shows how phases differ between ranks: the mean, and who takes least and most."""
    known = [rank for rank in ranks if rank.steps and rank.total_s > 0]
    rows, total = [], sum(rank.total_s for rank in known)
    for phase in PHASES if len(known) > 1 else ():
        seconds = {rank.rank: settled(getattr(rank, phase) / rank.steps) for rank in known}
        least, most = min(seconds, key=lambda rank: seconds[rank]), max(seconds, key=lambda rank: seconds[rank])
        share = sum(float(getattr(rank, phase)) for rank in known) / total
        ends = (format_seconds(seconds[least]), str(least), format_seconds(seconds[most]), str(most))
        mean = format_seconds(sum(seconds.values()) / len(seconds))
        rows.append((_NAMES.get(phase, phase.removesuffix("_s")), mean, format_percent(share), *ends))
    columns = ("phase", "mean", "share", "least", "rank", "most", "rank")
    return PlainTable(title="phases, seconds of a step", columns=columns, rows=tuple(rows))


def _experts_table(summary: RunSummary) -> PlainTable:
    """Shows how even the loads of each layer are: the busiest and the idlest expert, over the fair share."""
    rows = []
    for each in summary.experts:
        loads = sorted(((load, expert) for expert, load in enumerate(each.loads)))
        (least, idle), (most, busy) = loads[0], loads[-1]
        dropped = format_percent(each.dropped / max(1, sum(each.choices)))
        ends = (f"{most:.2f} x", str(busy), f"{least:.2f} x", str(idle))
        rows.append((each.layer, *ends, format_percent(each.entropy), f"{each.auxiliary:.3f}", dropped))
    steps = max((each.steps for each in summary.experts), default=0)
    note = f"of the last {steps:,} steps; busiest and idlest: over the fair share; entropy: of the most that it can be"
    if summary.exchange_share is not None:
        note += f"\nrows were under way between ranks for {format_percent(summary.exchange_share)} of the steps' time"
    columns = ("layer", "busiest", "expert", "idlest", "expert", "entropy", "auxiliary", "dropped")
    return PlainTable(title="experts", columns=columns, rows=tuple(rows), note=note)


def _traffic_table(traffic: Sequence[CommRecord]) -> PlainTable:
    rows = []
    for row in traffic:
        sizes = (str(row.ranks), format_count(row.calls), format_bytes(row.bytes), format_seconds(row.seconds))
        rates = (f"{rate / 1e9:.2f}" if rate > 0 else "-" for rate in (row.bandwidth, row.bus_bandwidth))
        rows.append((row.kind, row.group, *sizes, *rates))
    columns = ("operation", "group", "ranks", "calls", "bytes", "time", "GB/s", "bus GB/s")
    return PlainTable(title=COMMUNICATION, columns=columns, rows=tuple(rows))


def _memory_table(memory: MemoryUse) -> PlainTable:
    total, sizes = sum(memory.by_category.values()), sorted(memory.by_category.items(), key=lambda each: -each[1])
    rows = [(name, format_bytes(size), format_percent(size / total)) for name, size in sizes]
    if rows:
        rows.append(("planned", format_bytes(total), ""))
    if rows and memory.peak_bytes:
        rows.append(("measured peak", format_bytes(memory.peak_bytes), format_percent(memory.peak_bytes / total)))
    return PlainTable(title="memory of a rank, as planned", columns=("category", "bytes", "share"), rows=tuple(rows))


def _goodput_table(goodput: Goodput | None) -> PlainTable:
    rows = []
    if goodput is not None and (goodput.restarts or goodput.repeated_steps or goodput.skipped_steps):
        rows = [
            ("steps that count", format_seconds(goodput.useful_s), f"{100 * goodput.share:.1f} % of the run: goodput"),
            ("steps made again", format_seconds(goodput.repeated_s), f"{goodput.repeated_steps:,} steps"),
            ("down", format_seconds(goodput.down_s), f"{goodput.restarts} restarts, {goodput.roll_backs} roll-backs"),
            ("waiting for saves", format_seconds(goodput.saving_s), "checkpoints and snapshots"),
        ]
    if goodput is not None and goodput.skipped_steps:
        rows.append(("updates left out", "", f"{goodput.skipped_steps:,} steps were not finite"))
    return PlainTable(title="goodput and lost work", columns=("", "time", ""), rows=tuple(rows))


def _unsaved(records: RunRecords) -> Iterator[str]:
    for event in [*records.events("no_snapshots"), *records.events("not_saved")]:
        if event.detail.get("reason") != ELSEWHERE:
            yield f"{event_name(event.name)} at step {event.step}: {event_text(event)}"


def _doubts(summary: RunSummary) -> list[str]:
    """Returns what a reader must know before trusting the figures, or the run's state."""
    there = {rank.rank for rank in summary.ranks if 0 <= rank.rank < summary.world_size}
    num_missing = summary.world_size - len(there)
    missing = itertools.islice((rank for rank in itertools.count() if rank not in there), max(min(num_missing, 8), 0))
    doubts = [f"rank {rank} left no records: the figures are of the other ranks" for rank in missing]
    if num_missing > len(doubts):
        doubts.append(f"and so did {num_missing - len(doubts):,} more ranks")
    most = max(rank.steps + rank.absent_steps for rank in summary.ranks)
    return [*summary.unsaved, *doubts] + [
        f"rank {rank.rank} recorded {rank.steps} of the {most - rank.absent_steps} steps in which it was there"
        if rank.absent_steps
        else f"rank {rank.rank} recorded {rank.steps} steps, others {most}"
        for rank in summary.ranks
        if rank.steps + rank.absent_steps < most
    ]
