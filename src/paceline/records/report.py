"""What a run did, from its records alone.

    runs/<name>/records/rank-*.jsonl  --summarize-->  RunSummary  --render-->  tables for a console
                                                                  --to_json--> strict JSON

Nothing here can tell a measured run from a simulated one: both leave the same records.

How ranks and steps become one number, for step s and ranks r that took part in it:

    samples/s        median over s of   sum_r samples / max_r step_s     the slowest rank sets the pace
    communication    sum over s of      mean_r comm_s                    exposed: what the steps waited
    its share        communication  /   sum over s of mean_r step_s
    step time        median over s of   max_r step_s                     beside what was predicted
    training loss    sum loss_sum   /   sum count                        over all r and the last few s

Rate and step time leave out the first tenth of the steps, and at least one, as they pay for start-up. A prediction is
of the last attempt that made a step, and compared with its steps alone.

A resumed run appends to the same files, so a step may be there twice, and from another number of ranks. What counts
for a step is the last attempt that rank 0 (or the lowest rank there is) made at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.errors import RunFolderError
from paceline.health.straggler import Straggler, find_straggler
from paceline.records.console import format_loss, format_percent
from paceline.records.records import EndRecord, EvalRecord, RunRecord, StepRecord, read_records, strict_json
from paceline.search.expectation import Compared, compare, read_expectation
from paceline.units import format_bytes, format_count, format_seconds

RunStatus = Literal["done", "failed", "stopped", "unfinished"]

FINAL_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """What one rank did. ``step_s`` is the median step, ``total_s`` the sum of all; the other times are sums too.

    ``absent_steps`` are those of attempts with fewer ranks, in which there was none of this number.
    """

    rank: int
    device: str
    host: str
    steps: int
    samples: int
    step_s: float
    total_s: float
    data_s: float
    forward_s: float
    backward_s: float
    comm_s: float
    optimizer_s: float
    memory_bytes: int
    absent_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run did. ``unfinished`` means that no end was recorded: the run goes on, or was killed."""

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


def summarize(run_folder: Path) -> RunSummary:
    """Reads the records of a run.

    Raises:
        RunFolderError: the folder holds no records, or a damaged one.
    """
    logs = _read_logs(run_folder)
    lead = logs[min(logs)]
    run = lead.attempts[-1].run
    steps = _steps_that_count(logs)
    # Every rank records the same result; after a resume on fewer ranks, some have only an older one.
    evaluations = [log.evaluation for log in logs.values() if log.evaluation is not None]
    evaluation = max(evaluations, key=lambda record: record.time, default=None)
    end = _end(log.attempts[-1].end for rank, log in logs.items() if rank < run.world_size)
    comm_s = sum(_mean(record.comm_s for record in ranks.values()) for ranks in steps.values())
    step_s = sum(_mean(record.step_s for record in ranks.values()) for ranks in steps.values())
    return RunSummary(
        name=run_folder.resolve().name,
        folder=run_folder,
        status="unfinished" if end is None else end.status,
        message="" if end is None else end.message,
        strategy=run.strategy,
        backend=run.backend,
        world_size=run.world_size,
        num_parameters=run.num_parameters,
        global_batch=run.global_batch,
        steps=max(steps, default=0),
        seconds=sum(attempt.seconds for attempt in lead.attempts),
        final_loss=_final_loss(list(steps.values())[-FINAL_STEPS:]),
        test_loss=None if evaluation is None else evaluation.loss,
        test_accuracy=None if evaluation is None else evaluation.accuracy,
        samples_per_s=_samples_per_s(list(steps.values())),
        comm_share=comm_s / step_s if step_s > 0 else 0.0,
        comm_s=comm_s,
        ranks=tuple(_rank_summary(rank, logs, steps) for rank in sorted(logs)),
        prediction=_compared(run_folder, logs, steps),
        straggler=find_straggler(list(steps.values())),
        late=tuple(told for _, log in sorted(logs.items()) for told in log.late),
    )


def to_json(summary: RunSummary) -> dict[str, Any]:
    """Returns the summary as values that strict JSON can hold; floats that are not finite become strings."""
    values: dict[str, Any] = strict_json(asdict(summary))
    return values | {"folder": str(summary.folder)}


def render(summary: RunSummary) -> RenderableType:
    """Draws the summary for a console of 80 columns or more: the headline, then what each rank did."""
    parts: list[RenderableType] = [_title(summary), "", _headline(summary)]
    if summary.steps > 0:
        parts += ["", _rank_table(summary), Text(_rank_legend(summary), style="dim")]
    if summary.prediction is not None:
        told = summary.prediction.lines()
        parts += ["", *map(Text, told)] if told else []
    if summary.straggler is not None:
        parts.append(Text(str(summary.straggler), style="yellow"))
    else:  # for a part of the run
        parts += [Text(told, style="yellow") for told in summary.late]
    parts += [Text(line, style="yellow") for line in _doubts(summary)]
    return Group(*parts)


