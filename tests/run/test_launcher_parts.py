"""The parts of a launcher, one by one: what hosts are told, what ranks' environment has, how attempts end."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_records
import psutil
import pytest
from free_ports import free_port
from made_records import write_records
from torch.distributed.elastic.multiprocessing.api import SignalException

from paceline.comm.control.server import Attendance
from paceline.comm.control.wire import Address
from paceline.config import load_config
from paceline.errors import CommunicationError, LaunchError
from paceline.health.diagnosis import Diagnosis, FailedAttempt
from paceline.health.exit_codes import FAILED, REFUSED
from paceline.health.failure import silent_failure
from paceline.records.records import read_records
from paceline.run import agreement, notes, processes, rendezvous, supervise
from paceline.run.agreement import HostFacts, differences
from paceline.run.records import mark_records
from paceline.run.rendezvous import CHANGED, LeftOutError, Rendezvous
from paceline.run.supervise import Launcher, LocalRanks
from paceline.run.warm import WarmRanks, _is_ending, warm_ranks
from paceline.run.whereami import Surroundings, host_name

SILENT = "a: nothing was heard of it"
NODES = Surroundings(launcher="test", kind="host", least=1, count=2, address="127.0.0.1", port=1)


# What hosts tell one another


def facts(host: str, **config: object) -> HostFacts:
    return HostFacts(host=host, paceline="1", torch="2", ranks=2, config=config, folders=())


def as_told(found: HostFacts) -> dict[str, Any]:
    return {name: getattr(found, name) for name in HostFacts.__dataclass_fields__}


@pytest.mark.parametrize(
    ("count", "told"), [(1, "k0 = 1, not 0"), (4, ", k3 = 1, not 0\n"), (5, " and 1 more\n"), (9, " and 5 more\n")]
)
def test_of_many_keys_that_differ_the_first_four_are_told(count: int, told: str) -> None:
    keys = [f"k{number}" for number in range(count)]
    (found,) = differences(as_told(facts("a", **dict.fromkeys(keys, 0))), facts("b", **dict.fromkeys(keys, 1)))
    assert found.startswith("host b has another config than host a: k0 = 1, not 0")
    assert told in found
    assert found.count(", not 0") + (" more\n" in found) <= 5
    assert found.endswith("\n  all hosts start the same run\n  give b the same file and the same overrides")


def test_what_hosts_decide_for_themselves_is_no_difference() -> None:
    first = facts("a", train={"steps": 1, "microbatch": "auto"}, seed=None, same=3)
    own = facts("b", train={"steps": 2, "microbatch": 4}, seed=7, same=3, more={"x": 1})
    (found,) = differences(as_told(first), own)
    assert "host a: train.steps = 2, not 1\n" in found
    assert list(differences(as_told(first), replace(first, host="b"))) == []


def test_versions_and_ranks_are_told_with_the_fix() -> None:
    other = replace(facts("b", steps=2), torch="3", paceline="4", ranks=8)
    assert list(differences(as_told(facts("a", steps=1)), other)) == [
        "host b has Paceline 4, and host a has 1\n  all hosts of a run have the same versions\n"
        "  install Paceline 1 on b",
        "host b has torch 3, and host a has 2\n  all hosts of a run have the same versions\n  install torch 2 on b",
        "host b has 8 ranks, and host a has 2\n  every host has as many ranks as the others: one per GPU, unless it is "
        "said\n  give all of them --node-ranks N; paceline doctor shows the GPUs of b",
    ]


def test_a_folder_is_seen_by_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_SEEN_S", 0.0)
    folders = [tmp_path / name for name in ("right", "wrong", "none", "gone")]
    for folder, mark in zip(folders, ("mark", "other", None), strict=False):
        folder.mkdir()
        if mark:
            (folder / ".hosts").write_text(mark)
    found = agreement._unseen(replace(facts("b"), folders=tuple(map(str, folders))), "mark")
    assert found == [str(each) for each in folders[1:]]


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setenv("PACELINE_SECRET", "s" * 32)
    monkeypatch.setattr(rendezvous, "_BEAT_S", 0.01)
    nodes = replace(NODES, port=free_port())
    with rendezvous.rendezvous(tmp_path, "run", nodes) as made:
        yield made


def test_a_launcher_that_leaves_is_missed_at_once(meeting: Rendezvous) -> None:
    guest = Rendezvous(meeting._client.address, lambda: b"s" * 32, "run", attends_as="guest/1/x")
    with guest:
        while "guest/1/x" not in meeting.hosts.present:
            time.sleep(0.001)
    while "guest/1/x" in meeting.hosts.present:  # its connection has ended with it, long before it is silent
        time.sleep(0.001)


def test_a_launcher_that_has_the_server_may_open_as_many_files_as_it_can(meeting: Rendezvous) -> None:
    del meeting
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024) // 2 + 256, hard))
        rendezvous._allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("size", "gone", "newcomers", "told"),
    [
        (3, ["a"], [], "a is gone"),
        (3, ["a", "b"], ["c", "d"], "a is gone; b is gone; c has come; d has come"),
        (3, [SILENT, SILENT], [], f"{host_name()} hears of no other host: it is cut off from them, or all are gone"),
        (3, [SILENT, "b"], [], f"{SILENT} is gone; b is gone"),
        (2, [SILENT], [], f"{SILENT} is gone"),
        (4, [SILENT, SILENT], [], f"{SILENT} is gone; {SILENT} is gone"),
    ],
)
def test_hosts_that_came_or_went_are_named(size: int, gone: list[str], newcomers: list[str], told: str) -> None:
    made = Rendezvous(Address("127.0.0.1", 1), lambda: b"s" * 32, "run")
    made._round, made.size = 3, size
    made._seen = Attendance(round=3, gone=gone, newcomers=newcomers)
    assert made._change() == CHANGED + told
    made._seen = made._seen._replace(round=2)  # the server speaks of another round
    assert (made._change(), made._news()) == (CHANGED, Attendance())
    made._seen = made._seen._replace(round=3, is_closed=True)
    assert made._news() == Attendance(is_closed=True)


def test_a_launcher_says_what_it_means_that_it_reaches_nobody() -> None:
    made = Rendezvous(Address("127.0.0.1", free_port()), lambda: b"s" * 32, "run", attends_as="me")
    assert made._hint() == ""
    made._client.why_unreached = "Connection refused"
    port = made._client.address.port
    assert made._hint().splitlines()[1:] == [
        f"  host {host_name()} does not reach it: connection refused",
        "  refused: that launcher is not started yet; no answer: that host is down, or a firewall drops what "
        "comes from here",
        f"  start it there; let its firewall pass: iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
    ]
    assert LeftOutError("x").code == FAILED
    assert LeftOutError("x", REFUSED).code == REFUSED


# The environment of ranks


def local(**values: Any) -> LocalRanks:
    return LocalRanks(ranks=4, **values)


def test_ranks_get_their_share_of_threads_and_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG", "MIMALLOC_PURGE_DELAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(supervise, "usable_cores", lambda: range(9))
    near = processes.loopback_interface()
    plain = {
        "OMP_NUM_THREADS": "2",
        "GLOO_SOCKET_IFNAME": near,
        "NCCL_SOCKET_IFNAME": f"={near}",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONUNBUFFERED": "1",
        "MIMALLOC_PURGE_DELAY": "1000",
    }
    assert supervise._settings(local()) == plain
    asked = local(threads=3, variables={"PYTHONUNBUFFERED": "0", "MORE": "x"})
    assert supervise._settings(asked) == {**plain, "OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "0", "MORE": "x"}
    monkeypatch.setattr(supervise, "usable_cores", lambda: range(3))
    assert supervise._settings(local())["OMP_NUM_THREADS"] == "1"
    hosts = supervise._settings(local(nodes=NODES))
    assert (hosts["GLOO_SOCKET_IFNAME"], "NCCL_SOCKET_IFNAME" in hosts) == (near, False)
    exported = {name: f"own {name}" for name in plain if name not in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")}
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    assert supervise._settings(local()) == {**plain, "OMP_NUM_THREADS": "1", **exported}


def test_the_environment_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_KEPT", "before")
    monkeypatch.delenv("PACELINE_TEST_NEW", raising=False)
    with supervise._environment({"PACELINE_TEST_KEPT": "within", "PACELINE_TEST_NEW": "within"}):
        assert (os.environ["PACELINE_TEST_KEPT"], os.environ["PACELINE_TEST_NEW"]) == ("within", "within")
    assert os.environ["PACELINE_TEST_KEPT"] == "before"
    assert "PACELINE_TEST_NEW" not in os.environ


def test_an_agent_is_asked_for_one_attempt_on_these_hosts(tmp_path: Path) -> None:
    met: Any = object()
    asked = local(run_id="mine")
    alone = supervise._agent_config(asked, tmp_path, met)
    assert (alone.min_nodes, alone.max_nodes, alone.nproc_per_node, alone.max_restarts) == (1, 1, 4, 0)
    assert (alone.rdzv_backend, alone.rdzv_endpoint, alone.local_addr) == ("paceline", "localhost", "localhost")
    assert (alone.run_id, alone.rdzv_configs["made"]) == ("mine", met)
    handled = set(str(alone.signals_to_handle).split(","))
    assert handled == {
        each.name
        for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    hosts = supervise._agent_config(replace(asked, nodes=replace(NODES, least=2, count=3)), tmp_path, met)
    assert (hosts.min_nodes, hosts.max_nodes, hosts.rdzv_endpoint, hosts.local_addr) == (
        2,
        3,
        "127.0.0.1:1",
        "127.0.0.1",
    )
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert "SIGHUP" not in str(supervise._agent_config(asked, tmp_path, met).signals_to_handle)
    finally:
        signal.signal(signal.SIGHUP, ignored)


# Attempts


class Met:
    """What a launcher hears of other hosts."""

    def __init__(self, told: list[str] | Exception) -> None:
        self.told, self.asked = told, (("", False))

    def agree_on_end(self, own: str, *, is_sure: bool) -> list[str]:
        self.asked = own, is_sure
        if isinstance(self.told, Exception):
            raise self.told
        return [own if each == "own" else each for each in self.told]


def launcher(folder: Path, told: list[str] | Exception = [], **asked: Any) -> Launcher:  # noqa: B006
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    made = Launcher(folder, LocalRanks(**{"ranks": 2, **asked}))
    made.met = Met(told)  # type: ignore[assignment]
    return made


def failed(exit_code: int = -9) -> FailedAttempt:
    failure = silent_failure(1, exit_code)
    return FailedAttempt.of(Diagnosis(cause=failure, message=f"{failure}\n  its log", code=FAILED), {})


def test_hosts_agree_on_one_account_of_an_attempt(tmp_path: Path) -> None:
    ended, other = failed(), failed(7)
    here = launcher(tmp_path, ["own"])
    assert here.agree_on_end(ended) == ([ended], "", True)
    assert here.met.asked == (ended.to_text(), True)  # type: ignore[attr-defined]
    hosts = launcher(tmp_path, [other.to_text(), f"{CHANGED}b is gone"], nodes=NODES)
    assert hosts.agree_on_end(None, "") == ([other], f"{CHANGED}b is gone", False)
    assert hosts.met.asked == (f"{CHANGED}others have come or gone", True)  # type: ignore[attr-defined]
    hosts = launcher(tmp_path, [f"{CHANGED}b is gone", "own"], nodes=NODES)
    assert hosts.agree_on_end(None, f"{CHANGED}c has come") == ([], f"{CHANGED}c has come", True)
    for code, is_sure in ((-9, True), (-signal.SIGTERM, False)):
        hosts.agree_on_end(failed(code))
        assert hosts.met.asked[1] is is_sure  # type: ignore[attr-defined]
    assert not launcher(tmp_path, ["own"]).has_others


def test_a_server_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    hosts = launcher(tmp_path, CommunicationError("it cannot be reached"), nodes=NODES)
    with pytest.raises(LaunchError, match="the run cannot go on: it cannot be reached"):
        hosts.agree_on_end(None)
    with pytest.raises(notes.RunFailedError) as raised:
        hosts.agree_on_end(failed())
    assert str(raised.value).splitlines()[0] == "rank 1 was killed by SIGKILL"
    assert str(raised.value).endswith("\n  not started again: the launcher where hosts meet is gone")


def test_whoever_asked_for_room_gets_it(tmp_path: Path) -> None:
    here = launcher(tmp_path, ["own"])
    here.signals = [signal.SIGUSR1, signal.SIGTERM]
    with pytest.raises(SignalException) as raised:
        here.agree_on_end(failed())
    assert raised.value.sigval == signal.SIGUSR1


@pytest.mark.parametrize(
    ("number", "is_saved", "has_trained", "code", "message"),
    [
        (signal.SIGTERM, True, True, 75, "preempted"),
        (signal.SIGTERM, False, False, 75, "preempted"),
        (signal.SIGTERM, False, True, 143, "ended by SIGTERM"),
        (signal.SIGINT, True, True, 130, "ended by SIGINT"),
        (signal.SIGINT, False, False, 130, "ended by SIGINT"),
    ],
)
def test_a_run_that_a_signal_ends_is_preempted_only_where_nothing_is_lost(
    tmp_path: Path, number: signal.Signals, is_saved: bool, has_trained: bool, code: int, message: str
) -> None:
    here = launcher(tmp_path)
    here.ranks, here._marks = range(2), mark_records(tmp_path, range(2))
    path = write_records(tmp_path, 1, made_records.RUN)
    if is_saved:
        notes.note_preemption(tmp_path)
    if has_trained:
        notes.StepNote(tmp_path, 0, 3).write(4)
    error = here.end_by(number)
    assert error.code == code  # type: ignore[attr-defined]
    end: Any = list(read_records(path))[-1]
    assert (end.status, end.message) == ("stopped", message)
    if code == 75:
        assert ("saved" in str(error)) is is_saved


@pytest.mark.parametrize(
    ("place", "size", "nodes", "num_records", "ranks", "removed"),
    [
        (0, 1, None, None, range(2), (0, 1, 2, 3, 9)),
        (0, 1, None, 4, range(4), (0, 1, 2, 3, 9)),
        (0, 2, NODES, None, range(2), (0, 1)),
        (1, 2, NODES, None, range(2, 4), (2, 3, 9)),
        (1, 3, NODES, 8, range(2, 4), (2, 3)),
    ],
)
def test_an_attempt_begins_with_the_ranks_of_this_host(
    tmp_path: Path,
    place: int,
    size: int,
    nodes: Surroundings | None,
    num_records: int | None,
    ranks: range,
    removed: tuple[int, ...],
) -> None:
    here = launcher(tmp_path, nodes=nodes, num_records=num_records)
    for rank in (0, 1, 2, 3, 9):
        (tmp_path / "logs" / f"rank-{rank}.step").touch()
    here._pids, here._left = {0: 1}, {0}
    here._begin(place, size)
    assert (here.ranks, here._pids, here._left) == (ranks, {}, set())
    left = {int(path.stem[5:]) for path in (tmp_path / "logs").glob("*.step")}
    assert left == {0, 1, 2, 3, 9} - set(removed)


def test_what_a_silent_rank_printed_is_its_log_and_its_failure(tmp_path: Path) -> None:
    here = launcher(tmp_path / "run")
    here.ranks, here._marks = range(2), mark_records(tmp_path, range(2))
    write_records(tmp_path / "run", 1, made_records.RUN)  # it began and has no end
    (tmp_path / "scratch" / "x" / "0").mkdir(parents=True)
    (tmp_path / "scratch" / "x" / "0" / "stderr.log").write_text("no module\n")
    (tmp_path / "scratch" / "x" / "0" / "stdout.log").write_text("hello\n")
    (tmp_path / "run" / "logs" / "rank-1.log").write_text("collective operation timeout\n" + "x" * 2**17)
    error: Any = SimpleNamespace(failures={0: SimpleNamespace(exitcode=3, pid=1)})
    first, second = here._failures(error, tmp_path / "scratch")
    assert (first.rank, first.message, first.traceback) == (0, "left with exit code 3 and no error", "no module\nhello")
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text() == "no module\nhello\n"
    assert (second.rank, second.message, second.traceback) == (1, "left with exit code 0 and no error", "")
    error.failures = {1: SimpleNamespace(exitcode=-signal.SIGABRT, pid=1)}
    (aborted,) = here._failures(error, tmp_path / "scratch")
    assert aborted.cause == "died"  # what NCCL said stands too far back
    (tmp_path / "run" / "logs" / "rank-1.log").write_text("collective operation timeout\n" + "x" * (2**16 - 30))
    (aborted,) = here._failures(error, tmp_path / "scratch")
    assert aborted.cause == "stuck"
    told = replace(silent_failure(5, 1), kind="hang")
    notes.write_failure(tmp_path / "run", told)
    assert here._failures(error, tmp_path / "scratch") == [told]  # a verdict, whichever host found it


def test_only_ranks_that_had_left_before_are_missed_among_several_hosts(tmp_path: Path) -> None:
    here = launcher(tmp_path, nodes=NODES)
    here.ranks, here._marks = range(2), mark_records(tmp_path, range(2))
    for rank in (0, 1):
        write_records(tmp_path, rank, made_records.RUN)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for rank, pid in ((0, os.getpid()), (1, gone.pid)):
        (tmp_path / "logs" / f"rank-{rank}.pid").write_text(f"{pid} {notes.socket.gethostname()} {os.getpid()}\n")
    assert here.living() == [os.getpid()]
    assert here.processes() == [os.getpid(), gone.pid]
    here._look()
    assert here._left == {1}
    (found,) = here._failures(SimpleNamespace(failures={}), tmp_path)  # type: ignore[arg-type]
    assert found.rank == 1
    alone = launcher(tmp_path)
    alone._look()
    assert alone._left == set()


# Processes


@pytest.mark.parametrize(
    ("cores", "rank", "ranks", "threads", "share"),
    [
        ([3, 1, 0, 2], 0, 2, 1, [0, 1]),
        ([3, 1, 0, 2], 1, 2, 2, [2, 3]),
        ([3, 1, 0, 2], 1, 2, 3, [0, 1, 2, 3]),
        ([2, 1, 0], 0, 2, 1, [0, 1, 2]),
        ([1, 0], 3, 4, 1, [0, 1]),
    ],
)
def test_cores_are_shared_out_where_that_is_even(
    cores: list[int], rank: int, ranks: int, threads: int, share: list[int]
) -> None:
    assert processes.share_of_cores(cores, rank, ranks, threads) == share


def test_a_group_is_asked_to_end_before_it_is_made_to() -> None:
    polite, deaf = (
        subprocess.Popen(
            ["sh", "-c", f"{trap} echo ready; while :; do sleep 0.01; done"],
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        for trap in ("", "trap '' TERM;")
    )
    for each in (polite, deaf):
        assert each.stdout is not None
        each.stdout.readline()
        each.stdout.close()
    waited = threading.Thread(target=polite.wait)
    waited.start()
    processes.end_groups([polite.pid, 2**22 + 1], patience_s=60)
    waited.join()
    processes.end_groups([deaf.pid], patience_s=0.3)
    assert (polite.returncode, deaf.wait(30)) == (-signal.SIGTERM, -signal.SIGKILL)
    while deaf.pid in processes._living_groups():  # its last sleep may still end
        time.sleep(0.01)
    assert os.getpgrp() in processes._living_groups()


def test_compiled_code_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")})
    plain = ["model.kind=mlp", "data.kind=digits"]
    processes.keep_compiled(load_config(None, [*plain, "model.compile=false"]))
    assert (name in os.environ, list(tmp_path.iterdir())) == (False, [])
    compiled = load_config(None, [*plain, "model.compile=true"])
    processes.keep_compiled(compiled)
    assert os.environ[name] == str(tmp_path / "cache" / "paceline" / "compiled")
    assert Path(os.environ[name]).is_dir()
    os.environ[name] = "mine"
    processes.keep_compiled(compiled)
    assert os.environ[name] == "mine"


def test_variables_of_launchers_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_ERROR_FILE",
        "PACELINE_PROFILE",
        "PACELINE_MACHINE",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    config = load_config(None, ["model.kind=mlp", "data.kind=digits", "parallel.device=cpu"])
    assert processes.restarted_by_launcher() is processes.profile_request() is processes.machine_entry() is None
    assert processes.node_ranks(config) is None
    processes.tell_agent("message", "text", 7.9)  # there is none
    values = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "5", "PACELINE_PROFILE": "spans"}
    for name, value in {**values, "PACELINE_MACHINE": "m.yaml", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert processes.restarted_by_launcher() == {"number": 2, "of": 5, "reason": "restarted by the agent"}
    assert processes.profile_request() == Path("spans")
    assert processes.machine_entry() == Path("m.yaml")
    assert processes.node_ranks(config) == 3
    assert processes.node_ranks(config.with_values("parallel", node_ranks=2)) == 2
    assert not processes.uses_nccl(config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    gpu = config.with_values("parallel", device="auto")
    for backend, uses in (("auto", True), ("nccl", True), ("gloo", False)):
        assert processes.uses_nccl(gpu.with_values("comm", backend=backend)) is uses
        assert not processes.uses_nccl(config.with_values("comm", backend=backend))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    processes.tell_agent("message", "text", 7.9)
    told = '{"message": {"message": "message", "extraInfo": {"py_callstack": "text", "timestamp": "7"}}}'
    assert (tmp_path / "error.json").read_text() == told


# The server that forks


class Stubborn(WarmRanks):
    """A server that does not look at its input, as while it loads its modules."""

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)


def test_a_server_that_does_not_look_is_killed_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.run.warm._PATIENCE_S", 0.01)
    ranks = Stubborn(tmp_path / "ranks", [], None)
    ranks.close()
    assert ranks._server.returncode == -signal.SIGKILL


def test_a_server_that_is_gone_is_told_and_another_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Stubborn(tmp_path / "ranks", [], None)
    first = ranks._server
    assert ranks.arguments(["module", "x"])[-3:] == [str(tmp_path / "ranks"), "module", "x"]
    assert capsys.readouterr().err == ""
    first.kill()
    first.wait()
    assert ranks.arguments(["module"])[:2] == ["-I", "-S"]
    assert ranks._server is not first
    assert (
        "the process that ranks are forked from was killed by SIGKILL: another one is started"
        in capsys.readouterr().err
    )
    ranks._server.kill()
    ranks._server.wait()
    ranks._server.returncode = 3
    ranks.close()
    assert "forked from left with exit code 3: its ranks went with it" in capsys.readouterr().err


def test_a_process_ends_by_itself_once_it_is_dead() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert not _is_ending(process.pid)
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
        assert _is_ending(process.pid)
    assert _is_ending(process.pid)


def test_no_server_is_started_at_an_address_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []
    monkeypatch.setattr(WarmRanks, "__init__", lambda _, address, *__: started.append(address))
    monkeypatch.setattr(WarmRanks, "close", lambda _: None)
    for length, is_started in ((100, True), (101, False)):
        folder = tmp_path / "d"
        monkeypatch.setattr("paceline.run.warm._LONGEST_ADDRESS", len(os.fsencode(folder / "ranks")) + 100 - length)
        monkeypatch.setattr("paceline.run.warm.scratch_folder", lambda folder=folder: contextlib.nullcontext(folder))
        with warm_ranks([]) as found:
            assert (found is not None) is is_started
    assert started == [tmp_path / "d" / "ranks"]
