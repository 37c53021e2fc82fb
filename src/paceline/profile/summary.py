"""What a profile says: overlap, causes of idle time, costs of operators and kernels, memory over time.

For each rank, over the profiled steps:

    communication   from the start of an operation to the moment at which this rank was done waiting for it
    exposed         on a CPU what the rank stood still for; on a GPU the time of kernels of collectives alone
    hidden          communication - exposed
    late rank       of what is exposed, the time until the last rank had come to the operation
    network         the rest of what is exposed
    data            the phase of the next batch
    device idle     on a GPU, the time without a kernel
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from paceline.profile.merge import MemoryPoint, Operator, RankProfile, TorchEvent, TraceSpan, begin_s, largest_by_time
from paceline.schedule.clock import time_in_all
from paceline.units import format_bytes, format_seconds

Interval = tuple[float, float]
_SHOWN, _POINTS = 10, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    rank: int
    steps_s: float
    communication_s: float
    exposed_s: float
    late_rank_s: float
    network_s: float
    data_s: float
    device_idle_s: float | None
    peak_bytes: int
    peak_phase: str

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.communication_s - self.exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """All ranks of a profile. ``memory`` has curves by rank, thinned out; ``clock_error_s`` is the worst rank's."""

    steps: int
    ranks: tuple[RankTimes, ...]
    operators: tuple[Operator, ...]
    kernels: tuple[Operator, ...]
    actions: Mapping[str, float]
    memory: Mapping[int, tuple[MemoryPoint, ...]]
    clock_error_s: float

    @property
    def step_s(self) -> float:
        return fmean(each.steps_s for each in self.ranks) / max(self.steps, 1)

    @property
    def idle(self) -> dict[str, float]:
        """The causes of idle time as shares of the steps, mean of the ranks, the largest first."""
        total = sum(each.steps_s for each in self.ranks) or 1.0
        causes = {
            "waiting for a late rank": sum(each.late_rank_s for each in self.ranks) / total,
            "waiting for the network": sum(each.network_s for each in self.ranks) / total,
            "waiting for data": sum(each.data_s for each in self.ranks) / total,
        }
        known = [each.device_idle_s for each in self.ranks if each.device_idle_s is not None]
        if known:
            causes["device without a kernel"] = sum(known) / total
        return dict(sorted(causes.items(), key=lambda each: -each[1]))

    def to_json(self) -> dict[str, Any]:
        ranks = [asdict(each) | {"hidden_s": each.hidden_s} for each in self.ranks]
        more = {"ranks": ranks, "step_s": self.step_s, "idle": self.idle}
        memory = {str(rank): [asdict(point) for point in points] for rank, points in self.memory.items()}
        return asdict(self) | more | {"memory": memory, "actions": dict(self.actions)}

    def lines(self) -> list[str]:
        error = f"clocks agree to within {format_seconds(self.clock_error_s)}"
        lines = [f"{self.steps} steps of {format_seconds(self.step_s)} on {len(self.ranks)} ranks; {error}", ""]
        lines.append(f"{'rank':<6}{'communication':>14}{'exposed':>11}{'hidden':>11}{'memory':>12}  peak in")
        for each in self.ranks:
            totals = (each.communication_s, each.exposed_s, each.hidden_s)
            way, exposed, hidden = (format_seconds(value / max(self.steps, 1)) for value in totals)
            memory = f"{format_bytes(each.peak_bytes):>12}  {each.peak_phase}"
            lines.append(f"{each.rank:<6}{way:>14}{exposed:>11}{hidden:>11}{memory}")
        lines += ["", "idle, of the step"]
        lines += [f"  {name:<26}{100 * share:>6.1f} %" for name, share in self.idle.items()]
        for title, rows in (("operators", self.operators), ("kernels", self.kernels)):
            if rows:
                lines += ["", f"{f'costliest {title}':<52}{'calls':>8}{'a step':>11}"]
                for row in rows[:_SHOWN]:
                    seconds = row.device_s if title == "kernels" else row.host_s
                    cost = format_seconds(seconds / max(self.steps * len(self.ranks), 1))
                    lines.append(f"  {row.name[:48]:<50}{row.calls:>8}{cost:>11}")
        if self.actions:
            means = ", ".join(f"{kind} {format_seconds(seconds)}" for kind, seconds in self.actions.items())
            lines += ["", f"actions of the schedule, mean: {means}"]
        return lines


