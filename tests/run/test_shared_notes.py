"""The files that ranks leave for their launcher: what is noted, read, and removed, one by one."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import made_records
import pytest
import torch
from made_records import write_records

from paceline.comm.ledger.file import PID, ledger_path
from paceline.comm.ledger.ledger import Ledger
from paceline.engines.precision import precision_named
from paceline.errors import LaunchError
from paceline.health.diagnosis import Diagnosis, Stop, TrainedSteps
from paceline.health.exit_codes import FAILED, HUNG, NO_PROGRESS, PREEMPTED
from paceline.health.failure import Failure, silent_failure
from paceline.health.verdict import HangVerdict, RankState
from paceline.records.records import EventRecord, read_records
from paceline.run import notes
from paceline.run.records import append_event, compute_dtype

VERDICT = HangVerdict(kind="missing", ranks=(1,), sentence="rank 1 is missing")
HERE = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in ("logs", "health", "records"):
        (tmp_path / part).mkdir()
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Attempts


@pytest.mark.parametrize(
    ("first", "end", "gone"), [(0, None, (0, 1, 2, 10)), (1, 2, (1,)), (1, 3, (1, 2)), (2, None, (2, 10)), (0, 0, ())]
)
def test_an_attempt_removes_what_its_own_ranks_left(
    folder: Path, first: int, end: int | None, gone: tuple[int, ...]
) -> None:
    kinds = ("logs/rank-{}.pid", "logs/rank-{}.step", "logs/rank-{}.error.json", "health/rank-{}.ledger")
    kept = ("logs/rank-{}.log", "records/rank-{}.jsonl")
    for rank in (0, 1, 2, 10):
        for kind in (*kinds, *kept):
            (folder / kind.format(rank)).touch()
    for name in ("verdict.txt", "verdict.json", "health/process-7.stack", "logs/run.log", "logs/preempted"):
        (folder / name).touch()
    notes.forget_attempt(folder, first, end)
    left = [rank for rank in (0, 1, 2, 10) if rank not in gone]
    expected = [kind.format(rank) for rank in left for kind in kinds]
    expected += [kind.format(rank) for rank in (0, 1, 2, 10) for kind in kept]
    assert names(folder) == sorted([*expected, "logs/run.log"])


def test_processes_are_known_by_host_and_launcher(folder: Path) -> None:
    notes.note_process(folder, 3, 77)
    assert (folder / "logs" / "rank-3.pid").read_text() == f"{os.getpid()} {HERE} 77\n"
    notes.note_process(folder, 3)
    assert (folder / "logs" / "rank-3.pid").read_text() == f"{os.getpid()} {HERE}\n"
    texts = {0: f"10 {HERE} 77", 1: f"11 {HERE} 78", 2: "12 elsewhere 77", 4: "14", 5: "", 10: f"20 {HERE} 77"}
    for rank, text in texts.items():
        (folder / "logs" / f"rank-{rank}.pid").write_text(text)
    assert notes.noted_processes(folder) == {0: 10, 1: 11, 3: os.getpid(), 4: 14, 10: 20}
    assert list(notes.noted_processes(folder, 77)) == [0, 3, 4, 10]
    assert notes.noted_processes(folder, 77) == {0: 10, 3: os.getpid(), 4: 14, 10: 20}


def test_steps_are_noted(folder: Path) -> None:
    note = notes.StepNote(folder, 1, 30)
    notes.StepNote(folder, 0, 30)
    (folder / "logs" / "rank-2.step").write_bytes(b"half")
    assert notes.read_progress(folder) == dict.fromkeys((0, 1), TrainedSteps(first_step=30, last_step=30))
    assert not notes.has_trained(folder)
    note.write(31)
    assert notes.read_progress(folder)[1] == TrainedSteps(first_step=30, last_step=31)
    assert (folder / "logs" / "rank-1.step").read_bytes() == (30).to_bytes(8, "little") + (31).to_bytes(8, "little")
    assert notes.has_trained(folder)


def test_a_preemption_is_one_of_this_attempt(folder: Path) -> None:
    assert not notes.was_preempted(folder)
    notes.note_preemption(folder)
    assert notes.was_preempted(folder)
    notes.forget_attempt(folder, 2)  # as the next one begins
    assert not notes.was_preempted(folder)


# Failures and verdicts


def test_a_failure_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(rank=7, cause="raised", message="bad", time=2.5, kind="mistake", blamed=3)
    notes.write_failure(tmp_path / "run", failure)
    assert names(tmp_path) == ["run/logs/rank-7.error.json"]
    text = (tmp_path / "run" / "logs" / "rank-7.error.json").read_text()
    assert json.loads(text)["blamed"] == 3
    assert text.endswith("}\n")
    assert notes.read_failures(tmp_path / "run") == [failure]

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        notes.write_failure(tmp_path / "run", failure)
    assert names(tmp_path) == ["run/logs/rank-7.error.json"]


def test_a_verdict_is_told_in_files_and_logs_as_far_as_the_disk_takes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RankState(rank=0, does="runs", phase="data", step=3, silent_s=1.0, stands_at="loop.py:3 in main")
    told = HangVerdict(kind="missing", ranks=(1,), sentence="rank 1 is missing", states=(state,))
    monkeypatch.setattr("time.time", lambda: 99.0)
    notes.tell_verdict(folder, told, [0, 4])
    text = "rank 1 is missing\n  rank 0, step 3, phase data: runs; stands at loop.py:3 in main\n"
    assert (folder / "verdict.txt").read_text() == text
    values = json.loads((folder / "verdict.json").read_text())
    assert (values["time"], values["host"], values["schema"]) == (99.0, HERE, 1)
    assert HangVerdict.from_json(values) == told
    logs = ["logs/rank-0.log", "logs/rank-4.log", "logs/run.log"]
    assert names(folder) == [*logs, "verdict.json", "verdict.txt"]
    for name in logs:
        assert f" watch ERROR paceline: {text}" in (folder / name).read_text()
    monkeypatch.setattr(notes, "_replace_file", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    notes.tell_verdict(folder, told, [5])
    assert (folder / "logs" / "rank-5.log").is_file()


def test_a_verdict_ends_the_groups_of_ranks_and_not_this_one(folder: Path) -> None:
    ranks = [subprocess.Popen(["sleep", "600"], start_new_session=leads) for leads in (True, False)]
    try:
        notes.end_ranks(folder, VERDICT, {0: ranks[0].pid, 1: ranks[1].pid, 2: os.getpid(), 3: os.getpgrp()})
        assert [rank.wait(30) for rank in ranks] == [-signal.SIGKILL, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failures = notes.read_failures(folder)
    assert [(each.rank, each.kind, each.blamed) for each in failures] == [(rank, "hang", 1) for rank in range(4)]
    notes.end_ranks(folder, VERDICT, {0: ranks[0].pid})  # which is gone


def test_ranks_that_failed_of_different_operations_get_a_verdict(folder: Path) -> None:
    ledgers = [Ledger(rank=rank, world=2, path=ledger_path(folder, rank)) for rank in range(2)]
    for number, ledger in enumerate(ledgers):
        group = ledger.add_group((0, 1))
        place = ledger.add_call(("all_reduce", (4 + number,), torch.float32, "sum", None))
        from paceline.comm.ledger import file

        file.PUT_RECORD(ledger.buffer, file.RECORDS_AT + file.RECORD_BYTES, 1, 0, group, 2, place, 0.5, 3)
        ledger.cells[file.ISSUED] = 1
        ledger.counts[group] = 1
    notes.note_mismatch(folder, range(3))  # of the third nothing is known
    assert (folder / "verdict.txt").read_text().startswith("ranks called the same operation with another shape")
    failures = notes.read_failures(folder)
    assert [(each.rank, each.kind) for each in failures] == [(0, "hang"), (1, "hang")]
    (folder / "verdict.txt").unlink()
    notes.note_mismatch(folder, range(2))  # it is told already
    assert not (folder / "verdict.txt").exists()
    notes.forget(folder, notes.FAILURES)
    notes.note_mismatch(folder, range(1))
    assert notes.read_failures(folder) == []


def test_deaths_are_located_and_errors_are_not(folder: Path) -> None:
    ledger = Ledger(rank=1, world=2, path=ledger_path(folder, 1))
    ledger.count_step()
    ledger.enter("backward")
    Ledger(rank=2, world=2, path=ledger_path(folder, 2))
    raised = Failure(rank=2, cause="raised", message="bad", time=1.0)
    killed, died = silent_failure(1, -signal.SIGKILL), silent_failure(0, 7)
    located, same, unknown = notes.locate_deaths(folder, [killed, raised, died])
    assert located.message.splitlines()[1] == "  it was in phase backward, 1 steps after its start"
    assert (same, unknown) == (raised, died)
    sentence = "rank 1 was killed by SIGKILL in phase backward, 1 steps after its start\n"
    assert (folder / "verdict.txt").read_text() == sentence
    assert names(folder / "logs") == ["run.log"]
    assert ledger.cells[PID] == os.getpid()


# The errors with which a run ends


@pytest.mark.parametrize(
    ("end", "code", "more"),
    [
        (None, FAILED, ""),
        (Stop(), FAILED, ""),
        (Stop(reason="enough"), FAILED, "\n  enough"),
        (Stop(reason="enough", gives_up=True), NO_PROGRESS, "\n  enough"),
    ],
)
def test_a_failed_run_says_why_it_is_not_started_again(end: Stop | None, code: int, more: str) -> None:
    diagnosis = Diagnosis(cause=silent_failure(0, 1), message="rank 0 left", code=FAILED)
    error = notes.RunFailedError(diagnosis, end)
    assert (str(error), error.code, error.diagnosis) == (f"rank 0 left{more}", code, diagnosis)
    hung = Diagnosis(cause=silent_failure(0, HUNG), message="", code=HUNG)
    assert notes.RunFailedError(hung, end).code == HUNG


def test_a_preempted_run_says_whether_it_has_saved() -> None:
    assert str(notes.RunPreemptedError()) == "preempted: the state is saved"
    assert str(notes.RunPreemptedError(is_saved=False)) == "preempted: no step was trained yet"
    assert notes.RunPreemptedError().code == PREEMPTED


def test_a_disk_is_full_only_where_a_rank_was_silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = Failure(rank=0, cause="raised", message="bad", time=1.0)
    for free, is_full in ((2**16 - 1, True), (2**16, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        assert ("is full, so that" in str(notes.explain_failures([silent_failure(1, 1)], folder))) is is_full
        assert "is full" not in str(notes.explain_failures([raised], folder))
        assert "is full" not in str(notes.explain_failures([raised, silent_failure(1, 1)], folder))
    nothing = notes.explain_failures([], folder)
    assert isinstance(nothing, LaunchError)
    assert str(nothing) == f"the ranks ended without a result or an error\n  their logs are in {folder / 'logs'}"


# Records


def test_an_event_is_added_at_the_step_that_a_rank_has_come_to(folder: Path) -> None:
    assert not append_event(folder, 0, "clock", {"ahead_s": 1.0})
    assert not (folder / "records" / "rank-0.jsonl").exists()
    path = write_records(folder, 0, made_records.RUN)
    assert append_event(folder, 0, "clock", {"ahead_s": 1.0})
    notes.StepNote(folder, 0, 3).write(9)
    assert append_event(folder, 0, "clock", {})
    events = [each for each in read_records(path) if isinstance(each, EventRecord)]
    assert [(each.name, each.step, each.detail) for each in events] == [
        ("clock", 0, {"ahead_s": 1.0}),
        ("clock", 9, {}),
    ]


@pytest.mark.parametrize(
    ("name", "device", "precision", "compute"),
    [
        ("fp32", "cpu", "high", "fp32"),
        ("fp32", "cuda", "highest", "fp32"),
        ("fp32", "cuda", "high", "tf32"),
        ("bf16", "cuda", "high", "bf16"),
        ("bf16_master", "cpu", "high", "bf16"),
        ("fp16", "cuda", "highest", "fp16"),
        ("fp8", "cuda", "high", "fp8"),
        ("fp8_row", "cpu", "high", "fp8"),
    ],
)
def test_the_dtype_of_products_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, precision: str, compute: str
) -> None:
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: precision)
    assert compute_dtype(precision_named(name), torch.device(device)) == compute
