"""Why ranks do not go on, in one sentence: a pure function of what their ledgers say.

    mismatch   at the same number of a group, ranks issued different operations: told at once
    stopped    a rank's process was stopped from outside: by a signal, a debugger, or its cgroup
    dead       a rank's process is gone while others run
    left       a rank has finished or failed, and others wait for it
    missing    a rank has not come to an operation in which others wait: it computes, sleeps, loops, reads data
    deadlock   every rank waits for another one
    silent     all have issued the same, and nothing moves: the network, a device, or a rank alone

A process that is stopped cannot move, whatever it was doing, so that this is looked at first. Else a rank that waits is
a victim, and the blame follows the waits to those that wait for nobody. ``judge`` costs some microseconds an entry.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from paceline.health.ledger_view import CHECKPOINT, DATA, EVALUATION, SETUP, GroupName, LedgerEntry, LedgerView

Kind = Literal["mismatch", "stopped", "dead", "left", "missing", "deadlock", "silent"]

_Place = tuple[GroupName, int]  # a collective: its group, and its number there
_Party = list[tuple[int, LedgerEntry]]  # ranks, each with what it called
_Views = Mapping[int, LedgerView]
_MOST_NAMED = 8
_SLOW_PHASES = (SETUP, EVALUATION, CHECKPOINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """How long all ranks may stand still: in a step, and in set-up, the first step, evaluation and checkpoints.

    ``stopped_s`` is how long a rank's process may be stopped, whatever it was doing; None: as long as a step. With
    ``needs_waiting`` ranks may compute for as long as they like while none of them waits for another.
    """

    step_s: float = 60.0
    setup_s: float = 600.0
    stopped_s: float | None = None
    needs_waiting: bool = False

    def of(self, view: LedgerView) -> float:
        return max(self.step_s, self.setup_s) if view.step == 0 or view.phase in _SLOW_PHASES else self.step_s


AT_ONCE = HangLimits(step_s=0.0, setup_s=0.0)  # of ranks that are known to stand still
MISMATCHES = HangLimits(step_s=math.inf, setup_s=math.inf)  # which are told however long ranks have stood still


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank does, for the details of a verdict."""

    rank: int
    does: str
    phase: str
    step: int
    silent_s: float
    stands_at: str

    def __str__(self) -> str:
        where = f"; stands at {self.stands_at}" if self.stands_at else ""
        return f"rank {self.rank}, step {self.step}, phase {self.phase}: {self.does}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """What went wrong, whom it is due to, and what every rank does."""

    kind: Kind
    ranks: tuple[int, ...]
    sentence: str
    group: tuple[int, ...] = ()
    sequence: int | None = None
    states: tuple[RankState, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HangVerdict:
        known = {name: values[name] for name in ("kind", "sentence", "sequence")}
        states = tuple(RankState(**state) for state in values["states"])
        return cls(**known, ranks=tuple(values["ranks"]), group=tuple(values["group"]), states=states)

    def to_text(self) -> str:
        return "\n".join([self.sentence, *(f"  {state}" for state in self.states)]) + "\n"


def judge(ledgers: Sequence[LedgerView], now: float, limits: HangLimits) -> HangVerdict | None:
    """Finds what keeps the ranks from going on at ``now``, on the clock of ``changed_s``; None if nothing does."""
    states = tuple(state_of(view, now) for view in sorted(ledgers, key=lambda view: view.rank))
    verdict = find_mismatch(ledgers)
    running = [view for view in ledgers if view.state == "running"]
    longest_s = limits.step_s if limits.stopped_s is None else limits.stopped_s
    stopped = [view for view in ledgers if view.halted and now - view.halted_s >= longest_s]
    if verdict is None and stopped:
        verdict = _stopped(stopped, ledgers, now)
    elif verdict is None and running:
        dead = [view for view in ledgers if view.state == "dead"]
        if dead:
            verdict = _dead(dead, running)
        elif all(now - view.changed_s >= limits.of(view) for view in running):
            halted = [view for view in ledgers if view.halted]
            verdict = _stopped(halted, ledgers, now) if halted else find_hang(ledgers, now)
            if limits.needs_waiting and verdict.kind == "silent" and verdict.sequence is None:
                return None
    return None if verdict is None else replace(verdict, states=states)


def find_mismatch(ledgers: Sequence[LedgerView]) -> HangVerdict | None:
    """Finds the first operation of a group that ranks disagree on."""
    places: dict[_Place, _Party] = defaultdict(list)
    for view in ledgers:
        for entry in view.entries:
            if not entry.call.is_message:
                places[entry.group, entry.sequence].append((view.rank, entry))
    for place in sorted(places, key=lambda place: min(entry.number for _, entry in places[place])):
        found = sorted(places[place], key=lambda item: item[0])
        if len({entry.call.agreed for _, entry in found}) > 1:
            return _mismatch(place, found, places)
    return None


def find_hang(ledgers: Sequence[LedgerView], now: float) -> HangVerdict:
    """Finds the ranks that all others wait for, where no rank makes progress."""
    views = {view.rank: view for view in sorted(ledgers, key=lambda view: view.rank)}
    pending = _pending(views)
    waited = {rank: _absent(entry, rank, views) for rank, entry in pending.items()}
    guilty = sorted({rank for missing in waited.values() for rank in missing if not waited.get(rank)})
    if guilty:
        return _missing([views[rank] for rank in guilty], views, pending, now)
    if any(waited.values()):
        return _deadlock(views, {rank: pending[rank] for rank, missing in waited.items() if missing}, waited)
    return _silent(views, now)


def _pending(views: _Views) -> dict[int, LedgerEntry]:
    """Returns what each rank waits in; else, as on CUDA hosts run ahead, what it has issued first and another not."""
    running = [view for view in views.values() if view.state == "running"]
    found = {view.rank: entry for view in running if (entry := view.waits_in) is not None}
    if found:
        return found
    ahead = {view.rank: next((one for one in view.entries if _absent(one, view.rank, views)), None) for view in running}
    return {rank: entry for rank, entry in ahead.items() if entry is not None}


def _absent(entry: LedgerEntry, rank: int, views: _Views) -> list[int]:
    """Returns the ranks that have not come to an operation of ``rank``, as far as they are known."""
    if not entry.call.is_message:
        others = [views[peer] for peer in entry.group.ranks if peer != rank and peer in views]
        return [view.rank for view in others if view.issued.get(entry.group, 0) <= entry.sequence]
    peer = views.get(-1 if entry.call.peer is None else entry.call.peer)
    if peer is None:
        return []
    wanted = ("recv" if entry.call.kind == "send" else "send", rank, entry.call.tag, entry.group)
    has_come = any(
        (each.call.kind, each.call.peer, each.call.tag, each.group) == wanted and each.sequence >= entry.sequence
        for each in peer.entries
    )
    return [] if has_come else [peer.rank]


def _missing(guilty: list[LedgerView], views: _Views, pending: Mapping[int, LedgerEntry], now: float) -> HangVerdict:
    ranks = {view.rank for view in guilty}
    waited = {rank: ranks & set(_absent(entry, rank, views)) for rank, entry in pending.items()}
    victims = [rank for rank, missing in waited.items() if missing]
    entry, absent = pending[victims[0]], waited[victims[0]]
    guilty.sort(key=lambda view: (view.rank not in absent, view.rank))
    several = len(guilty) > 1
    states = {view.state for view in guilty}
    kind: Kind = "dead" if "dead" in states else "left" if states <= {"finished", "failed"} else "missing"
    doing = "; ".join(_doing(view, now, is_named=several) for view in guilty)
    waits = _wait_for(victims, several=several)
    if kind == "left":
        waits += f" after step {views[victims[0]].step}"
    lines = _lines([views[rank] for rank in victims], pending)
    verb = "are" if len(absent) > 1 else "is"
    sentence = f"{_tell(absent)} {verb} missing from {_describe_place(entry)}: {doing}; {waits}{lines}"
    return _verdict_at(entry, kind, ranks, sentence)


def _stopped(stopped: list[LedgerView], ledgers: Sequence[LedgerView], now: float) -> HangVerdict:
    stopped = sorted(stopped, key=lambda view: view.rank)
    ranks = [view.rank for view in stopped]
    views = {view.rank: view for view in ledgers}
    doing = "; ".join(
        f"rank {view.rank} is {view.halted} {_last_seen(view)}, for {now - view.halted_s:.1f} s (process {view.pid})"
        for view in stopped
    )
    pending = {rank: entry for rank, entry in _pending(views).items() if rank not in ranks}
    waits = ""
    if pending:
        lines = _lines([views[rank] for rank in pending], pending)
        waits = f"; {_wait_for(pending, several=len(ranks) > 1)}{lines}"
    return HangVerdict(kind="stopped", ranks=tuple(ranks), sentence=f"{doing}{waits}")


def _last_seen(view: LedgerView) -> str:
    """Says where a rank was when it wrote something last: a stopped process cannot be asked."""
    if not view.has_joined:
        return "before it joined the others"
    if view.state in ("finished", "failed"):
        return "after its last step"
    where = f"in phase {view.phase} (step {view.step})"
    entry = view.waits_in
    if entry is not None:
        return f"at {entry.line}, in {_describe_place(entry)}, {where}"
    return f"{where}, after {view.entries[-1].call} at {view.entries[-1].line}" if view.entries else where


def _dead(dead: list[LedgerView], running: list[LedgerView]) -> HangVerdict:
    told = _tell(view.rank for view in dead)
    last = next((entry for view in dead for entry in reversed(view.entries)), None)
    after = f", after {last.call} at {last.line}" if last is not None else ""
    gone = "is dead: its process is gone" if len(dead) == 1 else "are dead: their processes are gone"
    where = f"(step {dead[0].step}, phase {dead[0].phase}{after})"
    sentence = f"{told} {gone} {where}; {_tell(view.rank for view in running)} would wait in vain"
    return HangVerdict(kind="dead", ranks=tuple(sorted(view.rank for view in dead)), sentence=sentence)


def _deadlock(views: _Views, pending: Mapping[int, LedgerEntry], waited: Mapping[int, list[int]]) -> HangVerdict:
    parts = [
        f"rank {rank} waits for {_tell(waited[rank])} in {_describe_place(entry)}{_at(views[rank], entry)}"
        for rank, entry in pending.items()
    ]
    sentence = "ranks wait for one another, and none can go on: " + "; ".join(parts)
    return _verdict_at(next(iter(pending.values())), "deadlock", pending, sentence)


def _silent(views: _Views, now: float) -> HangVerdict:
    running = [view for view in views.values() if view.state == "running"]
    entries = {view.rank: entry for view in running if (entry := view.waits_in) is not None}
    if len(entries) == len(running):
        first = next(iter(entries.values()))
        blocked = [view for view in running if view.blocked]
        if blocked:
            doing = "; ".join(_doing(view, now, is_named=True) for view in blocked)
            return _verdict_at(first, "silent", (view.rank for view in blocked), doing)
        hosts = {view.host for view in running}
        is_one_host = len(hosts) == 1 and hosts != {""}
        where = "all run on one host, and none is stopped" if is_one_host else "look at the network between them"
        lines = _lines(running, entries)
        sentence = f"all ranks are in {_describe_place(first)}, and it does not end: {where} (paceline doctor){lines}"
        return _verdict_at(first, "silent", (), sentence)
    told = [view for view in running if view.rank not in entries]
    sentence = "; ".join(_doing(view, now, is_named=True) for view in told)
    return HangVerdict(kind="silent", ranks=tuple(view.rank for view in told), sentence=sentence)


def _mismatch(place: _Place, found: _Party, places: Mapping[_Place, _Party]) -> HangVerdict:
    group, sequence = place
    by_call: dict[tuple[object, ...], _Party] = defaultdict(list)
    for rank, entry in found:
        by_call[entry.call.agreed].append((rank, entry))
    parties = sorted(by_call.values(), key=lambda party: (len(party), -party[0][0]))
    is_clear = len(parties[0]) < len(parties[-1])
    blamed = parties[0] if is_clear else found
    parts = [f"{_tell(rank for rank, _ in party)} called {party[0][1].call} at {party[0][1].line}" for party in parties]
    sentence = f"{_what_differs(place, parties, places)} (operation {sequence} of group {group}): " + ", ".join(parts)
    return _verdict_at(found[0][1], "mismatch", (rank for rank, _ in blamed), sentence)


def _verdict_at(entry: LedgerEntry, kind: Kind, ranks: Iterable[int], sentence: str) -> HangVerdict:
    blamed, group = tuple(sorted(ranks)), entry.group.ranks
    return HangVerdict(kind=kind, ranks=blamed, sentence=sentence, group=group, sequence=entry.sequence)


def _what_differs(place: _Place, parties: list[_Party], places: Mapping[_Place, _Party]) -> str:
    """Says in what two calls differ: their order, where one party's call is what the other calls next."""
    first, second = parties[0][0][1].call, parties[-1][0][1].call
    if first.kind == second.kind:
        names = {"dtype": first.dtype != second.dtype, "op": first.op != second.op, "root": first.peer != second.peer}
        told = [name for name, differs in names.items() if differs]
        return f"ranks called the same operation with another {' and '.join(told) or 'shape'}"
    group, sequence = place
    following = [(rank, entry.call.agreed) for rank, entry in places.get((group, sequence + 1), ())]
    ranks_of_first = {rank for rank, _ in parties[0]}
    is_swapped = any(
        (call == second.agreed and rank in ranks_of_first) or (call == first.agreed and rank not in ranks_of_first)
        for rank, call in following
    )
    if is_swapped:
        return "ranks called the same operations in another order"
    return "ranks called different operations: one skipped some, or has another order"


