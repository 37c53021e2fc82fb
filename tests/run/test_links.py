"""Do hosts reach one another? Real sockets of this machine: who listens, who is not reached, and what is told."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from free_ports import free_port

from paceline.errors import LaunchError, UsageError
from paceline.health.exit_codes import REFUSED
from paceline.run import links
from paceline.run.links import BlockedLink, data_addresses, explain, left_out, partners_of
from paceline.run.rendezvous import HostsChangedError, LeftOutError, Rendezvous, rendezvous
from paceline.run.whereami import Surroundings


def test_few_hosts_check_all_pairs_and_many_a_ring_and_some_others() -> None:
    assert partners_of(1, 3, seed=1) == {0: None, 2: None}
    for size in (33, 1000):
        found = {place: partners_of(place, size, seed=1) for place in range(size)}
        for place, partners in found.items():
            assert place not in partners
            assert [each for each, ports in partners.items() if ports is None] == [
                (place + 1) % size,
                (place - 1) % size,
            ]
            assert len(partners) == 8
    assert partners_of(0, 1000, seed=1) != partners_of(0, 1000, seed=2)


def test_addresses_are_those_of_the_interfaces_that_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert data_addresses("10.1.2.3") == ["10.1.2.3"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker")
    assert data_addresses("10.1.2.3") == ["127.0.0.1"]


BLOCKED = BlockedLink(
    places=(1, 0),
    source="b",
    target="a",
    address="10.0.0.1",
    ports=(40000, 50000),
    why="no answer",
    range=(32768, 60999),
)


def test_the_host_that_the_fewest_reach_is_left_out_while_enough_are_left() -> None:
    assert left_out([BLOCKED], 3, least=2) == {1: "b"}  # which came later
    assert left_out([BLOCKED], 2, least=2) is None
    first = [BLOCKED._replace(places=(place, 0), source=name) for place, name in ((1, "b"), (2, "c"))]
    assert left_out(first, 3, least=2) == {0: "a"}


def test_pairs_directions_and_ports_are_told_with_the_fix() -> None:
    told = explain([BLOCKED, *[BLOCKED._replace(ports=(40000,))] * 20])
    assert "  b -> a (10.0.0.1) ports 40000, 50000: no answer\n" in told
    assert "  b -> a (10.0.0.1) port 40000: no answer\n" in told
    assert "and 9 more" in told
    assert "--dport 32768:60999 -j ACCEPT" in told
    assert "GLOO_SOCKET_IFNAME" in told


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[object]]:
    """Has three launchers of this machine meet; returns for each its info, or the error with which it leaves."""
    monkeypatch.setenv("PACELINE_SECRET", "s" * 32)
    monkeypatch.setattr("paceline.run.rendezvous._BEAT_S", 0.01)

    def run(least: int, addresses: dict[int, list[str]]) -> list[object]:
        nodes = Surroundings(launcher="test", kind="host", least=least, count=3, address="127.0.0.1", port=free_port())

        def join(made: Rendezvous) -> object:
            try:
                return made.next_rendezvous()
            except (HostsChangedError, LaunchError, UsageError) as error:
                return error

        with (
            ThreadPoolExecutor(3) as pool,
            rendezvous(tmp_path, "run", nodes) as first,
            rendezvous(tmp_path, "run", nodes) as second,
            rendezvous(tmp_path, "run", nodes) as third,
        ):
            all_of_them = [first, second, third]
            for number, each in enumerate(all_of_them):
                each.hosts.silence_s = 1.0
                each.addresses = addresses.get(number, ["127.0.0.1"])
            return list(pool.map(join, all_of_them))

    return run


def test_hosts_that_reach_one_another_go_on(meet: Callable[..., list[object]]) -> None:
    found = meet(3, {})
    assert sorted(each.rank for each in found) == [0, 1, 2]  # type: ignore[attr-defined]


def test_a_host_that_nobody_reaches_is_named_by_all(
    meet: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What connects to this address is refused, as by a firewall: nobody listens there.
    real = links._listen

    def listen(stack: object, addresses: list[str]) -> tuple[links.HostPorts, list[socket.socket]]:
        found, listeners = real(stack, ["127.0.0.1"])  # type: ignore[arg-type]
        return (found._replace(host="lost", ports={"127.0.0.9": [9]}) if addresses == ["shut"] else found), listeners

    monkeypatch.setattr(links, "_listen", listen)
    found = meet(3, {2: ["shut"]})
    assert {type(each) for each in found} == {UsageError}, found
    assert len({str(each) for each in found}) == 1
    assert str(found[0]).count("-> lost (127.0.0.9) port 9: ") == 2
    assert "refused" in str(found[0])
    found = meet(2, {2: ["shut"]})
    left = [each for each in found if isinstance(each, LeftOutError)]
    assert [each.code for each in left] == [REFUSED]
    assert [type(each) for each in found].count(HostsChangedError) == 2, found


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_a_firewall_is_told_with_the_pair_the_direction_and_the_port(tmp_path: Path) -> None:
    """Two launchers in network namespaces, of which one drops new connections to its data ports."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("iptables") is None:
        pytest.skip("a firewall needs root, iproute2 and iptables")
    from slow_links.network import NoNetworkError, hosts

    (tmp_path / "tiny.yaml").write_text(
        "name: tiny\nmodel: {kind: mlp, hidden_dim: 8}\ndata: {kind: synthetic_classification, samples: 64}\n"
        "train: {steps: 4, global_batch: 8}\nparallel: {device: cpu, threads: 1}\nmonitor: {tensorboard: false}\n"
    )
    command = [sys.executable, "-m", "paceline", "train", "tiny.yaml", "--nnodes", "2", "--node-ranks", "1"]
    command += ["--rdzv", "10.77.0.2:29400"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PACELINE_SECRET"] = "s" * 32
    try:
        with hosts(2) as network:
            closed = ["ip", "netns", "exec", network.host(0), "iptables", "-I", "INPUT", "-p", "tcp", "--syn"]
            subprocess.run([*closed, "--dport", "32768:60999", "-j", "DROP"], check=True)
            processes = [
                subprocess.Popen(
                    ["ip", "netns", "exec", network.host(number), *command],
                    cwd=tmp_path,
                    env=environment | {"PACELINE_HOST": f"h{number}"},
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for number in range(2)
            ]
            told = [process.communicate(timeout=150)[1] for process in processes]
    except NoNetworkError as error:
        pytest.skip(str(error))
    assert [process.returncode for process in processes] == [REFUSED, REFUSED], told
    for text in told:
        assert "h1 -> h0 (10.77.0.2) ports " in text
        assert "no answer within 5 s" in text
        assert "h0 -> h1" not in text
