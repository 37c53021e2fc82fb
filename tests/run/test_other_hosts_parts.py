"""What hosts leave for one another, part by part, in the memory of one process: clocks, times, farewells, updates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from memory_channel import MemoryChannel

from paceline.comm.ledger.ledger import Ledger
from paceline.errors import CommunicationError
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.health.pairing import Update
from paceline.health.straggler import Lateness, PhaseTimes, RankLook, Straggler, looks_from_text
from paceline.run.other_hosts import LateHosts, LeftRanks, PairedHosts, clock_ahead, left_key

HOSTS = {"a": [0, 1], "b": [2]}
EVERYBODY = GroupName((0, 1, 2))
STRAGGLER = Straggler(rank=2, phase="data", lost_s=1.0, loss=0.5, steps_last=9, steps=10)


class Answered(MemoryChannel):
    """A channel whose other side answers when the time is asked, by a clock that is ``ahead_s`` behind this one."""

    def __init__(self, trips: list[tuple[float, float]], ahead_s: float = 0.0) -> None:
        super().__init__()
        self.now, self.ahead_s, self.trips = 100.0, ahead_s, list(trips)

    def time(self) -> float:
        return self.now

    def wait_for(self, key: str) -> str:
        del key
        if not self.trips:
            raise CommunicationError("nobody left it")
        there, back = self.trips.pop(0)
        self.now += there
        told = repr(self.now - self.ahead_s)
        self.now += back
        return told


@pytest.mark.parametrize(
    ("trips", "ahead_s", "found"),
    [
        ([(1.0, 1.0)] * 5, 50.0, 50.0),
        ([(4.0, 2.0), (0.5, 0.5), (9.0, 0.0), (3.0, 3.0), (2.0, 4.0)], -7.0, -7.0),  # the fastest round counts
        ([(1.0, 1.0)] * 5, 1.0, 0.0),  # no more than half a round: it says nothing
        ([(1.0, 1.0)] * 5, 1.5, 1.5),
        ([(2.0, 0.0)] * 5, 50.0, 49.0),  # what may be wrong
    ],
)
def test_clocks_are_compared_by_the_fastest_round(
    trips: list[tuple[float, float]], ahead_s: float, found: float
) -> None:
    channel = Answered(trips, ahead_s)
    assert clock_ahead(channel, "b", ["a", "b"], channel.time) == pytest.approx(found)
    assert sorted(channel.texts) == [f"clock/b/{number}/asked" for number in range(5)]
    assert clock_ahead(Answered(trips[:4]), "b", ["a", "b"], channel.time) is None  # nobody answers the last


def test_the_first_host_tells_the_time_to_each_of_the_others() -> None:
    channel = Answered([(0.0, 0.0)] * 10)
    assert clock_ahead(channel, "a", ["a", "b", "c"], channel.time) == 0.0
    assert len(channel.texts) == 10
    assert set(channel.texts.values()) == {"100.0"}
    assert {key.split("/")[1] for key in channel.texts} == {"b", "c"}


# Times


class Looked(Lateness):
    """Says that a rank is late, whatever it sees, and keeps that."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[RankLook]] = []

    def look(self, ranks: list[RankLook]) -> Straggler | None:  # type: ignore[override]
        self.seen.append(ranks)
        return STRAGGLER


def rank_look(rank: int, at: list[float]) -> RankLook:
    call = LedgerCall(kind="barrier")
    entries = tuple(
        LedgerEntry(number=number + 1, group=EVERYBODY, sequence=number, call=call, issued_s=when)
        for number, when in enumerate(at)
    )
    return RankLook(view=LedgerView(rank=rank, entries=entries, pid=rank), times=PhaseTimes(steps=rank + 5))


