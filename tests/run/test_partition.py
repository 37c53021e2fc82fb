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


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", ["partition", "gone"])
def test_a_host_that_cannot_be_reached_is_named_on_both_sides(
    tmp_path: Path, hosts: tuple[str, str], fault: str
) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire", "WORLD_SIZE": "2"}
    settings |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511"}
    settings["PYTHONPATH"] = os.pathsep.join([str(POOL), os.environ.get("PYTHONPATH", "")])
    try:
        for rank, (host, name) in enumerate(zip(hosts, "ab", strict=True)):
            command = ["ip", "netns", "exec", host, sys.executable, "-m", "faulty_rank"]
            command += [str(tmp_path / name), "endless", "gloo", name]
            processes.append(subprocess.Popen(command, env={**os.environ, **settings, "RANK": str(rank)}))
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
