"""Launched hosts whose network splits, whose clocks differ, or whose link is slow: ``make hosts`` runs them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_network import HostNetwork
from launched_runs import checkpoints, events, is_same_state, make_project, records, starts, steps, wait_until

from paceline.records.records import EventRecord, RunRecord, StepRecord
from paceline.run.links import BlockedLink

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
# Python imports it first in every process; that of one host goes ahead by seconds.
CLOCK = """
import socket, time

if socket.gethostname() == "h1":
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + 7.0
    time.time_ns = lambda: real_ns() + 7 * 10**9
"""
SLOW_BITS = 8_000_000
# What a launcher does on one of three hosts before it starts ranks, once for each line of its input.
CHECKS = """
import json, sys, time
from paceline.comm.control.server import ControlServer
from paceline.comm.control.store import ControlClient, ControlStore
from paceline.comm.control.wire import Address, listen
from paceline.run.links import check_links

place, meet, secret = int(sys.argv[1]), Address("10.77.0.2", 29400), lambda: bytes(32)
if place == 0:
    ControlServer([listen(meet)], secret).__enter__()
client = ControlClient(meet, secret)
client.wait_for_server(60)
for line in sys.stdin:
    start, store = time.monotonic(), ControlStore(client, prefix=line)
    found = check_links(store, secret, [f"10.77.{place}.2"], place=place, size=3, seed=1)
    print(json.dumps([time.monotonic() - start, found]), flush=True)
