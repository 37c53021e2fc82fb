"""A rank of a launcher that somebody else started, in this process: what it sets, claims, shows and leaves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import Config, load_config
from paceline.config.sections import SnapshotConfig
from paceline.errors import UsageError
from paceline.records.records import EventRecord, read_records
from paceline.run import processes, worker
from paceline.run.location import RunOptions
from paceline.run.processes import loopback_interface
from paceline.run.worker import run_under_launcher


@pytest.fixture
def config(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """The config of a run on one rank; variables and signal handlers are as before, afterwards."""
    others = ("TORCHELASTIC", "GLOO_", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    monkeypatch.setattr(os, "environ", environment)  # a launcher of one rank needs to say nothing
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield load_config(project / "tiny.yaml", ["parallel.ranks=1", f"comm.interface={loopback_interface()}"])
    for number, handler in before.items():
        signal.signal(number, handler)
    sys.modules.pop("user_code", None)


def first_step(folder: Path) -> EventRecord:
    records = read_records(folder / "records" / "rank-0.jsonl")
    return next(each for each in records if isinstance(each, EventRecord) and each.name == "first_step")


@pytest.mark.timeout(120)
def test_a_rank_of_a_launcher_trains_and_returns_the_result(
    config: Config, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched: list[int] = []
    monkeypatch.setattr(processes, "end_with_parent", watched.append)
    result = run_under_launcher(config, RunOptions())
    assert result is not None
    assert (result.folder, result.last_step, result.summary.status) == (Path("runs/tiny"), 3, "done")
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback_interface()  # what the config says is set before it connects
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert callable(signal.getsignal(signal.SIGTERM))
    assert watched == []
    shown = capsys.readouterr().out
    assert "on 1 rank" in shown
    assert "step 3/3" in shown
    parts = first_step(project / "runs" / "tiny").detail
    assert set(parts) >= {"seconds", "processes", "joining", "data", "model", "step"}
    assert parts["seconds"] == pytest.approx(sum(value for name, value in parts.items() if name != "seconds"), abs=0.01)

    os.environ |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    longer = config.with_values("train", steps=4).with_values("monitor", sample_s=None)
    again = run_under_launcher(longer, RunOptions(resume="auto", is_quiet=True))
    assert again is not None
    assert (again.folder, again.last_step) == (Path("runs/tiny"), 4)
    assert watched == [os.getppid()]
    assert capsys.readouterr().out == ""
    events = [
        each
        for each in read_records(project / "runs" / "tiny" / "records" / "rank-0.jsonl")
        if isinstance(each, EventRecord)
    ]
    assert [each.detail for each in events if each.name == "restart"] == [
        {"number": 1, "of": 3, "reason": "restarted by the agent"}
    ]


def test_virtual_ranks_are_no_ranks_of_a_launcher(config: Config) -> None:
    with pytest.raises(UsageError, match=r"comm.backend = virtual under a launcher of processes"):
        run_under_launcher(config.with_values("comm", backend="virtual"), RunOptions())
    keeps = config.checkpoint.model_copy(update={"memory": SnapshotConfig(every_steps=10)})
    with pytest.raises(UsageError, match=r"checkpoint.memory under a launcher of processes"):
        run_under_launcher(config.model_copy(update={"checkpoint": keeps}), RunOptions())
    assert not Path("runs").exists()


def test_a_rank_that_fails_says_so_and_leaves(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class LeftError(BaseException):
        """In place of the end of this process."""

    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise LeftError

    monkeypatch.setattr(worker.processes, "leave_process", leave)
    bad = config.with_values("model", args={"plot": "factory:raise"})
    with pytest.raises(LeftError):
        run_under_launcher(bad, RunOptions(is_quiet=True))
    assert codes == [1]
    assert (
        "rank 0 failed: model.factory = 'user_code:net' raised ValueError: a mistake of the user"
        in capsys.readouterr().err
    )
    refused = config.model_copy(update={"name": "other"}).with_values("data", args={"samples": 0})
    with pytest.raises(LeftError):
        run_under_launcher(refused, RunOptions(is_quiet=True))
    assert codes == [1, 2]
    assert not Path("runs/other").exists()  # nothing is left of what was refused
    assert Path("runs/tiny").exists()
