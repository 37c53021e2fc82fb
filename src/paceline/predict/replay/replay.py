"""Replays programs on a cluster: when every kernel and every collective of a step would run, and what the step takes.

A rank has a host that launches one thing after another, a compute stream, and one stream a lane of communication:

    kernel        starts when the host has launched it and the stream is free; communication beside it slows it
    collective    starts when all its ranks have issued it, their compute has come so far, and its lane is free
    wait          holds the compute stream until the collective is done
    on a CPU      host and device are one: a launch takes time of both, and so does a wait
    a step        begins with what it costs the host whatever is in it (step_s), and in a run with the loop (loop_s)
    offload       copies over the bus are waited for like collectives, and slow no kernel; while the host works itself,
                  at the rate of its memory, it launches nothing

Ranks that are alike are replayed once: one rank a stage, and the slowest rank beside them where some are slow. Programs
of stages are replayed together, their messages matched in order. The same programs give the same times, to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from paceline.cluster.devices import Cluster
from paceline.cluster.wires import WireCost, algorithm_cost, wire_cost
from paceline.errors import UsageError
from paceline.predict.formulas.block import CALL_S
from paceline.predict.formulas.constants import Constants, constants_for, fitted_constants
from paceline.predict.formulas.engine_costs import bus_bytes_per_s, host_bytes_per_s
from paceline.predict.formulas.step import slowest_device
from paceline.predict.memory.memory import GRAPH_BYTES, framework_bytes
from paceline.predict.replay.kernel_costs import KernelCosts, fuse_blocks, without_what_is_made_again
from paceline.predict.replay.program import COPIES, Drop, Event, Hold, Issue, OnHost, Player, Program, Run, Wait
from paceline.predict.replay.replayed import ReplayedRank, ReplayedStep
from paceline.schedule.clock import RankClock, Span


def replay(
    programs: Program | Sequence[Program],
    cluster: Cluster,
    *,
    slow: Mapping[int, float] | None = None,
    constants: Constants | None = None,
    keeps_spans: bool = False,
    with_loop: bool = False,
) -> ReplayedStep:
    """Returns what a step takes on a cluster: of one rank's program, or of one program for each stage of a pipeline.

    ``slow`` makes ranks take so many times as long. ``constants`` take the place of the fitted ones. ``with_loop``
    prices a step of a run, with the next batch, records and hooks. Raises UsageError where the ranks do not fit the
    cluster, and for programs that wait for one another for ever.
    """
    rows = [programs] if isinstance(programs, Program) else list(programs)
    stages, slow = [row.stage for row in rows], slow or {}
    if stages != list(range(rows[0].stages)):
        raise UsageError(
            f"programs of the stages {stages} of {rows[0].stages}\n"
            "  a pipeline is replayed with one program for each stage, in order\n  record them with record_stages"
        )
    check_slow(slow, rows[0].ranks)
    framework = "compiled" if rows[0].is_compiled else "eager"
    fitted, is_fitted = constants_for(fitted_constants(), cluster.device.generation, framework)
    used = constants or fitted

    def times(*, is_graphed: bool) -> tuple[ReplayedRank, ...]:
        actors = [
            _Actor(program, cluster, used, rank, factor, keeps_spans=keeps_spans, is_graphed=is_graphed)
            for program, rank, factor in _cast(rows, slow)
        ]
        for actor in actors:
            actor.begin(0.0 if is_graphed else cluster.device.step_s, cluster.device.loop_s if with_loop else 0.0)
        _Actors(actors, wire_cost(cluster, rows[0].ranks), cluster, used).run()
        for actor in actors:
            actor.found.seconds, actor.found.spans = actor.clock.now, tuple(actor.spans or ())
        return tuple(actor.found for actor in actors)

    graphs = "off" if cluster.device.is_cpu else rows[0].graphs
    is_graphed = graphs == "on"
    found = times(is_graphed=is_graphed)
    if graphs == "auto" and found[0].seconds - found[0].compute > _HOST_BOUND * found[0].seconds:
        is_graphed, found = True, times(is_graphed=True)
    return ReplayedStep(
        programs=tuple(rows),
        cluster=cluster,
        times=found,
        memory=_memory(rows, cluster, is_graphed=is_graphed),
        is_fitted=is_fitted or bool(cluster.device.memory_rates),
        slow=dict(slow),
    )


def cost_in_training(cluster: Cluster, ranks: int, *, is_compiled: bool) -> WireCost:
    """Returns what operations take in the midst of a step: more than alone, by the fitted constants."""
    framework = "compiled" if is_compiled else "eager"
    constants, _ = constants_for(fitted_constants(), cluster.device.generation, framework)
    alone = wire_cost(cluster, ranks)
    return lambda kind, num_bytes, group: _in_training(alone(kind, num_bytes, group), cluster, constants)


def _in_training(alone: float, cluster: Cluster, constants: Constants) -> float:
    return (alone + (0.0 if cluster.device.is_cpu else CALL_S)) * constants.slowdown


def check_slow(slow: Mapping[int, float], ranks: int) -> None:
    """Raises UsageError for a slow rank that is none of so many, and for a factor that is not above 0."""
    for rank, factor in slow.items():
        if not 0 <= rank < ranks or not 0 < factor < float("inf"):
            raise UsageError(
                f"rank {rank} is slow by {factor}x, of {ranks} ranks\n"
                f"  ranks are 0 to {ranks - 1}, and factors above 0\n  try --slow rank=0:1.5x"
            )


def _cast(rows: Sequence[Program], slow: Mapping[int, float]) -> list[tuple[Program, int, float]]:
    """Returns which programs are replayed, the ranks that they stand for, of a stage its slowest, and how slow."""
    if len(rows) == 1:
        row, own = rows[0], slow.get(rows[0].rank, 1.0)
        worst = max(slow, key=lambda rank: slow[rank], default=row.rank)
        others = [(row, worst, slow[worst])] if slow and slow[worst] > own else []
        return [(row, row.rank, own), *others]
    width = rows[0].ranks // rows[0].stages
    found = []
    for row in rows:
        factors = {row.rank: 1.0} | {rank: factor for rank, factor in slow.items() if rank // width == row.stage}
        worst = max(factors, key=lambda rank: factors[rank])
        found.append((row, worst, factors[worst]))
    return found


def _memory(rows: Sequence[Program], cluster: Cluster, *, is_graphed: bool) -> dict[str, int]:
    peaks = [
        (replace(row, events=without_what_is_made_again(row.events)) if row.is_compiled else row).peak_memory()
        for row in rows
    ]
    most = max(peaks, key=lambda peak: sum(peak.values()))
    if is_graphed:
        most = {**most, "temporary": most["temporary"] + GRAPH_BYTES}
    return {**most, "framework": framework_bytes("cpu" if cluster.device.is_cpu else "cuda")}


_HOST_BOUND = 0.1  # share of a step in which the device waits: from there on a run is measured to gain by a graph


class _Stretch:
    """Kernels that follow one another.

    Where nothing comes between them the device is done with them at max(when it was free + all work, when the host
    began + max over kernels (launches up to it + work from it on)).
    """

    __slots__ = ("kernels", "late", "launch", "phase", "work")

    def __init__(self, kernels: Sequence[tuple[Run, float, float]]) -> None:
        self.kernels = kernels
        self.phase = kernels[0][0].operation.phase
        self.work = sum(work for _, work, _ in kernels)
        self.launch = self.late = 0.0
        for _, work, launch in kernels:
            self.launch += launch
            self.late = max(self.late, self.launch) + work


@dataclass(slots=True, eq=False)
class _Meeting:
    event: Issue
    members: list[tuple[_Actor, str]] = field(default_factory=list)  # who has come, and on which lane
    ready: list[float] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    has_end: bool = False


class _Actor:
    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        constants: Constants,
        rank: int,
        factor: float,
        *,
        keeps_spans: bool,
        is_graphed: bool,
    ) -> None:
        self.program, self.is_cpu, self.factor = program, cluster.device.is_cpu, factor
        events: Sequence[Event] = fuse_blocks(program.events) if program.is_compiled else program.events
        self.costs = KernelCosts(
            slowest_device(cluster.device, program.ranks),
            constants,
            is_compiled=program.is_compiled,
            is_graphed=is_graphed,
        )
        timed = [event for event in events if not isinstance(event, Hold | Drop)]
        self.events = list(self._stretches(Player(timed, program.order).run() if program.order else timed))
        self.contention = cluster.node.inside.busy if self.is_cpu else constants.contention
        self.call_s = cluster.device.launch_s * factor
        self.host_rate = host_bytes_per_s(cluster) / factor
        self.place = 0
        self.clock = RankClock()
        self.issued: Counter[tuple[object, ...]] = Counter()
        self.meetings: dict[int, _Meeting] = {}
        self.busy_lanes: list[_Meeting] = []
        self.found = ReplayedRank(rank=rank, stage=program.stage, slowed=factor)
        self.spans: list[Span] | None = [] if keeps_spans else None

    def begin(self, step_s: float, loop_s: float) -> None:
        """Lets the host do what a step costs it besides its operations, and what surrounds it in a run."""
        step_s, loop_s = step_s * self.factor, loop_s * self.factor
        self.clock.host = step_s + loop_s
        if self.is_cpu:
            self.clock.compute = self.clock.host
            self.found.loop, self.found.launch_wait = loop_s, step_s
            for phase, seconds in (("loop", loop_s), ("forward", step_s)):
                if seconds:
                    self.found.add_phase(phase, seconds)

    def _stretches(self, events: Iterable[Event]) -> Iterator[_Stretch | Issue | Wait | OnHost]:
        """Puts kernels of one phase together that follow one another; those of repeated actions are known by then."""
        known: dict[tuple[int, ...], _Stretch] = {}
        timed = (event for event in events if isinstance(event, Run | Issue | Wait | OnHost))
        for phase, group in groupby(timed, lambda each: each.operation.phase if isinstance(each, Run) else None):
            if phase is None:
                yield from group  # type: ignore[misc]
                continue
            runs: list[Run] = list(group)  # type: ignore[arg-type]
            key = tuple(map(id, runs))
            if key not in known:
                priced = ((run, *self.costs(run)) for run in runs)
                known[key] = _Stretch([(run, work * self.factor, launch * self.factor) for run, work, launch in priced])
            yield known[key]

    def run_stretch(self, stretch: _Stretch) -> None:
        """Runs kernels: all at once where nothing comes between them, else one by one."""
        clock = self.clock
        self.busy_lanes = [each for each in self.busy_lanes if each.end > clock.compute]
        if self.spans is not None or (self.busy_lanes and self.contention):
            for kernel, work, launch in stretch.kernels:
                self.run(kernel, work, launch)
            return
        found, before = self.found, clock.compute
        if self.is_cpu:
            clock.compute = clock.host = clock.now + stretch.launch + stretch.work
            found.launch_wait += stretch.launch
        else:
            clock.compute = max(clock.compute + stretch.work, clock.host + stretch.late)
            clock.host += stretch.launch
            found.launch_wait += clock.compute - before - stretch.work
        found.add_phase(stretch.phase, clock.compute - before)
        found.compute += stretch.work

    def run(self, kernel: Run, work: float, launch: float) -> None:
        clock, found, phase = self.clock, self.found, kernel.operation.phase
        clock.host += launch
        if self.is_cpu:
            start = clock.compute = clock.host = max(clock.host, clock.compute + launch)
        else:
            start = clock.now
        found.launch_wait += launch if self.is_cpu else start - clock.compute
        self.busy_lanes = [each for each in self.busy_lanes if each.end > start]
        beside = [min(start + work, each.end) - max(start, each.start) for each in self.busy_lanes]
        lost = self.contention * max(0.0, *beside, 0.0)  # what communication beside a kernel costs it
        end = start + work + lost
        found.add_phase(phase, end - clock.compute + (launch if self.is_cpu else 0.0))
        found.compute += work
        found.contention += lost
        clock.compute = end
        if self.is_cpu:
            clock.host = end
        if self.spans is not None:
            name = f"{kernel.block} {kernel.operation.name}".strip()
            self.spans.append(Span(f"compute {phase}", name, start, end))

    def issue(self, event: Issue) -> float:
        clock = self.clock
        clock.host += self.call_s
        if self.is_cpu:
            clock.compute = clock.host = clock.now
        return max(clock.now, clock.free(event.lane))

    def end_collective(self, meeting: _Meeting, lane: str) -> None:
        event = meeting.event
        self.clock.occupy(lane, meeting.end)
        if event.kind not in COPIES:  # the bus has engines of its own
            self.busy_lanes.append(meeting)
        moved = round(event.num_bytes * event.share)
        seconds, sizes = self.found.communication, self.found.moved
        seconds[event.kind] = seconds.get(event.kind, 0.0) + (meeting.end - meeting.start)
        sizes[event.kind] = sizes.get(event.kind, 0) + moved
        if self.spans is not None:
            size = f"{moved / 1e6:.1f} MB on {len(event.ranks)}"
            self.spans.append(Span(f"lane {lane}", f"{event.kind} {size}", meeting.start, meeting.end))

    def wait(self, event: Wait, meeting: _Meeting) -> None:
        clock, now = self.clock, self.clock.now
        stood = meeting.end - now
        if stood <= 0:
            return
        self.found.add_phase(event.phase, meeting.end - clock.compute)
        self.found.launch_wait += now - clock.compute
        kind = meeting.event.kind
        if kind in ("send", "recv"):
            self.found.bubble += stood
        else:
            self.found.exposed += stood
        clock.compute = meeting.end
        if self.is_cpu:
            clock.host = meeting.end
        if self.spans is not None:
            self.spans.append(Span("waits", f"{kind} is not there", now, meeting.end))

    def work_on_host(self, event: OnHost) -> None:
        """Lets the host work itself; the device has nothing to do once it has come to the end of what was launched."""
        clock = self.clock
        ends = [self.meetings[each].end for each in event.waits if each in self.meetings]
        start = max(clock.host, *ends, clock.compute if event.reads else 0.0)
        clock.host = start + event.num_bytes / self.host_rate
        if clock.host <= clock.compute:
            return
        waited, worked = max(0.0, start - clock.compute), clock.host - max(start, clock.compute)
        found = self.found
        found.add_phase(event.phase, clock.host - clock.compute)
        found.exposed += waited if event.waits else 0.0
        found.launch_wait += 0.0 if event.waits else waited
        found.on_host += worked
        if self.spans is not None and worked:
            self.spans.append(Span("host", event.name, start, clock.host))
        clock.compute = clock.host


class _Actors:
    def __init__(self, actors: list[_Actor], wires: WireCost, cluster: Cluster, constants: Constants) -> None:
        self._actors, self._wires, self._cluster = actors, wires, cluster
        self._constants, self._bus = constants, bus_bytes_per_s(cluster)
        self._open: dict[tuple[object, ...], _Meeting] = {}

    def run(self) -> None:
        while any(actor.place < len(actor.events) for actor in self._actors):
            moved = [self._advance(actor) for actor in self._actors]
            if any(moved):
                continue
            stuck = [(each, each.events[each.place]) for each in self._actors if each.place < len(each.events)]
            waits = [(each, each.meetings[event.number].event) for each, event in stuck if isinstance(event, Wait)]
            raise UsageError(
                "the programs wait for one another for ever\n"
                + "".join(
                    f"  rank {a.program.rank} waits for {e.kind} of ranks {list(e.ranks)[:8]}\n" for a, e in waits
                )
                + "  record them together: record_stages(config)"
            )

    def _advance(self, actor: _Actor) -> bool:
        before = actor.place
        while actor.place < len(actor.events):
            event = actor.events[actor.place]
            if isinstance(event, _Stretch):
                actor.run_stretch(event)
            elif isinstance(event, Issue):
                self._meet(actor, event)
            elif isinstance(event, OnHost):
                actor.work_on_host(event)
            else:
                meeting = actor.meetings.get(event.number)
                if meeting is not None:  # else it was issued in the step before
                    if not meeting.has_end:
                        break
                    actor.wait(event, meeting)
            actor.place += 1
        return actor.place > before

    def _meet(self, actor: _Actor, event: Issue) -> None:
        """Adds a rank to an operation; the last one to come says when it runs.

        The n-th collective of a group on a lane is the same on all ranks; so is the n-th message of a tag between two.
        """
        ready = actor.issue(event)
        # The slow copy of a rank stands for one that all its groups have.
        others = sum(
            len(event.ranks) > 1 if each.program is actor.program else each.program.rank in event.ranks
            for each in self._actors
            if each is not actor
        )
        is_message = event.kind in ("send", "recv")
        channel = (event.ranks, event.tag if is_message else event.lane)
        actor.issued[event.kind, channel] += 1
        key = ("message" if is_message else event.kind, channel, actor.issued[event.kind, channel])
        meeting = self._open.setdefault(key, _Meeting(event)) if others else _Meeting(event)
        actor.meetings[event.number] = meeting
        meeting.ready.append(ready)
        meeting.members.append((actor, event.lane))
        if len(meeting.ready) == 1 + others:
            self._open.pop(key, None)
            self._end_collective(meeting)

    def _end_collective(self, meeting: _Meeting) -> None:
        event = meeting.event
        meeting.start = max(meeting.ready)
        seconds = 0.0
        if len(event.ranks) > 1:
            if event.algorithm:
                alone = algorithm_cost(self._cluster, event.algorithm, event.kind, event.num_bytes, event.ranks)
            else:
                alone = self._wires(event.kind, event.num_bytes, event.ranks)
            seconds = _in_training(alone, self._cluster, self._constants) * event.share
        elif event.kind in COPIES:
            seconds = event.num_bytes / self._bus
        meeting.end, meeting.has_end = meeting.start + seconds, True
        for actor, lane in meeting.members:
            actor.end_collective(meeting, lane)
