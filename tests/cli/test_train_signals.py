"""Real runs that are signalled and killed from outside: what they save, how they leave, what they leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.checkpoint import list_checkpoints
from paceline.health.exit_codes import DONE, PREEMPTED
from paceline.records.records import EndRecord, EventRecord, StepRecord, read_records

pytestmark = pytest.mark.timeout(900)

Live = Callable[..., Any]
AllGone = Callable[[], list[int]]


@pytest.mark.soak
def test_a_signal_to_the_launcher_saves_on_all_ranks_after_the_same_step(
    project: Path, live: Live, all_gone: AllGone
) -> None:
    run = live()
    run.ranks(step=20)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == PREEMPTED
    ends = last_records(project)
    assert len(ends) == 2
    assert_saved(project, ends)
    assert "preempted: the state is saved" in run.error()
    assert len(all_gone()) >= 2


@pytest.mark.soak
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_each_signal_to_the_launcher_or_any_rank_saves(
    project: Path, live: Live, all_gone: AllGone, name: str, rank: int | None
) -> None:
    run = live()
    ranks = run.ranks(step=20)
    os.kill(run.process.pid if rank is None else ranks[rank], getattr(signal, name))
    assert run.wait() == PREEMPTED
    assert_saved(project, last_records(project))
    all_gone()


@pytest.mark.soak
def test_a_signal_to_the_process_of_virtual_ranks_saves(project: Path, live: Live, all_gone: AllGone) -> None:
    run = live("comm.backend=virtual")
    run.ranks(step=20)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == PREEMPTED
    ends = last_records(project)
    assert len(ends) == 2
    assert_saved(project, ends)
    all_gone()


@pytest.mark.soak
@pytest.mark.parametrize("to", ["rank", "torchrun"])
def test_a_signal_under_torchrun_saves_on_all_ranks(project: Path, live: Live, all_gone: AllGone, to: str) -> None:
    run = live(by=[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    ranks = run.ranks(step=20)
    if to == "rank":
        os.kill(ranks[1], signal.SIGUSR1)
    else:
        run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1  # torchrun's own
    assert_saved(project, last_records(project))
    assert "the state is saved" in run.error()
    all_gone()


@pytest.mark.soak
@pytest.mark.parametrize("how", ["second signal", "grace"])
def test_a_rank_that_cannot_save_ends_at_once_when_it_must(
    project: Path, live: Live, all_gone: AllGone, how: str
) -> None:
    run = live(f"recovery.grace_s={1 if how == 'grace' else 1000}", "recovery.max_restarts=3")
    ranks = run.ranks(step=20)
    os.kill(ranks[1], signal.SIGSTOP)  # so that no step, and no save, is ever done
    run.process.send_signal(signal.SIGTERM)
    if how == "second signal":
        ask_again(run)
    assert run.wait() == 128 + signal.SIGTERM
    assert newest_step(project) >= 20
    all_gone()


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["launcher", "launcher and a rank"])
def test_a_killed_run_goes_on_at_another_number_of_ranks(
    project: Path, live: Live, all_gone: AllGone, victim: str
) -> None:
    run = live()
    ranks = run.ranks(step=20)
    children = psutil.Process(run.process.pid).children(recursive=True)
    for pid in [run.process.pid, *(ranks[1:] if victim != "launcher" else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    psutil.wait_procs(children, timeout=120)
    assert not [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    all_gone()
    saved = newest_step(project)
    again = live("--resume", "auto", "parallel.ranks=1", f"train.steps={saved + 5}")
    assert again.process.wait(600) == DONE
    second = last_attempt(project, 0)
    resume = next(each for each in second if isinstance(each, EventRecord) and each.name == "resume")
    assert resume.step == saved
    assert [each.step for each in second if isinstance(each, StepRecord)] == [*range(saved + 1, saved + 6)]
    all_gone()


@pytest.mark.soak
def test_a_folder_that_is_removed_under_a_run_ends_it_and_is_told(project: Path, live: Live, all_gone: AllGone) -> None:
    run = live("recovery.max_restarts=3")
    run.ranks(step=20)
    shutil.rmtree(project / "runs" / "tiny", ignore_errors=True)
    assert run.wait() == 1
    assert "tiny was removed, or moved away, while the run was going on" in run.error()
    all_gone()


def ask_again(run: Any) -> None:
    """Signals a launcher again; it takes what comes within five seconds of the first for the same request."""
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(5.5)
    run.process.send_signal(signal.SIGTERM)


def last_records(project: Path) -> list[EndRecord]:
    paths = sorted((project / "runs" / "tiny" / "records").iterdir())
    ends = [list(read_records(path))[-1] for path in paths]
    return [end for end in ends if isinstance(end, EndRecord)]


def last_attempt(project: Path, rank: int) -> list[Any]:
    records = list(read_records(project / "runs" / "tiny" / "records" / f"rank-{rank}.jsonl"))
    starts = [place for place, each in enumerate(records) if type(each).__name__ == "RunRecord"]
    return records[starts[-1] :]


def newest_step(project: Path) -> int:
    return int(list_checkpoints(project / "runs" / "tiny" / "checkpoints")[-1].name.removeprefix("step-"))


def assert_saved(project: Path, ends: list[EndRecord]) -> None:
    assert {end.status for end in ends} == {"stopped"}
    assert {end.step for end in ends} == {newest_step(project)}