class LookingHosts:
    """Two hosts that compare the times of their ranks, by clocks that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead_s: float | None = 0.0) -> None:
        self.now, self.channel = 1000.0, MemoryChannel()
        self.looks = {"a": [rank_look(0, [1.0]), rank_look(1, [1.0])], "b": [rank_look(2, [1.0])]}
        self.lateness = {name: Looked() for name in HOSTS}
        monkeypatch.setattr("time.perf_counter", lambda: self.now - 900.0)
        self.parts = {
            name: LateHosts(
                *(self.channel, name, tuple(HOSTS), lambda name=name: self.looks[name], self.lateness[name], 10.0),  # type: ignore[misc]
                lambda: self.now,
                ahead_s,
            )
            for name in HOSTS
        }

    def look(self, now: float) -> dict[str, Straggler | None]:
        self.now = now
        return {name: self.parts[name].look() for name in ("b", "a")}


def test_the_first_host_compares_half_a_period_after_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = LookingHosts(monkeypatch)
    assert hosts.look(1000.0) == {"b": None, "a": None}
    assert list(hosts.channel.texts) == ["times/b"]
    assert json.loads(hosts.channel.texts["times/b"])[0] == 1000.0
    assert hosts.look(1004.9) == {"b": None, "a": None}
    assert hosts.look(1005.0) == {"b": None, "a": STRAGGLER}
    assert hosts.look(1009.9) == {"b": None, "a": None}  # once in a period
    assert hosts.look(1012.0) == {"b": None, "a": None}
    assert json.loads(hosts.channel.texts["times/b"])[0] == 1010.0
    assert hosts.look(1016.0) == {"b": None, "a": STRAGGLER}
    assert [[each.view.rank for each in seen] for seen in hosts.lateness["a"].seen] == [[0, 1, 2]] * 2
    assert hosts.lateness["b"].seen == []


def test_times_are_compared_only_where_all_are_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = LookingHosts(monkeypatch)
    hosts.look(1000.0)
    hosts.now = 1016.0
    assert hosts.parts["a"].look() is None  # what the other left is of the moment before
    hosts.channel.texts.clear()
    hosts.now = 1026.0
    assert hosts.parts["a"].look() is None
    hosts.looks["b"] = []  # its ranks do not run yet
    assert hosts.look(1036.0)["a"] is None
    assert hosts.lateness["a"].seen == []
    hosts.looks["b"] = [rank_look(2, [1.0])]
    assert hosts.look(1046.0)["a"] == STRAGGLER


def test_of_the_last_operations_those_before_the_moment_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledgers' clock is 900 s behind that of the host here."""
    hosts = LookingHosts(monkeypatch)
    hosts.looks["b"] = [rank_look(2, [80.0 + number for number in range(30)])]
    hosts.look(1003.0)
    (look,) = looks_from_text(json.loads(hosts.channel.texts["times/b"])[1])
    assert [entry.issued_s for entry in look.view.entries] == [85.0 + number for number in range(16)]  # up to 100
    assert (look.ahead_s, look.view.host, look.times.steps) == (-900.0, "b", 7)
    unknown = LookingHosts(monkeypatch, ahead_s=None)
    unknown.look(1003.0)
    (look,) = looks_from_text(json.loads(unknown.channel.texts["times/b"])[1])
    assert (look.view.entries, look.ahead_s) == ((), None)
    ahead = LookingHosts(monkeypatch, ahead_s=500.0)
    ahead.look(1503.0)
    assert json.loads(ahead.channel.texts["times/b"])[0] == 1000.0  # by the first host's clock


def test_clocks_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = LookingHosts(monkeypatch, ahead_s=None)
    channel = Answered([(1.0, 1.0)] * 5, 50.0)
    part = replace(hosts.parts["b"], channel=channel, now=channel.time)
    assert part.compare_clocks() == pytest.approx(50.0)
    assert part._ahead_s == pytest.approx(50.0)


# Farewells


def view(rank: int, issued: int, state: str = "running", **values: object) -> LedgerView:
    call = LedgerCall(kind="barrier")
    entries = tuple(LedgerEntry(number=n + 1, group=EVERYBODY, sequence=n, call=call) for n in range(issued))
    made = LedgerView(rank=rank, step=issued, entries=entries, issued={EVERYBODY: issued}, state=state)  # type: ignore[arg-type]
    return replace(made, **values)  # type: ignore[arg-type]


def left(channel: MemoryChannel, host: str, *, has_store: bool = True) -> LeftRanks:
    return LeftRanks(channel=channel, host=host, hosts=HOSTS, has_store=has_store)