@dataclass(slots=True)
class _Attempt:
    """From one RunRecord of a rank to the next."""

    run: RunRecord
    last_time: float
    end: EndRecord | None = None

    @property
    def seconds(self) -> float:
        return self.end.seconds if self.end is not None else self.last_time - self.run.time


@dataclass(slots=True)
class _RankLog:
    """All that one rank wrote; of a step written twice, the later record, with the attempt it belongs to."""

    attempts: list[_Attempt] = field(default_factory=list)
    steps: dict[int, tuple[_Attempt, StepRecord]] = field(default_factory=dict)
    evaluation: EvalRecord | None = None
    late: list[str] = field(default_factory=list)


def _read_logs(run_folder: Path) -> dict[int, _RankLog]:
    records = run_folder / "records"
    logs = {}
    for path in records.glob("rank-*.jsonl"):
        number = re.fullmatch(r"rank-(\d+)\.jsonl", path.name)
        log = _read_log(path)
        if number and log.attempts:
            logs[int(number[1])] = log
    if not logs:
        what = "has no rank-<r>.jsonl with a record in it" if records.is_dir() else "does not exist"
        raise RunFolderError(
            f"no run to report on in {run_folder}: {records} {what}\n"
            "  every rank writes its records there from its first moment on\n"
            "  give the folder of a run, such as runs/<name>, or start one with: paceline train CONFIG"
        )
    return logs


def _read_log(path: Path) -> _RankLog:
    log = _RankLog()
    try:
        for record in read_records(path):
            if isinstance(record, RunRecord):
                log.attempts.append(_Attempt(run=record, last_time=record.time))
                continue
            if not log.attempts:
                raise ValueError(f"{path}, line 1: the first record of a file is that of the run")
            attempt = log.attempts[-1]
            attempt.last_time = record.time
            if isinstance(record, StepRecord):
                log.steps[record.step] = (attempt, record)
            elif isinstance(record, EvalRecord):
                log.evaluation = record
            elif isinstance(record, EndRecord):
                attempt.end = record
            elif record.name == "straggler":
                log.late.append(f"at step {record.step}: {record.detail.get('sentence', '')}")
    except ValueError as error:
        raise RunFolderError(
            f"a record cannot be read: {error}\n"
            "  every line is one record, written whole\n"
            "  remove the line if the file was edited or the disk failed; the rest can be reported on"
        ) from error
    return log


def _steps_that_count(logs: dict[int, _RankLog]) -> dict[int, dict[int, StepRecord]]:
    """Returns, by step in order, the record of each rank that took part in the attempt that counts."""
    lead = logs[min(logs)]
    return {
        step: {
            rank: log.steps[step][1]
            for rank, log in logs.items()
            if step in log.steps and log.steps[step][0].run.world_size == attempt.run.world_size
        }
        for step, (attempt, _) in sorted(lead.steps.items())
    }


def _end(ends: Iterable[EndRecord | None]) -> EndRecord | None:
    """Returns the worst end among the ranks: one that failed, else none at all, else one that was stopped."""
    known = list(ends)
    failed = next((end for end in known if end is not None and end.status == "failed"), None)
    if failed is not None or None in known:
        return failed
    return next((end for end in known if end is not None and end.status == "stopped"), known[0])


def _final_loss(steps: list[dict[int, StepRecord]]) -> float | None:
    records = [record for ranks in steps for record in ranks.values()]
    count = sum(record.count for record in records)
    return sum(record.loss_sum for record in records) / count if count else None


