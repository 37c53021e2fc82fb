"""Adds up step records: the one place where the records of ranks become numbers.

    files of a run  --open_run-->  RunRecords: attempts of each rank, one row a step  --> medians, sums, shares

For step s and the ranks r that took part in it:

    length of a step   max_r step_s                                the slowest rank sets the pace
    samples/s          median over s of  sum_r samples / length
    loss               sum loss_sum / sum count                    over all r and some s
    compute            sum (step_s - comm_s)                       comm_s is exposed: what a step waited for others
    efficiency         compute of all ranks / (ranks x sum of lengths): 1 where nobody ever waits

The first tenth of the steps, and at least one, pays for start-up: ``without_warm_up`` leaves it out. A record that
adds up several steps (``thin.py``) counts as so many of their mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter, mul
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from paceline.config.suggest import near_folders
from paceline.errors import RunFolderError
from paceline.health.straggler import steps_of, without_warm_up
from paceline.records import records as kinds
from paceline.records.thin import part_until

PHASES = ("data_s", "forward_s", "backward_s", "comm_s", "optimizer_s")  # of a step, as fields of its record
FINAL_STEPS = 5  # the training loss at the end of a run is that of its last few steps

_Kind = TypeVar("_Kind", kinds.StepRecord, kinds.EvalRecord, kinds.EventRecord, kinds.EndRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttempt:
    """One start of a rank: its run record, and what it wrote after that, in order; its last may be missing."""

    run: kinds.RunRecord
    records: tuple[kinds.Record, ...] = ()

    @property
    def steps(self) -> tuple[kinds.StepRecord, ...]:
        return self._all(kinds.StepRecord)

    @property
    def evaluations(self) -> tuple[kinds.EvalRecord, ...]:
        return self._all(kinds.EvalRecord)

    @property
    def events(self) -> tuple[kinds.EventRecord, ...]:
        return self._all(kinds.EventRecord)

    @property
    def end(self) -> kinds.EndRecord | None:
        """The end that was recorded; None: the attempt goes on, or was killed."""
        ends = self._all(kinds.EndRecord)
        return ends[-1] if ends else None

    @property
    def last_time(self) -> float:
        return (self.records[-1] if self.records else self.run).time

    @property
    def seconds(self) -> float:
        """How long it lasted, as far as the records say."""
        return self.end.seconds if self.end is not None else self.last_time - self.run.time

    def _all(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        return tuple(each for each in self.records if isinstance(each, kind))


def split_attempts(records: Sequence[kinds.Record]) -> list[RankAttempt]:
    """Cuts the records of a rank into attempts; a resumed run appends to the same file."""
    groups: list[tuple[kinds.RunRecord, list[kinds.Record]]] = []
    for record in records:
        if isinstance(record, kinds.RunRecord):
            groups.append((record, []))
        elif groups:
            groups[-1][1].append(record)
    return [RankAttempt(run=run, records=tuple(others)) for run, others in groups]


def read_run(run_folder: Path) -> dict[int, list[RankAttempt]]:
    """Reads the attempts of each rank that has any, by rank in order. Raises RunFolderError for a damaged record."""
    found = {}
    for path in (run_folder / "records").glob("rank-*.jsonl"):
        number = re.fullmatch(r"rank-([0-9]{1,9})\.jsonl", path.name)
        if number and (records := read_file(path, kinds.RunRecord)):
            found[int(number[1])] = split_attempts(records)
    return dict(sorted(found.items()))


def open_run(run_folder: Path, *, with_hosts: bool = False) -> RunRecords:
    """Reads what the ranks of a run wrote, and its hosts if asked. Raises RunFolderError for none, or a damaged one."""
    ranks = read_run(run_folder)
    if not ranks:
        records = run_folder / "records"
        what = "has no rank-<r>.jsonl with a record in it" if records.is_dir() else "does not exist"
        fix = near_folders(run_folder) or "give the folder of a run, or start one with: paceline train CONFIG"
        rule = "every rank writes its records there from its first moment on"
        raise RunFolderError(f"no run to report on in {run_folder}: {records} {what}\n  {rule}\n  {fix}")
    paths = sorted((run_folder / "records").glob("host-*.jsonl")) if with_hosts else []
    hosts = [each for path in paths for each in read_file(path, kinds.HostRecord) if isinstance(each, kinds.HostRecord)]
    return RunRecords(ranks, hosts)


def read_file(path: Path, first: type[kinds.Record]) -> list[kinds.Record]:
    """Reads one file of records, which begins with one of the type ``first``. Raises RunFolderError if it cannot."""
    try:
        records = list(kinds.read_records(path))
        if records and not isinstance(records[0], first):
            raise ValueError(f"{path}, line 1: the first record is no {first.__name__}")
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror or error}"
        fix = "remove it, or copy the run's folder again; the other ranks can be reported on"
        raise RunFolderError(f"{what}\n  records are plain files that a run wrote\n  {fix}") from error
    except ValueError as error:
        what = f"a record cannot be read: {error}"
        fix = "remove the line if the file was edited or the disk failed; the rest can be reported on"
        raise RunFolderError(f"{what}\n  every line is one record, written whole\n  {fix}") from error
    return records


def final_steps(attempts: Sequence[RankAttempt]) -> dict[int, kinds.StepRecord]:
    """Returns the steps of a rank that its final state is made of: a step made again replaces it and all later ones."""
    return {step: record for step, (_, record) in _steps_with_attempts(attempts).items()}


def _steps_with_attempts(attempts: Sequence[RankAttempt]) -> dict[int, tuple[RankAttempt, kinds.StepRecord]]:
    found: dict[int, tuple[RankAttempt, kinds.StepRecord]] = {}
    for attempt in attempts:
        for record in attempt.steps:
            if found and record.step <= next(reversed(found)):
                later = [(own, made) for step, (own, made) in found.items() if step >= record.step]
                found = {step: made for step, made in found.items() if step < record.step}
                if isinstance(span := later[0][1], kinds.SpanRecord) and span.step - span.steps < record.step - 1:
                    found[record.step - 1] = later[0][0], part_until(span, record.step - 1)
            found[record.step] = attempt, record
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over step records: ``total_s`` of whole steps, and of phases; the median ``step_s``, the most memory."""

    steps: int
    samples: int
    count: int
    loss_sum: float
    step_s: float
    total_s: float
    data_s: float
    forward_s: float
    backward_s: float
    comm_s: float
    optimizer_s: float
    memory_bytes: int

    @property
    def loss(self) -> float | None:
        """The mean loss of all that was counted; None where nothing was."""
        return self.loss_sum / self.count if self.count else None

    @property
    def compute_s(self) -> float:
        """What the steps did not wait for others."""
        return self.total_s - self.comm_s

    @property
    def comm_share(self) -> float:
        """The share of the steps' time that they waited for others."""
        return self.comm_s / self.total_s if self.total_s else 0.0

    def efficiency(self, ranks: int, took_s: float) -> float:
        """Returns the share in which ``ranks`` ranks computed, of steps that took so long together."""
        return self.compute_s / (ranks * took_s) if took_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary(Totals):
    """What one rank did. ``absent_steps`` are those of attempts with fewer ranks, which had none of this number."""

    rank: int
    device: str
    host: str
    absent_steps: int = 0


