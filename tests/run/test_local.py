"""The agent and what is made of its findings, with ranks that know nothing of torch and so start at once."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gone_processes import wait_until_gone

from paceline.errors import LaunchError, UsageError
from paceline.health.diagnosis import FailedAttempt, diagnose
from paceline.health.verdict import HangLimits
from paceline.records.records import EndRecord, RunRecord, read_records
from paceline.run import notes, supervise
from paceline.run.notes import RunPreemptedError, RunStoppedError, noted_processes
from paceline.run.supervise import Launcher, LocalRanks, launching
from paceline.run.watch import WatchPolicy

# torch leaves the files of redirected output to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.usefixtures("plain_rendezvous"),
]

Launch = Callable[..., None]

RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path

folder, plot = Path(sys.argv[1]), sys.argv[2:]
rank = int(os.environ["RANK"])
from paceline.health.failure import describe_error
from paceline.run.notes import note_process, write_failure
from paceline.run.processes import end_with_parent

end_with_parent(os.getppid())
note_process(folder, rank)
(folder / f"pid-{os.getpid()}").touch()

def is_over(other):
    note = folder / "logs" / f"rank-{other}.pid"
    if not note.exists() or not note.read_text():
        return False
    import psutil
    pid = int(note.read_text().split()[0])
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

def act(deed, *details):
    if deed == "raise":
        write_failure(folder, describe_error(rank, ValueError("bad pixel")))
        os._exit(1)
    if deed == "lose":  # the connection, as soon as rank 1 is gone
        from paceline.errors import LostRankError
        while not is_over(1):
            time.sleep(0.01)
        write_failure(folder, describe_error(rank, LostRankError("rank 1 is gone")))
        os._exit(1)
    if deed == "refuse":
        write_failure(folder, describe_error(rank, ValueError("asked for too much"), is_refusal=True))
        os._exit(2)
    if deed == "kill":
        os.kill(os.getpid(), getattr(signal, details[0]))
    if deed == "begin":  # an attempt, as records tell
        from paceline.records.records import RunRecord, to_line
        run = {name: "" if "str" in str(kind) else 1 for name, kind in RunRecord.__annotations__.items()}
        with (folder / "records" / f"rank-{rank}.jsonl").open("a") as file:
            file.write(to_line(RunRecord(**run | {"time": time.time()})))
        act(*details)
    if deed == "leave":
        print("so long", file=sys.stderr, flush=True)
        os._exit(int(details[0]))
    if deed == "train":  # a step
        from paceline.run.notes import StepNote
        StepNote(folder, rank, 0).write(1)
        act(*details)
    if deed == "save":  # as ranks of all hosts do together, and tell so
        from paceline.run.notes import note_preemption
        note_preemption(folder)
        act(*details)
    if deed == "signal":  # the launcher
        os.kill(int(os.environ["LAUNCHER"]), getattr(signal, details[0]))
        time.sleep(600)
    if deed == "breed":  # a child that is left behind
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / f"pid-{child.pid}").touch()
        act(*details)
    if deed == "show":
        print(os.environ[details[0]], flush=True)
        (folder / f"shown-{rank}").write_text(os.environ[details[0]])
    if deed == "wait":
        time.sleep(600)

act(*plot[rank].split(":"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    for part in ("records", "logs"):
        (path / part).mkdir(parents=True)
    return path


@pytest.fixture
def launch(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Launches a rank for each deed, and checks that nothing is left of them, in this process or elsewhere."""
    for name in ("deeds", "signals"):
        (tmp_path / f"{name}.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))  # the parent of ranks is the server that forks them

    def run(*deeds: str, **settings: Any) -> None:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        environment, disabled = dict(os.environ), logging.root.manager.disable
        # Ranks are forked, but for those that send a signal: they would send it while the launcher still starts them.
        module = "signals" if any("signal" in deed for deed in deeds) else "deeds"
        try:
            with launching(folder, LocalRanks(ranks=len(deeds), **settings)) as launcher:
                launcher.start([module, str(folder), *deeds])
        finally:
            pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
            assert pids
            wait_until_gone(pids)
            assert noted_processes(folder) == {}
            assert {number: signal.getsignal(number) for number in handlers} == handlers
            assert logging.root.manager.disable == disabled
            ours = {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG", "PYTHONUNBUFFERED"}
            ours |= {"NCCL_SOCKET_IFNAME", "PACELINE_SECRET_FILE"}
            ours |= set(settings.get("variables", ()))
            assert {name: os.environ.get(name) for name in ours} == {name: environment.get(name) for name in ours}
            gc.collect()

    return run


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("deeds", "message"),
    [
        pytest.param(("wait", "raise"), "rank 1 failed: ValueError: bad pixel", marks=pytest.mark.exhaustive),
        (("lose", "raise"), "rank 1 failed: ValueError: bad pixel"),
        (("lose", "kill:SIGKILL", "wait"), "rank 1 was killed by SIGKILL"),
        pytest.param(
            *(("wait", "kill:SIGTERM"), "rank 1 was ended by SIGTERM, which did not come from here"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *(("lose", "kill:SIGTERM"), "rank 1 was ended by SIGTERM, which did not come from here"),
            marks=pytest.mark.exhaustive,
        ),
        (("lose", "leave:7"), "rank 1 left with exit code 7 and no error\n\nso long\n"),
    ],
)
def test_the_message_names_the_rank_that_began_it(
    launch: Launch, folder: Path, deeds: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError) as raised:
        launch(*deeds)
    assert str(raised.value).startswith(message)
    assert str(raised.value).splitlines()[-1] == f"  its log is {folder}/logs/rank-{message[5]}.log"
    assert capfd.readouterr() == ("", "")  # the agent says nothing


def test_the_attempts_of_all_ranks_get_an_end_with_the_cause(launch: Launch, folder: Path) -> None:
    """Also of the one that left as if all were well, which its records tell."""
    with pytest.raises(LaunchError, match=r"^rank 1 left with exit code 0 and no error\n"):
        launch("begin:lose", "begin:leave:0")
    for rank in range(2):
        run, end = read_records(folder / "records" / f"rank-{rank}.jsonl")
        assert isinstance(run, RunRecord)
        assert isinstance(end, EndRecord)
        assert (end.status, end.message) == ("failed", "rank 1 left with exit code 0 and no error")


def test_what_a_rank_printed_before_it_had_a_log_is_in_its_log(launch: Launch, folder: Path) -> None:
    with pytest.raises(LaunchError):
        launch("wait", "leave:7")
    assert (folder / "logs" / "rank-1.log").read_text() == "so long\n"


def test_what_is_refused_is_an_error_of_usage_and_leaves_no_trace(launch: Launch, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^ValueError: asked for too much$"):
        launch("lose", "refuse")
    assert list(folder.glob("logs/*.json")) == []


def test_a_rank_that_nccl_aborts_is_not_to_blame_and_its_launcher_is_not_sure(tmp_path: Path) -> None:
    """Rank 1 is killed on its host; on the other one NCCL aborts rank 0."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("[rank0] watchdog: ncclRemoteError: A call failed\n")
    for rank, number, is_sure in ((1, signal.SIGKILL, True), (0, signal.SIGABRT, False)):
        launcher = Launcher(tmp_path, LocalRanks(ranks=1), ranks=range(rank, rank + 1))
        error: Any = SimpleNamespace(failures={rank: SimpleNamespace(exitcode=-number)})
        diagnosis = diagnose(launcher._failures(error, tmp_path), tmp_path)
        assert diagnosis.cause.rank == rank
        assert FailedAttempt.of(diagnosis, {}).is_sure is is_sure


def test_children_of_a_killed_rank_go_with_it(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
        launch("breed:wait", "breed:kill:SIGKILL")


@contextlib.contextmanager
def answered(number: signal.Signals, how: signal.Handlers) -> Iterator[None]:
    """Has this process answer a signal in another way for a while."""
    before = signal.signal(number, how)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", pytest.param("SIGTERM", marks=pytest.mark.exhaustive)])
def test_a_signal_to_the_launcher_ends_all_ranks(launch: Launch, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        answered(signal.SIGHUP, signal.SIG_DFL),  # the tests themselves may run with nohup
        pytest.raises(RunStoppedError, match=f"ended by {name}") as raised,
    ):
        launch("breed:wait", f"signal:{name}")
    assert raised.value.code == 128 + getattr(signal, name)
    assert capfd.readouterr() == ("", "")


def test_ranks_that_were_asked_to_leave_are_not_started_again(launch: Launch, folder: Path) -> None:
    with pytest.raises(RunStoppedError, match="ended by SIGTERM"):
        launch("train:signal:SIGTERM")
    assert len(list(folder.glob("pid-*"))) == 1  # start


@pytest.mark.parametrize(
    ("deed", "message"),
    [("signal:SIGTERM", "no step was trained yet"), ("train:save:signal:SIGUSR1", "the state is saved")],
)
def test_a_request_for_room_that_finds_nothing_to_save_is_a_preemption(
    launch: Launch, folder: Path, deed: str, message: str
) -> None:
    """A scheduler then starts the run again: nothing is lost. On several hosts others may have saved before."""
    with pytest.raises(RunPreemptedError, match=message):
        launch(deed)
    assert not list(folder.glob("logs/*.error.json"))


@pytest.mark.parametrize("moment", ["usable_cores", "loopback_interface", "forget_attempt", "Watch"])
def test_a_signal_before_the_ranks_ends_the_run_too(folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    where = notes if hasattr(notes, moment) else supervise
    real = getattr(where, moment)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(where, moment, interrupted)
    before = signal.getsignal(signal.SIGINT)
    asked = LocalRanks(ranks=1, watch=WatchPolicy(limits=HangLimits()))
    with pytest.raises(RunStoppedError, match="ended by SIGINT"), launching(folder, asked) as launcher:
        launcher.start(["no_such_module"])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_is_ignored_stays_so(launch: Launch) -> None:
    """With nohup, a run outlives its terminal."""
    with answered(signal.SIGHUP, signal.SIG_IGN), pytest.raises(RunStoppedError, match="ended by SIGTERM"):
        launch("signal:SIGHUP", "train:signal:SIGTERM")


def test_ranks_get_the_threads_that_were_asked_for(launch: Launch, folder: Path) -> None:
    launch(*["show:OMP_NUM_THREADS"] * 2, threads=3)
    assert [(folder / f"shown-{rank}").read_text() for rank in range(2)] == ["3", "3"]


def test_ranks_get_the_variables_that_they_are_given(launch: Launch, folder: Path) -> None:
    variables = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_P2P_LEVEL": "NVL"}
    launch("show:GLOO_SOCKET_IFNAME", "show:NCCL_P2P_LEVEL", variables=variables)
    assert [(folder / f"shown-{rank}").read_text() for rank in range(2)] == ["eth7", "NVL"]


def test_failures_of_an_earlier_attempt_are_forgotten(launch: Launch, folder: Path) -> None:
    with pytest.raises(LaunchError):
        launch("raise")
    launch("show:RANK")
    assert list(folder.glob("logs/*.json")) == []