def _compared(run_folder: Path, logs: dict[int, _RankLog], steps: dict[int, dict[int, StepRecord]]) -> Compared | None:
    """Returns what was expected of the last attempt that made a step, beside what it did; None if nothing was."""
    expected = read_expectation(run_folder)
    if expected is None:
        return None
    lead = logs[min(logs)]
    last = next(
        (each for each in reversed(lead.attempts) if any(each is made for made, _ in lead.steps.values())), None
    )
    if last is None or last.run.world_size != expected.ranks:
        return compare(expected, None, None)
    made = [ranks for step, ranks in steps.items() if lead.steps[step][0] is last]
    slowest = [max(record.step_s for record in ranks.values()) for ranks in made]
    memory = max(record.memory_bytes for ranks in made for record in ranks.values())
    return compare(expected, median(slowest[max(1, len(slowest) // 10) :] or slowest), memory)


def _samples_per_s(steps: list[dict[int, StepRecord]]) -> float | None:
    num_warm_up = max(1, len(steps) // 10)
    rates = [
        sum(record.samples for record in ranks.values()) / slowest
        for ranks in steps[num_warm_up:] or steps
        if (slowest := max(record.step_s for record in ranks.values())) > 0
    ]
    return median(rates) if rates else None


def _rank_summary(rank: int, logs: dict[int, _RankLog], steps: dict[int, dict[int, StepRecord]]) -> RankSummary:
    records = [ranks[rank] for ranks in steps.values() if rank in ranks]
    run, lead = logs[rank].attempts[-1].run, logs[min(logs)]
    return RankSummary(
        rank=rank,
        device=run.device,
        host=run.host,
        steps=len(records),
        samples=sum(record.samples for record in records),
        step_s=median(record.step_s for record in records) if records else 0.0,
        total_s=sum(record.step_s for record in records),
        data_s=sum(record.data_s for record in records),
        forward_s=sum(record.forward_s for record in records),
        backward_s=sum(record.backward_s for record in records),
        comm_s=sum(record.comm_s for record in records),
        optimizer_s=sum(record.optimizer_s for record in records),
        memory_bytes=max((record.memory_bytes for record in records), default=0),
        absent_steps=sum(attempt.run.world_size <= rank for attempt, _ in lead.steps.values()),
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _title(summary: RunSummary) -> Text:
    styles = {"done": "green", "failed": "bold red", "stopped": "yellow", "unfinished": "yellow"}
    ranks = "1 rank" if summary.world_size == 1 else f"{summary.world_size} ranks"
    title = Text().append(summary.name, style="bold").append("  ").append(summary.status, style=styles[summary.status])
    if summary.message:
        title.append(f"  {summary.message}")
    return title.append(
        f"\n{summary.strategy} on {ranks} ({summary.backend}), {format_count(summary.num_parameters)} parameters, "
        f"global batch {summary.global_batch}",
        style="dim",
    )


def _headline(summary: RunSummary) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim")
    if summary.test_accuracy is not None:
        table.add_row("test accuracy", format_percent(summary.test_accuracy), "")
    if summary.test_loss is not None:
        table.add_row("test loss", format_loss(summary.test_loss), "")
    if summary.final_loss is not None:
        last = "the last step" if summary.steps == 1 else f"the last {min(FINAL_STEPS, summary.steps)} steps"
        table.add_row("training loss", format_loss(summary.final_loss), f"all samples of {last}")
    if summary.samples_per_s is not None:
        table.add_row("samples/s", f"{summary.samples_per_s:,.0f}", "all ranks, median step after warm-up")
        share = f"{format_percent(summary.comm_share)} of step time, mean of the ranks"
        table.add_row("time in communication", _format_seconds(summary.comm_s), share)
    table.add_row("steps", f"{summary.steps:,}", "")
    table.add_row("duration", _format_seconds(summary.seconds), "")
    return table


def _rank_table(summary: RunSummary) -> Table:
    """Draws the ranks, with parts of the step as shares, so that a rank that others wait for stands out."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.title, table.title_justify, table.title_style = "what each rank did", "left", "bold"
    table.add_column("rank", no_wrap=True)
    for name in ("samples", "step", "data", "forward", "backward", "comm", "update", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    width = max(len(str(rank.rank)) for rank in summary.ranks)
    for rank in summary.ranks:
        times = (rank.data_s, rank.forward_s, rank.backward_s, rank.comm_s, rank.optimizer_s)
        table.add_row(
            f"{rank.rank:>{width}} {rank.device.removeprefix('NVIDIA ')}",
            format_count(rank.samples),
            _format_seconds(rank.step_s),
            *(f"{100 * seconds / rank.total_s:.1f}" if rank.total_s > 0 else "-" for seconds in times),
            format_bytes(rank.memory_bytes),
        )
    return table


def _rank_legend(summary: RunSummary) -> str:
    hosts: dict[str, list[str]] = {}
    for rank in summary.ranks:
        hosts.setdefault(rank.host, []).append(str(rank.rank))
    where = ", ".join(f"{host} (rank {' '.join(ranks)})" for host, ranks in hosts.items())
    legend = f"step: median   data to update: % of step time   comm: waiting for others\non {where}"
    return "\n".join([legend, *_comings(summary)])


def _comings(summary: RunSummary) -> list[str]:
    """Says which ranks were not there all the time, as the run went on with more or fewer of them."""
    found: dict[tuple[int, int], list[str]] = {}
    for rank in summary.ranks:
        if rank.absent_steps and rank.steps:
            found.setdefault((rank.steps, rank.steps + rank.absent_steps), []).append(str(rank.rank))
    return [f"rank {' '.join(ranks)}: there in {steps:,} of {of:,} steps" for (steps, of), ranks in found.items()]


def _doubts(summary: RunSummary) -> list[str]:
    """Returns what a reader must know before trusting the figures."""
    missing = sorted(set(range(summary.world_size)) - {rank.rank for rank in summary.ranks})
    doubts = [f"rank {rank} left no records: the figures are of the other ranks" for rank in missing]
    most = max(rank.steps + rank.absent_steps for rank in summary.ranks)
    return doubts + [
        f"rank {rank.rank} recorded {rank.steps} of the {most - rank.absent_steps} steps in which it was there"
        if rank.absent_steps
        else f"rank {rank.rank} recorded {rank.steps} steps, others {most}"
        for rank in summary.ranks
        if rank.steps + rank.absent_steps < most
    ]


def _format_seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds > 0 else "0 s"