def state_of(view: LedgerView, now: float) -> RankState:
    entry = view.waits_in
    if view.halted:
        does = f"is {view.halted} {_last_seen(view)}"
    elif view.state != "running":
        does = _end(view)
    elif entry is not None:
        does = f"waits in {_describe_place(entry)}, called at {entry.line}"
    elif view.entries:
        does = f"runs, after {_describe_place(view.entries[-1])}, called at {view.entries[-1].line}"
    else:
        does = "runs"
    silent_s, at = round(max(0.0, now - view.changed_s), 1), view.stands_at
    return RankState(rank=view.rank, does=does, phase=view.phase, step=view.step, silent_s=silent_s, stands_at=at)


def _doing(view: LedgerView, now: float, *, is_named: bool) -> str:
    name = f"rank {view.rank}" if is_named else "it"
    if view.state != "running":
        return f"{name} {_end(view)}"
    entry = view.waits_in
    what = "waits for data" if view.phase == DATA else f"is in phase {view.phase}"
    stands = f"stands at {view.stands_at} and " if view.stands_at else ""
    inside = f", in {_describe_place(entry)}" if entry is not None else ""
    inside += f", {view.blocked}" if view.blocked else ""
    return f"{name} {stands}{what}{inside} (step {view.step}, for {max(0.0, now - view.changed_s):.1f} s)"


