"""Hosts that cannot reach one another any more: two network namespaces on a wire that is cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.health.exit_codes import HUNG

POOL = Path(__file__).parents[1] / "pool"
LIMIT_S, LATE_S = 2.0, 3.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a wire between them, as hosts have one."""
    names = (f"pl-a-{os.getpid()}", f"pl-b-{os.getpid()}")
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces cannot be made here")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start_rank(
    hosts: tuple[str, str], rank: int, words: list[str], folder: Path, err: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts a module of tests/pool as the rank of a host."""
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire", "WORLD_SIZE": "2", "RANK": str(rank)}
    settings |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "PACELINE_HOST": "ab"[rank]}
    settings["PYTHONPATH"] = os.pathsep.join([str(POOL), os.environ.get("PYTHONPATH", "")])
    command = ["ip", "netns", "exec", hosts[rank], sys.executable, "-m", *words]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, stderr=err)


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", ["partition", "gone"])
def test_a_host_that_cannot_be_reached_is_named_on_both_sides(
    tmp_path: Path, hosts: tuple[str, str], fault: str
) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, name in enumerate("ab"):
            words = ["faulty_rank", str(tmp_path / name), "endless", "gloo", name]
            processes.append(start_rank(hosts, rank, words, tmp_path))
        while not all((tmp_path / name / f"came-{rank}").exists() for rank, name in enumerate("ab")):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.02)
        ip("-n", hosts[1], "link", "set", "wire", "down")
        cut = time.time()
        if fault == "gone":
            processes[1].kill()
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = {"a": 1} if fault == "gone" else {"a": 1, "b": 0}
    for (name, guilty), code in zip(told.items(), codes, strict=False):
        verdict = json.loads((tmp_path / name / "verdict.json").read_text())
        assert (code, verdict["ranks"]) == (HUNG, [guilty])
        assert "cannot be reached" in verdict["sentence"]
        assert verdict["time"] - cut < LIMIT_S + LATE_S, verdict


@pytest.mark.soak
@pytest.mark.exhaustive
@pytest.mark.timeout(200)
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_ends_its_loop_before_one_of_another_host_is_named(
    tmp_path: Path, hosts: tuple[str, str], guilty: int
) -> None:
    fault = "first leave" if guilty == 0 else "leave"
    processes = []
    try:
        for rank, name in enumerate("ab"):
            (tmp_path / name).mkdir()
            words = ["own_loop", "ddp", fault, "gloo", "20", "0"]
            processes.append(start_rank(hosts, rank, words, tmp_path / name, subprocess.PIPE))
        told = [process.communicate()[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [processes[rank].returncode for rank in (guilty, 1 - guilty)] == [0, 1]
    assert not any(word in told[guilty] for word in ("paceline", "TCPStore", "terminate"))
    folder = tmp_path / "ab"[1 - guilty] / "runs" / "own_loop"
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["kind"], verdict["ranks"]) == ("left", [guilty])
    sentence = verdict["sentence"]
    assert sentence.startswith(f"rank {guilty} is missing from all_reduce(")
    assert "it has finished after step 12, its last operation all_reduce(" in sentence
    assert f"rank {1 - guilty} waits for it after step 12 at " in sentence
    assert sentence.count("own_loop.py:") == 2
    assert "TCPStore" not in told[1 - guilty]
