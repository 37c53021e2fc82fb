"""Runs that fail on real ranks: one message with rank and cause, a code, records with an end, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import list_checkpoints
from paceline.records.records import EndRecord, Record

pytestmark = [
    # torch leaves the files of redirected output to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.timeout(600),  # a machine under load takes its time to start processes
]

Call = Callable[..., Any]
Ends = Callable[[Path], list[Record]]
AllGone = Callable[[], list[int]]
NOISE = ("elastic", "W1", "E1", "destroy_process_group", "resource_tracker", "Warning", "GLHF", "\x1b")


def check_message(err: str) -> None:
    """No words but ours."""
    assert err.startswith("paceline: ")
    assert [noise for noise in NOISE if noise in err] == []


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("phase", "rank", "arguments"),
    [
        pytest.param("data", 1, ["data.args.plot=data:SIGKILL"], marks=pytest.mark.exhaustive, id="data"),
        pytest.param("backward", 1, ["model.args.plot=backward:SIGKILL", "data.workers=1"], id="backward"),
        pytest.param(
            "optimizer",
            1,
            ["optim.kind=user_code:Optimizer", "optim.args.plot=optimizer:SIGKILL"],
            marks=pytest.mark.exhaustive,
            id="optimizer",
        ),
        pytest.param(
            "checkpoint", 0, ["optim.kind=user_code:Optimizer", "optim.args.plot=checkpoint:SIGKILL"], id="checkpoint"
        ),
    ],
)
def test_a_rank_that_is_killed_in_any_phase_is_named(
    project: Path, call: Call, ends: Ends, all_gone: AllGone, phase: str, rank: int, arguments: list[str]
) -> None:
    called = call("train", "tiny.yaml", *arguments)
    assert called.code == 1
    check_message(called.err)
    assert called.err.splitlines()[0] == f"paceline: rank {rank} was killed by SIGKILL"
    assert called.err.splitlines()[1].startswith(f"  it was in phase {phase}, ")
    assert called.err.splitlines()[-1] == f"  its log is runs/tiny/logs/rank-{rank}.log"
    assert "failed" not in called.out
    assert len(all_gone()) >= 2
    found = ends(project / "runs" / "tiny")
    assert len(found) == 2
    for end in found:
        assert isinstance(end, EndRecord)
        assert (end.status, end.message) == ("failed", f"rank {rank} was killed by SIGKILL")
    assert list_checkpoints(project / "runs" / "tiny" / "checkpoints") == []  # no half one, either


def test_an_error_of_the_user_is_shown_from_the_users_lines_on(
    project: Path, call: Call, ends: Ends, all_gone: AllGone
) -> None:
    called = call(
        "train", "tiny.yaml", "model.args.plot=evaluation:raise", "train.eval_every=2", "checkpoint.every_steps=1"
    )
    assert called.code == 1
    check_message(called.err)
    lines = called.err.splitlines()
    assert lines[0] == "paceline: rank 1 failed: ValueError: a mistake of the user"
    assert lines[2] == "Traceback (most recent call last):"
    files = [line.split('"')[1] for line in lines if line.startswith("  File")]
    assert files == [str(project / "user_code.py")] * 2
    assert lines[-2:] == [
        "  its log is runs/tiny/logs/rank-1.log",
        "  to go on from step 1:  paceline train runs/tiny/config.yaml --resume auto",
    ]
    assert "Traceback" in (project / "runs" / "tiny" / "logs" / "rank-1.log").read_text()
    assert "step 1/3" in called.out or "step 2/3" in called.out  # the newest one that was there when it looked
    steps = [end.step for end in ends(project / "runs" / "tiny") if isinstance(end, EndRecord)]
    assert steps in ([2, 2], [1, 2])  # rank 0 may be ended before it has written its step 2
    assert len(all_gone()) >= 2

    reported = call("report", "runs/tiny")
    assert reported.code == 0
    assert reported.out.startswith("tiny  failed  rank 1 failed: ValueError: a mistake of the user\n")


def test_what_only_the_ranks_can_find_is_refused_like_the_rest(project: Path, call: Call) -> None:
    called = call("train", "tiny.yaml", "data.args.samples=1", "data.eval_fraction=0.0")
    assert called.code == 2
    assert called.out == ""
    check_message(called.err)
    assert called.err.startswith("paceline: parallel.ranks = 2 is more than the 1 samples of the training set\n")
    assert list((project / "runs").iterdir()) == []  # so the name is free for the next try


def test_a_rank_that_dies_before_it_starts_is_named_with_what_it_said(
    project: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "site").mkdir()
    (project / "site" / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('RANK') == '1':\n    print('no libfoo', file=sys.stderr, flush=True)\n"
        "    os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(project / "site"), prepend=os.pathsep)
    called = call("train", "tiny.yaml", "recovery.warm=false")
    assert called.code == 1
    assert called.err.startswith("paceline: rank 1 left with exit code 3 and no error\n\nno libfoo\n")
    assert (project / "runs" / "tiny" / "logs" / "rank-1.log").read_text() == "no libfoo\n"


# The launcher as a process of its own, as signals go to it.


Start = Callable[..., "subprocess.Popen[str]"]
# On a busy machine too, Ctrl-C unwinds it: it does not leave at once after a while.
PATIENT = "# forked\nimport paceline.cli.main as m\nm._PATIENCE_S = 60.0\nm.main()"


@pytest.fixture
def start(project: Path) -> Iterator[Start]:
    """Starts a launcher of a run that does not end by itself; returns when ranks and loader workers are at work."""
    started: list[subprocess.Popen[str]] = []

    def run(ranks: int) -> subprocess.Popen[str]:
        changes = ["train.steps=1000000", "data.workers=1", f"parallel.ranks={ranks}"]
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT, "train", "tiny.yaml", *changes],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "RANK"},
        )
        started.append(process)
        records = [project / "runs" / "tiny" / "records" / f"rank-{rank}.jsonl" for rank in range(ranks)]
        deadline = time.monotonic() + 500
        while not all(path.exists() and '"type":"step"' in path.read_text() for path in records):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_everything(project: Path, start: Start, ends: Ends, all_gone: AllGone) -> None:
    launcher = start(ranks=2)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=500)
    assert launcher.returncode == 130
    assert err == "paceline: ended by SIGINT (Ctrl-C); no rank is left\n"
    assert "\x1b" not in out
    assert len(all_gone()) >= 4
    for end in ends(project / "runs" / "tiny"):
        assert isinstance(end, EndRecord)
        assert (end.status, end.message) == ("stopped", "ended by SIGINT")
        assert end.step > 0


@pytest.mark.some(1)
def test_a_launcher_that_is_killed_takes_ranks_and_loader_workers_along(
    start: Start, call: Call, all_gone: AllGone
) -> None:
    launcher = start(ranks=1)
    called = call("train", "tiny.yaml", "--force")
    assert called.code == 2
    assert called.err.startswith(f"paceline: a run is going on in runs/tiny: process {launcher.pid} on ")
    launcher.kill()
    assert len(all_gone()) >= 2