"""


def test_a_link_that_goes_down_is_told_by_both_sides_and_the_run_goes_on_when_it_is_mended(
    four_hosts: HostNetwork, tmp_path: Path
) -> None:
    make_project(tmp_path, pause_s=0.05)
    done = four_hosts.launch(tmp_path, "train.steps=100000", "checkpoint.every_steps=10", "--detach")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: checkpoints(tmp_path), "a checkpoint")
    # On the disk that both share: what h1 prints comes when the link is mended.
    log = tmp_path / "runs" / "tiny" / "logs" / "run.log"
    gone, cut_off = (
        "h1 (nothing was heard of it for 5 s) is gone",
        "host h1 does not reach the launcher where the hosts",
    )
    start = time.monotonic()
    four_hosts.cut(1)
    wait_until(lambda: gone in log.read_text(), "that h1 is gone")
    print(f"h0 has told the cut link after {time.monotonic() - start:.1f} s")
    wait_until(lambda: cut_off in log.read_text(), "that h1 is cut off")
    print(f"h1 has told the cut link after {time.monotonic() - start:.1f} s")
    launch = tmp_path / "runs" / ".launches" / "tiny" / "log"
    silent = "h1: nothing was heard of it for 8 s"  # told between rounds, too, when h0 does not watch it
    wait_until(lambda: silent in launch.read_text(), "that h1 does not answer")
    print(f"the launch has told the cut link after {time.monotonic() - start:.1f} s")
    four_hosts.mend(1)
    wait_until(lambda: len(starts(tmp_path)) == 2 and len(steps(tmp_path)) > 20, "steps after the link was mended")
    told = log.read_text()
    assert "comes back" in told
    assert "could not be started" not in told
    four_hosts.cut(1)  # so briefly that h1 may not notice it
    wait_until(lambda: log.read_text()[len(told) :].count(gone) > 0, "that h1 is gone again")
    four_hosts.mend(1)
    wait_until(lambda: len(starts(tmp_path)) == 3 and steps(tmp_path)[-1] > 40, "steps after a brief cut")
    assert four_hosts.paceline(tmp_path, "launch", "cancel", "tiny").returncode == 0
    assert four_hosts.paceline(tmp_path, "launch", "logs", "--follow").returncode == 75


def test_ports_that_are_shut_are_told_with_the_pair_and_the_direction(four_hosts: HostNetwork, tmp_path: Path) -> None:
    if shutil.which("iptables") is None:
        pytest.skip("no iptables: apt-get install iptables")
    make_project(tmp_path)
    with blocked(four_hosts, 1, 2, (32768, 60999), "DROP"):
        start = time.monotonic()
        done = four_hosts.launch(tmp_path, hosts="h0,h1,h2")
        print(f"the blocked ports are told, and the launch has ended, after {time.monotonic() - start:.1f} s")
        four_hosts.launch(tmp_path, "--nodes", "2:3", hosts="h0,h1,h2")  # goes on without the later one of the pair
    assert done.returncode == 2, done.stdout + done.stderr
    told = done.stdout + done.stderr
    assert "h1 -> h2 (10.77.2.2) ports " in told
    assert all(f"{pair} (10.77" not in told for pair in ("h0 -> h1", "h1 -> h0", "h2 -> h1", "h0 -> h2", "h2 -> h0"))
    assert {each.world_size for each in starts(tmp_path, "tiny-2") or starts(tmp_path)} == {2}


def test_hosts_do_not_wait_for_one_that_nobody_starts_again(four_hosts: HostNetwork, tmp_path: Path) -> None:
    make_project(tmp_path, pause_s=0.05)
    done = four_hosts.launch(tmp_path, "train.steps=100000", "checkpoint.every_steps=10", "--detach")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: checkpoints(tmp_path), "a checkpoint")
    listed = subprocess.run(["ip", "netns", "pids", four_hosts.network.host(1)], capture_output=True, check=True)
    subprocess.run(["kill", "-KILL", *listed.stdout.decode().split()], check=True)
    launch = tmp_path / "runs" / ".launches" / "tiny"
    wait_until((launch / "exit").exists, "the end of the run")
    told = (launch / "log").read_text()
    assert "h1 (its launcher has ended) is gone" in told
    assert "h1: ssh does not reach it; all 2 hosts are needed: the others end" in told
    assert (launch / "exit").read_text().strip() in ("75", "143")


def test_the_state_of_a_lost_hosts_ranks_comes_from_the_memory_of_the_others(
    four_hosts: HostNetwork, tmp_path: Path
) -> None:
    make_project(tmp_path, pause_s=0.05)
    words = ["data.samples=480", "train.global_batch=48", "train.steps=100000", "checkpoint.every_steps=100000"]
    words += ["checkpoint.memory.every_steps=5", "--nodes", "2:3", "--detach"]
    done = four_hosts.launch(tmp_path, *words, hosts="h0,h1,h2")
    assert done.returncode == 0, done.stderr

    def world() -> int:
        return starts(tmp_path)[-1].world_size if starts(tmp_path) else 0

    wait_until(lambda: world() == 3 and events(tmp_path)[-3:].count("snapshot") >= 2, "snapshots of three hosts")
    listed = subprocess.run(["ip", "netns", "pids", four_hosts.network.host(1)], capture_output=True, check=True)
    four_hosts.cut(1)
    subprocess.run(["kill", "-KILL", *listed.stdout.decode().split()], check=True)
    wait_until(lambda: world() == 2 and events(tmp_path)[-1] == "snapshot", "snapshots of the two that are left")
    found = records(tmp_path)
    last = max(place for place, each in enumerate(found) if isinstance(each, RunRecord))
    resumed = next(each for each in found[last:] if isinstance(each, EventRecord) and each.name == "resume")
    assert resumed.detail["checkpoint"].startswith("snapshot:/dev/shm/paceline-run-")
    reached = max(each.step for each in found[:last] if isinstance(each, StepRecord))
    assert reached - 10 <= resumed.step <= reached
    after = [each for each in found[last:] if isinstance(each, StepRecord)]
    assert [each.step for each in after] == list(range(resumed.step + 1, resumed.step + 1 + len(after)))
    assert [each.position for each in after] == [48 * each.step for each in after]  # every sample once
    assert checkpoints(tmp_path) == []  # without a disk
    assert four_hosts.paceline(tmp_path, "launch", "cancel", "tiny").returncode == 0


@contextlib.contextmanager
def blocked(network: HostNetwork, source: int, target: int, ports: tuple[int, int], verdict: str) -> Iterator[None]:
    """Has a host's firewall stop what another one sends to some ports."""
    rule = ["-p", "tcp", "--syn", "-s", network.network.address(source), "--dport", f"{ports[0]}:{ports[1]}"]
    for change in ("-I", "-D"):
        words = ["ip", "netns", "exec", network.network.host(target), "iptables", change, "INPUT", *rule]
        subprocess.run([*words, "-j", verdict], check=True)
        if change == "-I":
            yield