def _end(view: LedgerView) -> str:
    if view.state == "failed":
        return "has failed with an error of its own"
    if view.state != "finished":
        return f"is dead (process {view.pid})"
    last = f", its last operation {view.entries[-1].call} at {view.entries[-1].line}" if view.entries else ""
    return f"has finished after step {view.step}{last}"


def _describe_place(entry: LedgerEntry) -> str:
    what = "message" if entry.call.is_message else "operation"
    return f"{entry.call}, {what} {entry.sequence} of group {entry.group}"


def _at(view: LedgerView, entry: LedgerEntry) -> str:
    line = view.stands_at or entry.site
    return f" at {line}" if line else ""


def _lines(views: Iterable[LedgerView], pending: Mapping[int, LedgerEntry]) -> str:
    """Says at which lines ranks wait: one, if it is the same for all."""
    by_line: dict[str, list[int]] = defaultdict(list)
    for view in views:
        by_line[_at(view, pending[view.rank])].append(view.rank)
    if len(by_line) == 1:
        return next(iter(by_line))
    return ":" + ",".join(f" {_tell(ranks)}{line or ' at an unknown line'}" for line, ranks in by_line.items())


def _wait_for(victims: Collection[int], *, several: bool) -> str:
    return f"{_tell(victims)} {'wait' if len(victims) > 1 else 'waits'} for {'them' if several else 'it'}"


def _tell(ranks: Iterable[int]) -> str:
    """Names ranks: ``rank 3``, ``ranks 0, 2 and 3``; of many, the first."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > _MOST_NAMED:
        return f"{len(found)} ranks ({', '.join(map(str, found[:_MOST_NAMED]))} ...)"
    return f"ranks {', '.join(map(str, found[:-1]))} and {found[-1]}"
