"""One look of a watch after another, at ledgers that stand or move and by a clock that is ours: who is told of what."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import made_records
import pytest
from made_records import write_records
from memory_channel import MemoryChannel

from paceline.comm.ledger.file import DATA_NS, FORWARD_NS, HEARTBEAT, PID, STEP_NS, TIMED_STEPS, ledger_path
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.solo import SoloCommunicator
from paceline.config import load_config
from paceline.errors import CommunicationError
from paceline.health.straggler import LatenessPolicy
from paceline.health.verdict import HangLimits, HangVerdict
from paceline.records.records import EventRecord, read_records
from paceline.run.other_hosts import LeftRanks
from paceline.run.seen_ranks import ProcessState, _ProcessSeen
from paceline.run.watch import Watch, WatchPolicy, keep_ledger, watch_itself, watch_policy

POLICY = WatchPolicy(
    limits=HangLimits(step_s=5.0, setup_s=50.0), compare_s=1.0, late=LatenessPolicy(windows=2, min_steps=4)
)
HOSTS = {"a": [0, 1], "b": [2]}


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.monotonic", made)
    monkeypatch.setattr("paceline.run.seen_ranks.ask_for_stacks", lambda _: {})
    return made


class Host:
    """The ranks of one host, with ledgers in a folder of their own, and the watch of their launcher."""

    def __init__(self, folder: Path, name: str, channel: MemoryChannel | None, clock: Clock) -> None:
        self.folder, self.clock = folder / name, clock
        hosts = HOSTS if channel is not None else {"a": [0, 1]}
        self.ledgers = {rank: Ledger(rank=rank, world=3, path=ledger_path(self.folder, rank)) for rank in hosts[name]}
        for ledger in self.ledgers.values():
            ledger.count_step()
            ledger.enter("forward")
        (self.folder / "logs").mkdir()
        self.watch = Watch(self.folder, hosts, POLICY, host=name, channel=channel)

    def move(self) -> None:
        for ledger in self.ledgers.values():
            ledger.enter("forward")

    def look(self, until: float, *, every_s: float = 0.5, moves: bool = False) -> HangVerdict | None:
        """Looks until a time after the start; returns the first verdict."""
        while self.clock.now < 1000.0 + until:
            self.clock.now += every_s
            if moves:
                self.move()
            found = self.watch.look()
            if found is not None:
                return found
        return None


@pytest.fixture
def alone(tmp_path: Path, clock: Clock) -> Host:
    made = Host(tmp_path, "a", None, clock)
    assert made.watch.look() is None
    return made


# One host


def test_ranks_that_stand_still_are_told_at_the_limit_by_two_looks(alone: Host, clock: Clock) -> None:
    assert alone.look(4.5) is None
    assert alone.watch._suspect is None
    assert alone.look(5.0) is None
    assert alone.watch._suspect is not None
    found = alone.look(5.5)
    assert found is not None
    assert (found.kind, found.ranks, clock.now) == ("silent", (0, 1), 1005.5)
    assert found.sentence == (
        "rank 0 is in phase forward (step 1, for 5.5 s); rank 1 is in phase forward (step 1, for 5.5 s)"
    )
    assert [(state.rank, state.silent_s) for state in found.states] == [(0, 5.5), (1, 5.5)]


def test_a_rank_that_goes_on_clears_the_suspicion(alone: Host, clock: Clock) -> None:
    assert alone.look(5.0) is None
    alone.ledgers[1].enter("backward")
    assert (
        alone.look(10.0) is None
    )  # the standstill of five seconds ended by itself: the next may take three times that
    assert alone.watch._suspect is None
    assert alone.watch._longest_s == pytest.approx(5.5)
    assert alone.look(21.5) is None
    assert alone.look(23.0) is not None
    assert clock.now == 1000.0 + 5.5 + 16.5 + 0.5


def test_steps_that_were_predicted_to_be_long_may_stand_as_long(alone: Host) -> None:
    (alone.folder / "prediction.json").write_text('{"step_s": 4.0}')
    assert alone.look(12.0) is None
    assert alone.look(12.5) is not None
    (alone.folder / "prediction.json").write_text("no prediction")
    assert alone.watch._limits().step_s == POLICY.limits.step_s


def test_a_standstill_in_the_set_up_makes_no_step_longer(tmp_path: Path, clock: Clock) -> None:
    host = Host(tmp_path, "a", None, clock)
    host.ledgers[0].enter("checkpoint")
    assert host.look(4.0) is None
    host.move()
    assert host.look(4.5) is None
    assert host.watch._longest_s == pytest.approx(4.0, abs=0.6)  # rank 1 was in a step
    for ledger in host.ledgers.values():
        ledger.enter("evaluation")
    assert host.look(5.0) is None
    host.watch._longest_s = 0.0
    assert host.look(20.0) is None
    host.move()
    assert host.look(20.5) is None
    assert host.watch._longest_s == 0.0


def test_ranks_are_judged_while_one_stands_still_and_else_now_and_then(
    alone: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[float] = []
    monkeypatch.setattr("paceline.run.watch.judge", lambda *_: judged.append(clock.now - 1000.0))
    monkeypatch.setattr(alone.watch, "_policy", replace(POLICY, compare_s=1e9))
    alone.look(6.0, every_s=0.25, moves=True)
    assert [later - earlier for earlier, later in itertools.pairwise(judged)] == [2.0, 2.0]
    judged.clear()
    alone.look(7.0, every_s=0.25)
    assert judged == [6.5, 6.75, 7.0]  # from half a second on


def test_a_rank_that_has_no_ledger_is_looked_at_as_a_process(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    for rank in (0, 1):
        (tmp_path / "logs" / f"rank-{rank}.pid").write_text(f"{os.getpid()}\n")
    watch = Watch(tmp_path, {"a": [0, 1]}, POLICY, host="a")
    state = ProcessState(halted="stopped (SIGSTOP)")
    monkeypatch.setattr("paceline.run.seen_ranks.look_at_process", lambda _: state)
    assert watch.look() is None
    assert watch.processes() == {0: os.getpid(), 1: os.getpid()}
    assert [(view.rank, view.has_joined, view.halted_s) for view in watch.views(clock.now)] == [
        (0, False, 1000.0),
        (1, False, 1000.0),
    ]
    assert watch.rank_looks() == []
    clock.now += 5.0
    assert watch.look() is None
    found = watch.look()
    assert found is not None
    assert found.sentence.startswith("rank 0 is stopped (SIGSTOP) before it joined the others, for 5.0 s (process ")
    Ledger(rank=1, world=2, path=ledger_path(tmp_path, 1))
    watch.observe(clock.now)
    assert set(watch._early) == {0}
    assert len(watch.readers()) == 0  # those of other processes


def test_a_late_rank_is_told_in_the_records_of_the_first(alone: Host, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_records(alone.folder, 0, made_records.RUN)
    for window in range(1, 6):
        for rank, ledger in alone.ledgers.items():
            ledger.cells[TIMED_STEPS] = 5 * window
            ledger.cells[STEP_NS] = 5 * window * 10**9
            ledger.cells[FORWARD_NS] = 5 * window * 10**8
            ledger.cells[DATA_NS] = 5 * window * (10**8 + rank * 5 * 10**8)
        assert alone.look(1.0 * window, moves=True) is None
    (event,) = [each for each in read_records(path) if isinstance(each, EventRecord)]
    assert (event.name, event.detail["rank"], event.detail["phase"], event.detail["steps"]) == (
        "straggler",
        1,
        "data",
        5,
    )
    assert event.detail["lost_s"] == pytest.approx(0.5)
    assert capsys.readouterr().err == ""  # the launcher shows the event


# Processes


def states(monkeypatch: pytest.MonkeyPatch, *found: ProcessState | None) -> _ProcessSeen:
    """A process that shows these states, one after another, a second apart; the last of them for good."""
    left = list(found)
    monkeypatch.setattr("paceline.run.seen_ranks.look_at_process", lambda _: left.pop(0) if len(left) > 1 else left[0])
    process = _ProcessSeen(7)
    for number in range(len(found)):
        process.look(10.0 + number)
    return process


@pytest.mark.parametrize(("blocked", "is_told"), [(0, False), (1, False), (2, True), (4, True)])
def test_a_process_that_mostly_waits_for_a_device_is_told(
    monkeypatch: pytest.MonkeyPatch, blocked: int, is_told: bool
) -> None:
    process = states(monkeypatch, *(ProcessState(is_blocked=number < blocked) for number in range(4)))
    assert process.blocked.startswith("in a wait that no signal ends (state D)") is is_told
    process.moves()
    assert process.blocked == ""


@pytest.mark.parametrize(
    ("pages", "told"), [(49, ""), (50, "its memory is swapped out (50 pages a second come from the disk)")]
)
def test_a_process_whose_memory_comes_from_a_disk_is_told(
    monkeypatch: pytest.MonkeyPatch, pages: int, told: str
) -> None:
    process = states(monkeypatch, *(ProcessState(page_faults=7 + pages * number) for number in range(5)))
    assert process.blocked == told
    assert states(monkeypatch, ProcessState(page_faults=10**6)).blocked == ""  # those of before do not count


def test_a_process_that_is_gone_is_dead_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    process = states(monkeypatch, ProcessState(halted="stopped (SIGSTOP)"), None)
    assert (process.halted, process.blocked) == ("", "")
    since = 20.9 - process.gone_s(20.9)
    process.look(15.0)
    assert process.gone_s(since + 12.0) == pytest.approx(12.0)  # a second look begins nothing anew
    process.moves()
    assert process.gone_s(99.0) == 0.0


@pytest.mark.parametrize(("is_launcher", "after_s"), [(True, 60.0), (False, 10.0)])
def test_a_launcher_leaves_a_dead_rank_to_its_agent_for_longer(
    tmp_path: Path, clock: Clock, is_launcher: bool, after_s: float
) -> None:
    ledgers = [Ledger(rank=rank, world=2, path=ledger_path(tmp_path, rank)) for rank in (0, 1)]
    for ledger in ledgers:
        ledger.count_step()
    ledgers[1].cells[PID] = 4_000_000  # of which there is none
    watch = Watch(tmp_path, {"a": [0, 1]}, POLICY, host="a", ledger=None if is_launcher else ledgers[0])
    watch.observe(clock.now)
    clock.now += 1.0
    watch.observe(clock.now)  # the process is seen to be gone
    seen = []
    for passed_s in (after_s - 0.5, after_s + 0.5):
        watch.observe(clock.now + passed_s)
        seen.append([view.state for view in watch.views(clock.now + passed_s)])
    assert seen == [["running", "running"], ["running", "dead"]]


def test_a_process_is_stopped_since_it_was_first_seen_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = ProcessState(halted="stopped (SIGSTOP)")
    process = states(monkeypatch, ProcessState(), stopped, stopped, ProcessState(halted="frozen"), replace(stopped))
    assert (process.halted, process.halted_s) == ("stopped (SIGSTOP)", 14.0)


# Several hosts


@pytest.fixture
def channel() -> MemoryChannel:
    return MemoryChannel()


@pytest.fixture
def hosts(tmp_path: Path, clock: Clock, channel: MemoryChannel) -> dict[str, Host]:
    made = {name: Host(tmp_path, name, channel, clock) for name in HOSTS}
    for host in made.values():
        assert host.watch.look() is None
    return made


def test_hosts_that_all_stand_still_find_one_verdict(
    hosts: dict[str, Host], channel: MemoryChannel, clock: Clock
) -> None:
    found: dict[str, HangVerdict] = {}
    while len(found) < 2:
        clock.now += 0.5
        for name, host in hosts.items():
            verdict = host.watch.look()
            if verdict is not None:
                found.setdefault(name, verdict)
    assert clock.now == 1006.0  # the host that looks first learns it from the other
    assert found["a"] == found["b"] == HangVerdict.from_json(json.loads(channel.texts["verdict"]))
    assert (found["a"].kind, found["a"].ranks) == ("silent", (0, 1, 2))
    assert [state.rank for state in found["a"].states] == [0, 1, 2]


def test_a_host_of_which_nothing_is_heard_is_told(hosts: dict[str, Host], channel: MemoryChannel, clock: Clock) -> None:
    assert hosts["a"].look(2.0) is None
    assert "asked" not in channel.texts
    assert hosts["a"].look(2.5) is None
    assert channel.texts["asked"] == "do you live?"
    found = hosts["a"].look(9.0)
    assert found is not None
    assert clock.now == 1005.5  # nobody waits for it any longer: it was asked three seconds ago
    assert (found.kind, found.ranks) == ("missing", (2,))
    assert found.sentence == (
        "the ranks of a stand still, and nothing is heard of b (rank 2): its host is gone, stopped or cannot be "
        "reached, or no rank there lets its Python run; rank 0 runs; rank 1 runs"
    )
    told = hosts["b"].watch.look()  # the first verdict is everybody's
    assert told == found


def test_a_host_that_lives_and_moves_is_told_later(
    hosts: dict[str, Host], channel: MemoryChannel, clock: Clock
) -> None:
    found = None
    while found is None:
        clock.now += 0.5
        hosts["b"].move()
        assert hosts["b"].watch.look() is None
        found = hosts["a"].watch.look()
    assert channel.texts["lives/b"] == repr(clock.now)
    assert clock.now == 1000.0 + 5.5 + 5.0 + 5.0 + 0.5  # the limit, once more, and a little
    assert (found.kind, found.ranks) == ("missing", (2,))
    assert "and the ranks of b (rank 2) move, and do not come; rank 0 runs" in found.sentence


def test_a_host_that_goes_on_takes_back_what_it_said(
    hosts: dict[str, Host], channel: MemoryChannel, clock: Clock
) -> None:
    hosts["a"].watch._heard = {}
    while not channel.texts.get("host/a"):
        clock.now += 0.5
        hosts["b"].move()
        assert hosts["b"].watch.look() is None
        assert hosts["a"].watch.look() is None
    assert [each["rank"] for each in json.loads(channel.texts["host/a"])] == [0, 1]
    assert channel.texts["asked"]
    hosts["a"].move()
    clock.now += 0.5
    assert hosts["a"].watch.look() is None
    assert (channel.texts["host/a"], channel.texts["asked"]) == ("", "")
    assert hosts["a"].watch._published_s is None
    before = channel.texts["lives/b"]
    clock.now += 0.5
    hosts["b"].move()
    assert hosts["b"].watch.look() is None
    assert channel.texts["lives/b"] == before  # nobody asks any more


@pytest.mark.parametrize(("kind", "is_told"), [("mismatch", True), ("stopped", True), ("missing", False)])
def test_what_one_host_knows_for_sure_is_told_at_once(
    hosts: dict[str, Host], channel: MemoryChannel, clock: Clock, kind: str, is_told: bool
) -> None:
    sure = HangVerdict(kind=kind, ranks=(1,), sentence="rank 1 it is")  # type: ignore[arg-type]
    assert hosts["a"].watch._with_others(channel, sure, clock.now) == (sure if is_told else None)
    assert ("verdict" in channel.texts) is is_told
    assert hosts["b"].watch.look() == (sure if is_told else None)


def test_a_store_that_is_gone_is_the_first_hosts(
    hosts: dict[str, Host], channel: MemoryChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> str:
        raise CommunicationError("the store is gone")

    monkeypatch.setattr(channel, "read", fail)
    assert hosts["b"].look(5.0) is None  # its ranks may go on: the launcher will tell
    found = hosts["b"].look(5.5)
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.sentence == (
        "the ranks of b stand still, and nothing is heard of a (ranks 0, 1): its host is gone, stopped or cannot be "
        "reached; rank 2 runs"
    )
    assert hosts["a"].watch.look() is None
    found = hosts["a"].watch.look()
    assert found is not None
    assert found.ranks == (2,)


def test_hosts_with_numbers_are_called_by_their_names(tmp_path: Path, channel: MemoryChannel, clock: Clock) -> None:
    numbered = {"0": [0], "1": [1, 2]}
    watch = Watch(tmp_path, numbered, POLICY, host="0", channel=channel, named="node7")
    assert watch._name(["1"]) == "host 1 (ranks 1, 2)"
    channel.publish("name/1", "node8")
    watch._with_others(channel, None, clock.now)
    assert watch._name(["1", "0"]) == "node8 (ranks 1, 2), node7 (rank 0)"


def test_ranks_that_left_their_loop_stand_for_their_host(
    hosts: dict[str, Host], channel: MemoryChannel, clock: Clock
) -> None:
    watch = hosts["a"].watch
    watch.left = LeftRanks(channel=channel, host="a", hosts=HOSTS, has_store=False)
    there = LeftRanks(channel=channel, host="b", hosts=HOSTS, has_store=False)
    hosts["b"].ledgers[2].finish()
    there.leave(hosts["b"].ledgers[2].reader().view(host="b"), clock.now)
    found = hosts["a"].look(9.0)
    assert found is not None
    assert clock.now == 1005.5
    assert found.states[2].does == "has finished after step 1"
    watch.left = LeftRanks(channel=channel, host="a", hosts=HOSTS, has_store=True)
    watch.left._known = {0: hosts["a"].ledgers[0].reader().view()}
    assert watch.look() is None  # the store has gone with rank 0: nobody asks it
    assert watch._late_hosts is None


# Threads of ranks, of which one leads


def test_the_lowest_rank_whose_thread_still_runs_leads(tmp_path: Path, clock: Clock) -> None:
    ledgers = [Ledger(rank=rank, world=3, path=ledger_path(tmp_path, rank)) for rank in range(3)]
    watches = [Watch(tmp_path, {"a": [0, 1, 2]}, POLICY, host="a", ledger=ledger) for ledger in ledgers]

    def leaders(after_s: float, *alive: int) -> list[int]:
        clock.now += after_s
        for rank in alive:
            ledgers[rank].cells[HEARTBEAT] += 1
        return [rank for rank, watch in enumerate(watches) if watch._leads(clock.now, rank)]

    assert leaders(0.0, 0, 1, 2) == [0]
    assert leaders(2.4, 1, 2) == [0]
    assert leaders(0.1, 1, 2) == [0, 1]  # nothing was heard of rank 0 for as long as it takes
    assert leaders(2.4, 2) == [0, 1]
    assert leaders(0.1, 2) == [0, 1, 2]
    assert leaders(0.1, 0) == [0]
    watches[2].look()
    assert watches[2]._leads_now is False
    assert len(watches[2]._ranks) == 3


# What is told


def verdict_of(watch: Watch) -> HangVerdict:
    return HangVerdict(kind="missing", ranks=(1,), sentence="rank 1 is missing", states=tuple(watch.states()))


def test_a_verdict_is_told_in_the_folder_and_the_logs_of_all_ranks(
    alone: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.watch.tell(verdict_of(alone.watch))
    told = json.loads((alone.folder / "verdict.json").read_text())
    assert (told["kind"], told["ranks"], told["sentence"]) == ("missing", [1], "rank 1 is missing")
    text = (alone.folder / "verdict.txt").read_text()
    assert text.splitlines() == [
        "rank 1 is missing",
        "  rank 0, step 1, phase forward: runs",
        "  rank 1, step 1, phase forward: runs",
    ]
    for name in ("run", "rank-0", "rank-1"):
        assert f"watch ERROR paceline: {text}" in (alone.folder / "logs" / f"{name}.log").read_text()
    assert capsys.readouterr().err == ""


def test_a_loop_of_ones_own_tells_the_first_verdict_and_on_its_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "runs" / "mine"
    ledger = Ledger(rank=0, world=2, path=ledger_path(tmp_path, 0))
    watch = Watch(tmp_path, {"a": [0, 1]}, POLICY, host="a", ledger=ledger, told=told)
    watch.tell(verdict_of(watch))
    assert capsys.readouterr().err == (
        f"paceline: rank 1 is missing\n  what every rank does is in {told / 'verdict.txt'}\n"
    )
    before = (told / "verdict.txt").read_text()
    watch.tell(replace(verdict_of(watch), sentence="another"))
    assert (told / "verdict.txt").read_text() == before
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "verdict.txt").exists()
    assert not (told / "logs").exists()


def test_the_end_of_ranks_waits_until_every_host_has_the_verdict(
    hosts: dict[str, Host], channel: MemoryChannel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        clock.now += 0.5
        if len(waited) == 2:
            channel.publish("has/b", "it")

    monkeypatch.setattr("time.sleep", wait)
    host = hosts["a"]
    host.watch.observe(clock.now)
    host.watch._end(verdict_of(host.watch))
    assert channel.texts["has/a"] == "it"
    assert waited == [0.02, 0.02]
    failures = [json.loads((host.folder / "logs" / f"rank-{rank}.error.json").read_text()) for rank in (0, 1)]
    assert [each["kind"] for each in failures] == ["hang", "hang"]
    assert failures[0]["time"] > failures[1]["time"]  # the blamed rank's comes first
    assert (host.folder / "verdict.txt").is_file()
    waited.clear()
    del channel.texts["has/b"]
    monkeypatch.setattr("time.sleep", lambda seconds: (waited.append(seconds), setattr(clock, "now", clock.now + 0.5)))
    host.watch._end(verdict_of(host.watch))
    assert len(waited) == 3  # and no longer than a second and a half


# Who watches


def test_a_policy_is_what_the_config_says() -> None:
    asked = ["model.kind=mlp", "data.kind=digits", "monitor={hang_s: 7, hang_setup_s: 70}"]
    found = watch_policy(load_config(None, asked))
    assert found is not None
    assert (found.limits.step_s, found.limits.setup_s, found.every_s, found.compare_s) == (7.0, 70.0, 0.2, 2.0)
    assert watch_policy(load_config(None, [*asked[:2], "monitor.hang_s=null"])) is None


def test_one_rank_keeps_a_ledger_and_is_not_watched(tmp_path: Path) -> None:
    import torch

    comm = SoloCommunicator(torch.device("cpu"))
    kept = watch_itself(comm, tmp_path, POLICY)
    assert ledger_path(tmp_path, 0).is_file()
    assert keep_ledger(kept, tmp_path / "other") is kept
    assert not (tmp_path / "other").exists()


def test_a_watch_follows_until_its_rank_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(rank=0, world=2, path=ledger_path(tmp_path, 0))
    fast = replace(POLICY, every_s=0.01)
    watch = Watch(tmp_path, {"a": [0, 1]}, fast, host="a", ledger=ledger)
    watch.start()
    while ledger.cells[HEARTBEAT] < 2:
        pass
    ledger.finish()
    watch._thread.join()
    watch.stop()
    watch.stop()
    unstarted: Callable[[], None] = Watch(tmp_path, {"a": [0, 1]}, fast, host="a", ledger=ledger).stop
    unstarted()
    assert capsys.readouterr().err == ""