def test_each_direction_and_each_part_of_the_ports_that_is_shut_is_named(four_hosts: HostNetwork) -> None:
    if shutil.which("iptables") is None:
        pytest.skip("no iptables: apt-get install iptables")
    low, high = 32768, 60999
    quarter = (high - low + 1) // 4
    parts = [(low, high), *((low + each * quarter, low + (each + 1) * quarter - 1) for each in range(4))]
    pairs = list(itertools.permutations(range(3), 2))
    cases = [(*pair, part, "REJECT") for pair in pairs for part in parts]
    # A firewall that drops costs seconds, so not every part for every pair.
    cases += [(*pair, parts[each], "DROP") for number, pair in enumerate(pairs) for each in (0, 1 + number % 4)]
    slowest_s: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        checks = []
        for host in range(3):
            command = [*four_hosts.on(host), sys.executable, "-c", CHECKS, str(host)]
            checks.append(stack.enter_context(subprocess.Popen(command, **pipes)))
            stack.callback(checks[-1].kill)
        for number, (source, target, ports, verdict) in enumerate(cases):
            with blocked(four_hosts, source, target, ports, verdict):
                for each in checks:
                    each.stdin.write(f"{number}\n")
                    each.stdin.flush()
                answers = [json.loads(each.stdout.readline()) for each in checks]
            (found,) = {json.dumps(links) for _, links in answers}  # all hosts say the same
            (link,) = (BlockedLink(*each) for each in json.loads(found))
            assert (link.source, link.target) == (f"h{source}", f"h{target}")
            assert len(link.ports) == (4 if ports == parts[0] else 1)
            assert all(ports[0] <= port <= ports[1] for port in link.ports)
            slowest_s[verdict] = max(slowest_s.get(verdict, 0.0), *(seconds for seconds, _ in answers))
    print(
        f"{len(cases)} blocked directions and ports are named; the slowest by their firewall's verdict: {slowest_s} s"
    )


def test_clocks_that_differ_by_seconds_change_nothing(
    four_hosts: HostNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make_project(tmp_path / "ours"), make_project(tmp_path / "theirs")
    assert four_hosts.launch(theirs).returncode == 0
    (ours / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ours), os.environ.get("PYTHONPATH", "")]))
    done = four_hosts.launch(ours)
    assert done.returncode == 0, done.stdout + done.stderr
    began = {rank: starts(ours, rank=rank)[0] for rank in range(2)}
    ahead = {each.host: each.time for each in began.values()}
    assert 5.0 < ahead["h1"] - ahead["h0"] < 30.0  # the clocks did differ
    assert steps(ours)[-1] == 60
    assert len(began) == len(starts(ours)) + 1  # one start each
    assert not (ours / "runs" / "tiny" / "verdict.json").exists()
    assert is_same_state(ours, theirs)


def test_a_slow_link_is_named_as_such(four_hosts: HostNetwork, tmp_path: Path) -> None:
    make_project(tmp_path)
    four_hosts.network.shape(1, SLOW_BITS)
    done = four_hosts.launch(tmp_path, "train.steps=40", "checkpoint.every_steps=40", "model.hidden_dim=512")
    assert done.returncode == 0, done.stdout + done.stderr
    report = four_hosts.paceline(tmp_path, "report", "runs/tiny", "--json")
    limits = json.loads(report.stdout)["limits"]
    assert limits["what"] == "link", limits
    assert "a slow link" in limits["sentence"]