def summarize_profile(ranks: Sequence[RankProfile]) -> ProfileSummary:
    late, zero_s = _late_intervals(ranks), begin_s(ranks)
    operators = (each for one in ranks for each in one.spans.operators)
    kernels = (each for one in ranks for each in one.events if each.is_device_work)
    actions: dict[str, list[float]] = defaultdict(list)
    for action in (action for one in ranks for action in one.spans.tracks.get("actions", ())):
        actions[action.name.rstrip("0123456789.")].append(action.seconds)
    return ProfileSummary(
        steps=max((len(each.spans.tracks.get("steps", ())) for each in ranks), default=0),
        ranks=tuple(_rank_times(each, late[each.spans.rank]) for each in ranks),
        operators=_costliest((each.name, each.calls, each.host_s, 0.0) for each in operators),
        kernels=_costliest((each.name, 1, 0.0, each.end_s - each.start_s) for each in kernels),
        actions={kind: fmean(seconds) for kind, seconds in sorted(actions.items())},
        memory={each.spans.rank: tuple(largest_by_time(each.memory, _POINTS, zero_s)) for each in ranks},
        clock_error_s=max((each.spans.clock_error_s for each in ranks), default=0.0),
    )


def _costliest(rows: Iterable[tuple[str, int, float, float]]) -> tuple[Operator, ...]:
    """Adds up calls, seconds of the host and of the device by name; the fifty names that took longest."""
    found: dict[str, Operator] = {}
    for name, calls, host_s, device_s in rows:
        had = found.get(name) or Operator(name, 0, 0.0, 0.0)
        found[name] = Operator(name, had.calls + calls, had.host_s + host_s, had.device_s + device_s)
    return tuple(sorted(found.values(), key=lambda each: -(each.host_s + each.device_s))[:50])


def _rank_times(profile: RankProfile, late: Sequence[Interval]) -> RankTimes:
    spans = profile.spans
    steps = _intervals(spans.corrected("steps"))
    kernels = [each for each in profile.events if each.is_device_work]
    busy = _intervals(kernels)
    if busy:  # the device's own time
        ways = _intervals([each for each in kernels if "nccl" in each.name.lower()])
        compute = _intervals([each for each in kernels if "nccl" not in each.name.lower()])
        communication_s = time_in_all(ways)
        exposed_s = communication_s - time_in_all(ways, compute)
        late_s = min(exposed_s, time_in_all(ways, late))
    else:
        ways, waits = _intervals(spans.corrected("collectives")), _intervals(spans.corrected("waits"))
        communication_s, exposed_s = time_in_all([*ways, *waits], steps), time_in_all(waits, steps)
        late_s = min(exposed_s, time_in_all(waits, late))
    peak = max(profile.memory, key=lambda each: each.num_bytes, default=None)
    phases = [] if peak is None else [p.name for p in spans.corrected("phases") if p.start_s <= peak.at_s <= p.end_s]
    return RankTimes(
        rank=spans.rank,
        steps_s=time_in_all(steps),
        communication_s=communication_s,
        exposed_s=exposed_s,
        late_rank_s=late_s,
        network_s=max(0.0, exposed_s - late_s),
        data_s=sum(each.seconds for each in spans.tracks.get("phases", ()) if each.name == "data"),
        device_idle_s=time_in_all(steps) - time_in_all(steps, busy) if busy else None,
        peak_bytes=0 if peak is None else peak.num_bytes,
        peak_phase=phases[0] if phases else "",
    )


def _late_intervals(ranks: Sequence[RankProfile]) -> dict[int, list[Interval]]:
    """Returns, by rank, the times between its coming to a collective and that of the last rank of the group."""
    arrivals: dict[tuple[str, tuple[int, ...], int], dict[int, TraceSpan]] = defaultdict(dict)
    for each in ranks:
        counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for operation in each.spans.corrected("collectives"):
            key = (operation.name, operation.ranks)
            arrivals[(*key, counts[key])][each.spans.rank] = operation
            counts[key] += 1
    found: dict[int, list[Interval]] = {each.spans.rank: [] for each in ranks}
    for (kind, group, _), there in arrivals.items():
        if kind not in ("send", "recv") and len(there) == len(group):
            last_s = max(operation.start_s for operation in there.values())
            for rank, operation in there.items():
                found[rank].append((operation.start_s, last_s))
    return found


def _intervals(spans: Sequence[TraceSpan | TorchEvent]) -> list[Interval]:
    return [(each.start_s, each.end_s) for each in spans]