def add_up(records: Iterable[kinds.StepRecord]) -> Totals:
    """Adds up records of one rank or of many, in their order."""
    return Totals(**_sums(records))


def _sums(records: Iterable[kinds.StepRecord]) -> dict[str, Any]:
    known = list(records)
    steps = [record.steps for record in known]
    return {
        "steps": sum(steps),
        "total_s": sum(map(mul, map(attrgetter("step_s"), known), steps)),
        "step_s": middle([record.step_s for record in known], steps) if known else 0.0,
        "memory_bytes": max((record.memory_bytes for record in known), default=0),
        **{name: sum(map(attrgetter(name), known)) for name in ("samples", "count", "loss_sum")},
        **{name: sum(map(mul, map(attrgetter(name), known), steps)) for name in PHASES},
    }


def middle(values: Sequence[float], weights: Sequence[int], share: float = 0.5) -> float:
    """Returns the median of values that count several times each, or another share of them."""
    if share == 0.5 and max(weights) == 1:
        return median(values)
    left = share * sum(weights)
    for value, weight in sorted(zip(values, weights, strict=True)):
        left -= weight
        if left < 0:
            return value
    return max(values)


class StepTable:
    """Steps in order; each row has the records of the ranks that took part in the step, by rank."""

    def __init__(self, rows: Iterable[Mapping[int, kinds.StepRecord]]) -> None:
        self.rows = tuple(row for row in rows if row)

    def __len__(self) -> int:
        return sum(self.weights)

    @cached_property
    def weights(self) -> list[int]:
        """How many steps each row stands for."""
        return list(map(steps_of, self.rows))

    def only(self, numbers: Collection[int]) -> StepTable:
        return StepTable(row for row in self.rows if next(iter(row.values())).step in numbers)

    def last(self, num_steps: int) -> StepTable:
        return StepTable(self.rows[-num_steps:])

    def without_warm_up(self) -> StepTable:
        """Leaves out the first tenth of the steps, and at least one, unless nothing would be left."""
        return StepTable(without_warm_up(self.rows) or self.rows)

    @cached_property
    def lengths(self) -> list[float]:
        """The seconds of each step: those of the slowest rank."""
        return [max(map(attrgetter("step_s"), row.values())) for row in self.rows]

    @property
    def took_s(self) -> float:
        return float(sum(map(mul, self.lengths, self.weights)))

    @property
    def step_s(self) -> float | None:
        """The median length of a step; None without any."""
        return middle(self.lengths, self.weights) if self.rows else None

    @property
    def samples_per_s(self) -> float | None:
        """The median throughput of all ranks; None without a step that took time."""
        timed = [(row, length) for row, length in zip(self.rows, self.lengths, strict=True) if length > 0]
        rates = [sum(each.samples / each.steps for each in row.values()) / length for row, length in timed]
        return middle(rates, [steps_of(row) for row, _ in timed]) if timed else None

    def of_rank(self, rank: int) -> list[kinds.StepRecord]:
        return [row[rank] for row in self.rows if rank in row]

    def totals(self) -> Totals:
        return add_up(chain.from_iterable(row.values() for row in self.rows))

    def mean_s(self, phase: str) -> float:
        """Returns the seconds of a phase, such as ``comm_s``: the mean of the ranks, added up over the steps."""
        means = (sum(map(attrgetter(phase), row.values())) / len(row) for row in self.rows)
        return float(sum(map(mul, means, self.weights)))


