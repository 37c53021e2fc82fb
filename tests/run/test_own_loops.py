"""Loops of the user's own, in this process: how they are joined, what their ledger is told, and their last words."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.ledger import file
from paceline.comm.ledger.file import PID, ledger_path
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import LedgerCommunicator
from paceline.errors import (
    CollectiveMismatchError,
    CommunicationError,
    ConfigError,
    LateRankError,
    LostRankError,
    UsageError,
)
from paceline.health.verdict import HangLimits, HangVerdict
from paceline.run import own_loop
from paceline.run.own_loop import OwnLoop, WatchedCommunicator, connect, setup_distributed, watch_ranks
from paceline.run.seen_ranks import stack_path
from paceline.run.watch import Watch, WatchPolicy
from paceline.run.whereami import Surroundings

# How it is joined


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    made: dict[str, str] = {"HOME": "/"}
    monkeypatch.setattr(os, "environ", made)
    monkeypatch.setattr("paceline.comm.torch_dist.is_connected", lambda: False)
    return made


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), ("0", 2), (0, 2.0), (True, 2), (None, None)])
def test_a_rank_that_cannot_be_is_refused(environment: dict[str, str], rank: Any, world: Any) -> None:
    with pytest.raises(UsageError) as refused:
        setup_distributed(rank, world)
    assert str(refused.value) == (
        f"setup_distributed got rank = {rank!r} and world_size = {world!r}\n"
        "  ranks are numbered from 0 to world_size - 1\n  pass what spawn gives each process, and how many they are"
    )
    assert set(environment) == {"HOME", "PYTEST_CURRENT_TEST"}


def test_processes_of_a_script_meet_where_they_are_told(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_loop, "connect", lambda backend: backend)
    assert setup_distributed(1, 2, "gloo") == "gloo"
    assert environment == {
        "HOME": "/",
        "PYTEST_CURRENT_TEST": environment["PYTEST_CURRENT_TEST"],
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    environment |= {"MASTER_PORT": "7", "MASTER_ADDR": "h", "LOCAL_RANK": "0"}
    setup_distributed(1, 2)
    assert (environment["MASTER_PORT"], environment["MASTER_ADDR"], environment["LOCAL_RANK"]) == ("7", "h", "0")
    environment["RANK"] = "0"
    with pytest.raises(UsageError) as refused:
        setup_distributed(1, 2)
    assert "rank = 1 and world_size = 2, and a launcher has set RANK=0\n" in str(refused.value)
    environment["WORLD_SIZE"] = "4"
    with pytest.raises(UsageError, match="has set RANK=0, WORLD_SIZE=4\n"):
        setup_distributed(1, 2)


def test_a_loop_joins_its_launcher_once(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    host = Surroundings(launcher="test", kind="host", number=1, count=2, address="h", port=7)
    found: list[Surroundings | Exception] = [host]

    def recognise(_: object) -> Surroundings:
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    monkeypatch.setattr(own_loop, "recognise", recognise)
    own_loop._join_launcher()
    assert environment["RANK"] == "1"
    for ranks in (1, 2):
        found[0] = Surroundings(launcher="test", kind="host", number=1, count=2, address="h", port=7, host_ranks=ranks)
        if ranks == 1:
            own_loop._join_launcher()
            continue
        with pytest.raises(CommunicationError, match="has 2 ranks on each host, and this process is one"):
            own_loop._join_launcher()
    found[0] = ConfigError([])
    with pytest.raises(CommunicationError):
        own_loop._join_launcher()
    monkeypatch.setattr("paceline.comm.torch_dist.is_connected", lambda: True)
    own_loop._join_launcher()  # it is asked no more


def test_one_rank_is_not_watched(environment: dict[str, str], tmp_path: Path) -> None:
    comm = connect("gloo", device="cpu")
    assert comm.size == 1
    assert not isinstance(comm, LedgerCommunicator)
    assert "RANK" not in environment
    (tmp_path / "health").mkdir()
    ledger_path(tmp_path, 0).write_text("of an earlier run")
    watched = watch_ranks(SoloCommunicator(torch.device("cpu")), tmp_path, hang_s=3.0)
    assert isinstance(watched, WatchedCommunicator)
    assert ledger_path(tmp_path, 0).stat().st_size == file.FILE_BYTES
    assert (tmp_path / "logs").is_dir()
    plain = LedgerCommunicator(SoloCommunicator(torch.device("cpu")), Ledger(rank=0, world=1))
    assert watch_ranks(plain, tmp_path / "other") is plain  # its launcher watches
    assert not (tmp_path / "other").exists()


def test_limits_are_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, Path, WatchPolicy]] = []
    monkeypatch.setattr(own_loop, "_follow", lambda _, folder, told, policy: seen.append((folder, told, policy)))
    for limits in ({"hang_s": 7.0}, {"hang_s": 7.0, "hang_setup_s": 9.0}, {}):
        watch_ranks(SoloCommunicator(torch.device("cpu")), tmp_path, **limits)
    found = [(policy.limits.step_s, policy.limits.setup_s) for _, _, policy in seen]
    assert found == [(7.0, 7.0), (7.0, 9.0), (300.0, 300.0)]
    assert {each[:2] for each in seen} == {(tmp_path, tmp_path)}


# The folder of ledgers


def test_a_private_folder_is_this_users_alone(tmp_path: Path) -> None:
    above = tmp_path / "paceline-0"
    own_loop._make_private(above / "1")
    assert [path.stat().st_mode & 0o777 for path in (above, above / "1")] == [0o700, 0o700]
    own_loop._make_private(above / "1")
    above.chmod(0o750)
    with pytest.raises(PermissionError, match="must belong to this user alone"):
        own_loop._make_private(above / "2")
    above.chmod(0o700)
    (tmp_path / "link").symlink_to(above)
    with pytest.raises(PermissionError, match="must belong to this user alone"):
        own_loop._make_private(tmp_path / "link" / "2")


def test_what_killed_ranks_left_is_removed(tmp_path: Path) -> None:
    above = tmp_path / "paceline-0"
    own_loop._make_private(above / "mine")
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    pids = {"gone": (gone.pid, gone.pid), "living": (gone.pid, os.getpid())}
    for name, processes in pids.items():
        for rank, pid in enumerate(processes):
            Ledger(rank=rank, world=2, path=ledger_path(above / name, rank)).cells[PID] = pid
    (above / "half" / "health").mkdir(parents=True)
    ledger_path(above / "half", 0).write_text("not complete")
    (above / "empty").mkdir()
    own_loop._make_private(above / "mine")
    assert sorted(path.name for path in above.iterdir()) == ["empty", "half", "living", "mine"]


# A loop


class Loop:
    """The loop of rank 0 of two, with both ledgers on this machine; the other rank is whatever a test makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder / "ledgers", folder / "told"
        self.ledgers = [
            Ledger(rank=rank, world=2, path=ledger_path(self.folder, rank), is_own_loop=rank == 0) for rank in range(2)
        ]
        for ledger in self.ledgers:
            ledger.add_group((0, 1))
            ledger.enter("forward")
        policy = WatchPolicy(limits=HangLimits(step_s=5.0, setup_s=50.0))
        self.watch = Watch(self.folder, {"a": [0, 1]}, policy, host="a", ledger=self.ledgers[0], told=self.told)
        self.loop = OwnLoop(self.ledgers[0], self.watch, is_temporary=True)

    def issue(self, rank: int, number: int, *, elements: int = 4, waits: bool = True) -> None:
        ledger = self.ledgers[rank]
        call = ledger.add_call(("all_reduce", (elements,), torch.float32, "sum", None))
        at = file.RECORDS_AT + number % file.NUM_RECORDS * file.RECORD_BYTES
        file.PUT_RECORD(ledger.buffer, at, number, number - 1, 0, 2, call, 0.5, 0)
        ledger.cells[file.ISSUED], ledger.cells[file.WAITING] = number, number if waits else 0
        ledger.counts[0] = number


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr("paceline.run.seen_ranks.ask_for_stacks", lambda _: {})
    made = Loop(tmp_path)
    yield made
    made.loop.close()
    assert sys.excepthook != made.loop._explain


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on only while somebody sleeps; returns for how long each time."""
    found: list[float] = []
    monkeypatch.setattr("time.monotonic", lambda: 1000.0 + sum(found))
    monkeypatch.setattr("time.sleep", lambda seconds: found.append(seconds))
    return found


MISSING = "rank 1 is missing from all_reduce(sum, float32 [4]), operation 0 of group [0, 1]: it is in phase forward "


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("error", "least"), [(LateRankError("late"), 0.0), (LostRankError("lost"), 0.5)])
def test_a_rank_that_waits_in_vain_says_for_whom(
    loop: Loop, slept: list[float], error: CommunicationError, least: float
) -> None:
    loop.issue(0, 1)
    verdict = loop.loop._judge(error)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("missing", (1,))
    assert verdict.sentence.startswith(MISSING)
    assert sum(slept) == pytest.approx(least, abs=0.011)  # a process that is killed closes its connections first
    assert set(slept) <= {0.01}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("error", [LateRankError("late"), LostRankError("lost"), CommunicationError("something else")])
@pytest.mark.parametrize("state", ["failed", "dead", "finished"])
def test_a_rank_that_has_gone_is_looked_at_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float], error: CommunicationError, state: str
) -> None:
    monkeypatch.setattr("paceline.run.seen_ranks.ask_for_stacks", lambda _: {})
    made = Loop(tmp_path)
    made.issue(0, 1)
    if state == "failed":
        made.ledgers[1].fail()
    elif state == "finished":
        made.ledgers[1].finish()
    else:
        with subprocess.Popen(["true"]) as gone:
            while gone.poll() is None:
                pass
        made.ledgers[1].cells[PID] = gone.pid
    verdict = made.loop._judge(error)
    made.loop.close()
    assert slept == []
    if state == "finished" and type(error) is not CommunicationError:
        assert verdict is not None
        assert verdict.kind == "left"
    else:
        assert verdict is None  # whoever failed or died has said why


@pytest.mark.timeout(20)
def test_operations_that_differ_explain_any_error(loop: Loop, slept: list[float]) -> None:
    loop.issue(0, 1)
    loop.issue(1, 1, elements=5)
    verdict = loop.loop._judge(CommunicationError("something"))
    assert verdict is not None
    assert verdict.kind == "mismatch"
    loop.ledgers[0].fail()  # as it is by then
    assert loop.loop._judge(LostRankError("lost")) is not None
    assert slept == []


def test_last_words_are_a_verdict_and_the_error(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[object] = []
    monkeypatch.setattr(loop.loop, "_hook_before", lambda *error: said.append(error[1]))
    stack_path(loop.folder, os.getpid()).touch()
    loop.issue(0, 1)
    error = LateRankError("late")
    loop.loop._explain(LateRankError, error, None)
    assert said == [error]
    assert (loop.told / "verdict.txt").read_text().startswith(MISSING)
    assert capsys.readouterr().err.startswith(f"paceline: {MISSING}")
    assert loop.ledgers[0].cells[file.IS_FINISHED] == file.FAILED
    assert not ledger_path(loop.folder, 0).exists()
    assert not stack_path(loop.folder, os.getpid()).exists()
    assert ledger_path(loop.folder, 1).exists()  # the other rank's
    assert loop.watch._is_over.is_set()
    other = ValueError("later")
    loop.loop._explain(ValueError, other, None)
    assert said == [error, other]
    loop.loop._is_open = True


def test_an_error_of_another_kind_has_no_verdict(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.loop, "_hook_before", lambda *_: None)
    loop.issue(0, 1)
    loop.loop._explain(ValueError, ValueError("own"), None)
    assert not loop.told.exists()
    loop.loop._is_open = True


def test_the_first_optimizer_counts_the_steps(loop: Loop) -> None:
    ledger = loop.ledgers[0]
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    steps, phases = [], []
    for optimizer in (first, second, first, second):
        ledger.counts[0] += 1
        optimizer.step()
        steps.append(ledger.cells[file.STEP])
        phases.append(ledger.reader().pulse().phase)
    assert steps == [1, 1, 2, 2]
    assert phases == ["data"] * 4
    assert ledger.reader().update_at(4) is not None
    ledger.is_own_loop = False  # an engine tells the ledger by itself
    ledger.enter("backward")
    first.step()
    assert (ledger.cells[file.STEP], ledger.reader().pulse().phase) == (2, "backward")
    ledger.is_own_loop = True


def test_only_optimizers_of_what_ranks_train_together_are_compared(loop: Loop) -> None:
    trained, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    loop.ledgers[0].trained.add([trained])
    for parameter, is_noted in ((other, False), (trained, True)):
        loop.ledgers[0].counts[0] += 1
        torch.optim.SGD([parameter], lr=0.1).step()
        assert loop.ledgers[0].cells[file.STEP] == is_noted  # nor are others steps, though they come first
        assert (loop.ledgers[0].reader().update_at(loop.ledgers[0].counts[0]) is not None) is is_noted


def test_a_difference_at_the_end_is_told_and_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Loop(tmp_path)
    found = HangVerdict(kind="mismatch", ranks=(0,), sentence="rank 0 left out an update")
    monkeypatch.setattr(made.loop._pairing, "finish", lambda: found)
    with pytest.raises(CollectiveMismatchError, match="rank 0 left out an update"):
        made.loop.close()
    told = (made.told / "verdict.txt").read_text()
    assert told.startswith("rank 0 left out an update\n  rank 0, step 0, phase forward: ")
    assert made.ledgers[0].cells[file.IS_FINISHED] == file.FINISHED
    assert not ledger_path(made.folder, 0).exists()
    made.loop.close()  # once is enough


def test_the_last_rank_takes_the_folder_along(tmp_path: Path) -> None:
    made = Loop(tmp_path)
    before = made.loop._hook_before
    made.loop.close()
    assert sys.excepthook is before
    assert made.folder.exists()
    second = OwnLoop(made.ledgers[1], made.watch, is_temporary=True)
    second.close()
    assert not made.folder.exists()
    kept = OwnLoop(Ledger(rank=0, world=2, path=ledger_path(tmp_path / "kept", 0)), made.watch, is_temporary=False)
    kept.close()
    assert ledger_path(tmp_path / "kept", 0).exists()
