"""What the doctor says about the host: on this one, and on one that is worse."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.doctor import machine, network
from paceline.doctor.findings import DoctorInputs, MachineFinding, examine, missing_packages

HERE = DoctorInputs(environment={}, is_quick=True)


def only(findings: Iterator[MachineFinding], name: str) -> MachineFinding:
    (found,) = [each for each in findings if each.name == name]
    return found


def failing_check(_: DoctorInputs) -> Iterator[MachineFinding]:
    yield from ()
    raise OSError("the bus is full")


def test_a_check_that_fails_is_a_problem_and_the_others_still_run() -> None:
    first, second = examine([failing_check, machine.python], HERE)
    assert (first.name, first.status) == ("failing check", "problem")
    assert "OSError: the bus is full" in first.found
    assert (second.name, second.status) == ("python", "ok")


def test_every_check_says_what_it_found_and_what_that_means() -> None:
    checks = [
        *(machine.python, machine.processors, machine.memory, machine.open_files, machine.disk),
        *(machine.shared_memory, machine.compiler, machine.packages, machine.torch_build, machine.gpus),
        *(network.interfaces, network.host_name, network.chosen_interfaces, network.ports, network.listening),
    ]
    findings = examine(checks, HERE)
    assert len(findings) >= len(checks)
    for finding in findings:
        assert finding.found, finding
        assert finding.meaning, finding
        assert bool(finding.fix) or finding.status != "problem", finding
        assert "the check failed" not in finding.found
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in only(iter(findings), "python").found


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None), ("100000 0", None), ("x y", None)]
)
def test_a_quota_is_read_as_cores(text: str, cores: float | None) -> None:
    assert machine.cpu_quota(text) == cores


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2, reason="one core, or no affinity"
)
def test_cores_that_may_not_be_used_are_told() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        (found,) = machine.processors(DoctorInputs(environment={"OMP_NUM_THREADS": "8"}))
    finally:
        os.sched_setaffinity(0, before)
    assert found.status == "note"
    assert found.found.startswith(f"1 of {os.cpu_count()} cores usable")
    assert "OMP_NUM_THREADS=8" in found.found
    assert "parallel.threads" in found.fix


@pytest.mark.parametrize(("limit", "status"), [(200, "problem"), (1000, "note"), (4096, "ok")])
def test_few_open_files_are_told(limit: int, status: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < limit:
        pytest.skip(f"the limit cannot be {limit} here")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        (found,) = machine.open_files(HERE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.status == status
    assert str(limit) in found.found
    assert bool(found.fix) == (status != "ok")


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (found,) = machine.disk(DoctorInputs(environment={}, runs=tmp_path / "file" / "runs"))
    assert (found.name, found.status) == ("disk", "problem")
    assert "monitor.folder" in found.fix
    disk, clock = machine.disk(DoctorInputs(environment={}, runs=tmp_path / "runs" / "deep"))
    assert str(tmp_path) in disk.found
    assert clock.status == "ok"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # nothing is left


def test_segments_of_processes_that_are_gone_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("processes are looked up in /proc")
    from paceline.comm.shared import segment

    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    mine = segment.Process.this()
    (tmp_path / f"paceline-1-{mine.pid}-{mine.started}-aa").write_bytes(b"x" * 10)
    assert [each.name for each in machine.shared_memory(HERE)] == ["shared memory"]
    stale = tmp_path / f"paceline-1-{mine.pid}-{mine.started + 1}-bb"  # the number is used again
    stale.write_bytes(b"x" * 2048)
    found = only(machine.shared_memory(HERE), "stale segments")
    assert found.status == "note"
    assert found.found.startswith("1 of 2.0 KiB")
    assert str(stale) in found.fix


def test_what_paceline_itself_lacks_is_told_before_anything_needs_it() -> None:
    assert missing_packages() == []
    (found,) = missing_packages(["sys", "no_such_module"])
    assert (found.status, found.found) == ("problem", "not installed: no_such_module")
    assert sys.executable in found.fix


# GPUs.


def test_a_machine_without_gpus_is_fine_and_one_whose_gpus_are_not_reached_is_not() -> None:
    assert machine.no_gpu([], None, None).status == "ok"
    wrong_build = machine.no_gpu(["nvidia0"], None, None)
    assert (wrong_build.status, "built for CUDA" in wrong_build.fix) == ("problem", True)
    old_driver = machine.no_gpu(["nvidia0", "nvidia1"], "12.8", "0,1")
    assert old_driver.status == "problem"
    assert "2 in this machine" in old_driver.found
    assert "older than CUDA 12.8" in old_driver.meaning
    hidden = machine.no_gpu(["nvidia0"], "12.8", "")
    assert (hidden.status, "CUDA_VISIBLE_DEVICES=''" in hidden.found) == ("note", True)


# Ports.


def test_the_port_of_torchrun_is_looked_at() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 29500))
        except OSError:
            pytest.skip("somebody has the port")
        listener.listen(1)
        (found,) = network.ports(HERE)
    assert found.status == "note"
    assert "29500 is in use" in found.found