class RunRecords:
    """What the ranks of a run wrote, and the table of its steps.

    ``lead`` are the attempts of the lowest of the ``ranks``, whose last one at a step counts: see ``attempts``.
    """

    def __init__(self, ranks: Mapping[int, Sequence[RankAttempt]], hosts: Sequence[kinds.HostRecord] = ()) -> None:
        self.ranks = ranks
        self.hosts = hosts
        self.lead = next(iter(ranks.values()))
        self.run = self.lead[-1].run
        made = {rank: _steps_with_attempts(own) for rank, own in ranks.items()}
        self._lead = next(iter(made.values()))
        self.attempts = {step: attempt for step, (attempt, _) in self._lead.items()}
        rows = []
        for step, attempt in self.attempts.items():
            there = {rank: own[step] for rank, own in made.items() if step in own}
            size = attempt.run.world_size
            rows.append({rank: record for rank, (own, record) in there.items() if own.run.world_size == size})
        self.steps = StepTable(rows)

    @classmethod
    def of(cls, records: Sequence[Sequence[kinds.Record]], hosts: Sequence[kinds.HostRecord] = ()) -> RunRecords:
        """Takes the records of each rank, in the order of ranks."""
        return cls(dict(enumerate(map(split_attempts, records))), hosts)

    def events(self, name: str) -> list[kinds.EventRecord]:
        """Returns the events of a name of all ranks, rank by rank."""
        attempts = chain.from_iterable(self.ranks.values())
        return [event for attempt in attempts for event in attempt.events if event.name == name]

    def loads(self) -> dict[str, list[kinds.ExpertsRecord]]:
        """Returns what routers of experts did, by layer; a record replaces those of its step and later ones."""
        attempts = chain.from_iterable(self.ranks.values())
        return loads_by_layer(chain.from_iterable(attempt.records for attempt in attempts))

    def of_rank(self, rank: int) -> RankSummary:
        """Adds up one rank's steps."""
        run = self.ranks[rank][-1].run
        absent = sum(record.steps for attempt, record in self._lead.values() if attempt.run.world_size <= rank)
        sums = _sums(self.steps.of_rank(rank))
        return RankSummary(rank=rank, device=run.device, host=run.host, absent_steps=absent, **sums)

    @property
    def evaluation(self) -> kinds.EvalRecord | None:
        """The last evaluation. Every rank records the same; after a resume on fewer, some have only an older one."""
        found = [[each for attempt in own for each in attempt.evaluations] for own in self.ranks.values()]
        return max((own[-1] for own in found if own), key=lambda record: record.time, default=None)

    @property
    def end(self) -> kinds.EndRecord | None:
        """The worst end among the ranks of the last attempt."""
        return worst_end(own[-1].end for rank, own in self.ranks.items() if rank < self.run.world_size)


def loads_by_layer(records: Iterable[kinds.Record]) -> dict[str, list[kinds.ExpertsRecord]]:
    found: dict[str, list[kinds.ExpertsRecord]] = {}
    for record in (each for each in records if isinstance(each, kinds.ExpertsRecord)):
        own = found.setdefault(record.layer, [])
        while own and own[-1].step >= record.step:  # the run went back
            own.pop()
        own.append(record)
    return found


def worst_end(ends: Iterable[kinds.EndRecord | None]) -> kinds.EndRecord | None:
    """Returns the worst end of some ranks: one that failed, else none at all, else one that was stopped."""
    known = list(ends)
    found = {end.status: end for end in reversed(known) if end is not None}
    if "failed" in found or None in known or not known:
        return found.get("failed")
    return found.get("stopped", known[0])


def settled(value: float) -> float:
    """Returns nine digits of a value: ranks whose times differ by the rounding of sums are equal, the first counts."""
    return float(f"{value:.9g}")