def test_rank_0_waits_for_other_hosts_a_moment_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, slept = MemoryChannel(), []  # type: ignore[var-annotated]
    monkeypatch.setattr("time.monotonic", lambda: 50.0 + sum(slept))
    monkeypatch.setattr("time.sleep", slept.append)
    left(channel, "a").leave(view(1, 3, "finished"), 1.0)
    assert (list(channel.texts), slept) == (["left/1"], [])  # another rank than 0 does not wait
    left(channel, "a").leave(view(0, 3, "finished"), 1.0)
    assert sum(slept) == pytest.approx(1.5, abs=0.021)
    slept.clear()
    channel.publish("seen/b", "rank 0")
    left(channel, "a").leave(view(0, 3, "finished"), 1.0)
    assert slept == [0.0]
    del channel.texts["seen/b"]
    channel.publish(left_key(2), channel.texts["left/1"].replace('"rank": 1', '"rank": 2'))
    slept.clear()
    left(channel, "a").leave(view(0, 3, "finished"), 1.0)
    assert slept == [0.0]  # whoever has left too needs the store no more


def test_only_a_host_without_rank_0_acknowledges_that_it_goes() -> None:
    channel = MemoryChannel()
    for host, has_store in (("a", True), ("b", False), ("b", True)):
        left(channel, host, has_store=has_store).look(1.0)
    assert channel.texts == {}
    left(channel, "a", has_store=False).leave(view(0, 3, "finished"), 1.0)
    for host, has_store in (("a", True), ("b", False)):
        left(channel, host, has_store=has_store).look(1.0)
    assert list(channel.texts) == ["left/0"]
    there = left(channel, "b")
    assert not there.is_store_gone
    there.look(1.0)
    assert there.is_store_gone
    assert channel.texts["seen/b"] == "rank 0"
    channel.texts.pop("seen/b")
    there.look(1.0)
    assert "seen/b" not in channel.texts  # once


def test_a_wait_is_explained_by_the_first_rank_that_has_left_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, here = MemoryChannel(), view(2, 4, waiting=4)
    left(channel, "a", has_store=False).leave(view(1, 3, "finished"), 1.0)
    found = left(channel, "b", has_store=False).explain([here], 2.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("left", (1,))
    now = iter([0.0, 2.1, 2.1, 2.1])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    assert left(channel, "b", has_store=False).explain([here], 2.0) is None  # the store takes too long
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    left(channel, "a", has_store=False).leave(view(0, 3, "failed"), 1.0)
    assert left(channel, "b", has_store=False).explain([here], 2.0) is None  # whoever failed says why
    assert left(MemoryChannel(), "b").explain([here], 2.0) is None


# Updates


def paired(channel: MemoryChannel, host: str, hosts: dict[str, list[int]]) -> PairedHosts:
    ledger = Ledger(rank=hosts[host][0], world=3).reader()
    return PairedHosts(channel=channel, host=host, hosts=hosts, ledger=ledger, name_of=lambda _: "step")


def test_hosts_leave_their_updates_once_a_second_and_only_new_ones() -> None:
    channel, hosts = MemoryChannel(), {"a": [0], "b": [1], "c": [2]}
    parts = {name: paired(channel, name, hosts) for name in hosts}
    assert parts["a"].look(10.0) is None
    assert channel.texts == {}  # there is none yet
    for part in parts.values():
        part.history.add(Update(collectives=3, updates=1))
    assert parts["a"].look(10.9) is None
    assert channel.texts == {}
    for part in parts.values():
        assert part.look(11.0) is None
    assert list(channel.texts) == ["updates/a", "updates/b"]  # nobody comes after the last
    channel.texts.clear()
    parts["a"].look(12.0)
    assert channel.texts == {}
    parts["a"].history.add(Update(collectives=6, updates=2))
    parts["b"].history.add(Update(collectives=6, updates=3))
    parts["a"].look(13.0)
    found = parts["b"].look(13.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("mismatch", (0,))
    assert "rank 0 left out an update" in found.sentence
    channel.publish("updates/a", "nothing of ours")
    assert parts["b"].look(15.0) is None


def test_at_the_end_a_host_compares_with_those_on_either_side() -> None:
    hosts = {"a": [0], "b": [1], "c": [2]}
    for wrong, guilty in (("a", 0), ("c", 2)):
        channel = MemoryChannel()
        parts = {name: paired(channel, name, hosts) for name in hosts}
        for number in range(1, 5):
            for name, part in parts.items():
                part.history.add(Update(collectives=number, updates=number - (name == wrong and number == 4)))
        others = [part.finish() for name, part in parts.items() if name not in ("b", wrong)]
        assert others == [None]
        assert parts[wrong].finish() is None
        found = parts["b"].finish()
        assert found is not None
        assert found.ranks == (guilty,)
        assert len(channel.texts) == 3
