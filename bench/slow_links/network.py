"""Hosts on one machine: network namespaces, each with one cable to a router, shaped in both directions.

    host 0 -- eth0 ==== port0 -- router -- port1 ==== eth0 -- host 1        (veth pairs; tbf on both ends of each)

A cable carries ``rate`` each way at the same time. Ranks on one host talk over its loopback, which is not shaped.
Nothing outside the namespaces is touched. Their names carry the process that made them, with the time it started: what
a killed run left behind is removed by the next one, and a run that is still alive is left alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.errors import PacelineError

INTERFACE = "eth0"
_STEM = "paceline-links"
_NAME = re.compile(rf"{_STEM}-(\d+)-(\d+)-(h\d+|router)")
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_BURST_S = 2e-3  # what may leave at once: the timer that refills the bucket is not finer
_LEAST_BURST = 64 * 1024  # the largest packet that the kernel hands to a cable
_QUEUE_MS = 200
# Reno is in every Linux, whatever this machine is set to. A connection's send buffer holds what a short way needs: with
# megabytes of it, bytes that were sent later by one connection overtake earlier ones of another.
TCP = {"tcp_congestion_control": "reno", "tcp_wmem": "4096 65536 262144", "tcp_rmem": "4096 131072 6291456"}


class NoNetworkError(PacelineError):
    """This process may not make networks, or the tools for it are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Bytes that a host's interface has seen so far; ``wire`` as the shaper counts them, with every packet's header."""

    sent: int
    received: int
    wire: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The names of some hosts and their router; plain data, so that ranks can be told."""

    stem: str
    num_hosts: int

    @property
    def router(self) -> str:
        """The namespace of the router."""
        return f"{self.stem}-router"

    def host(self, number: int) -> str:
        """Returns the namespace of a host."""
        return f"{self.stem}-h{number}"

    def address(self, number: int) -> str:
        """Returns the address of a host."""
        return f"10.77.{number}.2"

    def shape(self, number: int, bits_per_second: int) -> None:
        """Sets the speed of a host's cable, in both directions."""
        burst = max(_LEAST_BURST, int(_BURST_S * bits_per_second / 8))
        limits = f"rate {bits_per_second}bit burst {burst} latency {_QUEUE_MS}ms"
        _run(f"tc -n {self.host(number)} qdisc replace dev {INTERFACE} root tbf {limits}")
        _run(f"tc -n {self.router} qdisc replace dev port{number} root tbf {limits}")

    def counters(self, number: int) -> Counters:
        """Reads the counters of a host's interface."""
        shown = json.loads(_run(f"ip -n {self.host(number)} -s -j link show dev {INTERFACE}"))[0]["stats64"]
        shaper = json.loads(_run(f"tc -n {self.host(number)} -s -j qdisc show dev {INTERFACE}"))[0]
        return Counters(sent=shown["tx"]["bytes"], received=shown["rx"]["bytes"], wire=shaper["bytes"])


def check_able() -> None:
    """Raises NoNetworkError unless this process is root on a Linux that has ``ip`` and ``tc``."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoNetworkError(
            f"{' and '.join(missing)} not found\n  hosts are made of network namespaces and shaped links (Linux)\n"
            "  install them: apt-get install iproute2"
        )
    if os.geteuid() != 0:
        raise NoNetworkError(
            f"this process is user {os.geteuid()}, not root\n  only root makes network namespaces and shapes links\n"
            "  run it under sudo"
        )


@contextmanager
def hosts(num_hosts: int) -> Iterator[Network]:
    """Makes a network of hosts, and removes it whatever happens; what killed runs left is removed first."""
    remove(stale(_existing()))
    network = Network(stem=stem_of(os.getpid()), num_hosts=num_hosts)
    try:
        _make(network)
        yield network
    finally:
        with _undisturbed():
            remove(name for name in _existing() if name.startswith(f"{network.stem}-"))


def stem_of(pid: int) -> str:
    """Returns how the names of a process's namespaces begin."""
    return f"{_STEM}-{pid}-{_started(pid)}"


def stale(names: Iterable[str]) -> list[str]:
    """Picks the names whose process is gone; names that are not ours are never among them."""
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None and _started(int(match[1])) != int(match[2]):
            found.append(name)
    return found


def remove(names: Iterable[str]) -> None:
    """Ends the processes in these namespaces and deletes them."""
    for name in names:
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in map(int, inside.split()):
            if pid != os.getpid():
                with _already_gone():
                    os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def enter(namespace: str) -> None:
    """Moves this process into a namespace. Called before it has other threads: these stay where they are."""
    with (_NAMESPACES / namespace).open() as file:
        if hasattr(os, "setns"):  # Python 3.12
            os.setns(file.fileno(), _CLONE_NEWNET)
        elif ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


def _make(network: Network) -> None:
    router = network.router
    _run(f"ip netns add {router}")
    _run(f"ip netns exec {router} sh -c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    for number in range(network.num_hosts):
        host, gateway = network.host(number), f"10.77.{number}.1"
        _run(f"ip netns add {host}")
        for name, value in TCP.items():
            _run(f"ip netns exec {host} sh -c", f"echo '{value}' > /proc/sys/net/ipv4/{name}")
        _run(f"ip link add {INTERFACE} netns {host} type veth peer name port{number} netns {router}")
        _run(f"ip -n {router} address add {gateway}/24 dev port{number}")
        _run(f"ip -n {router} link set port{number} up")
        _run(f"ip -n {host} address add {network.address(number)}/24 dev {INTERFACE}")
        _run(f"ip -n {host} link set {INTERFACE} up")
        _run(f"ip -n {host} link set lo up")
        _run(f"ip -n {host} route add 10.77.0.0/16 via {gateway}")


def _existing() -> list[str]:
    return sorted(path.name for path in _NAMESPACES.glob("*")) if _NAMESPACES.is_dir() else []


def _started(pid: int) -> int:
    """Returns when a process started, in whole seconds; 0 when there is none."""
    try:
        return int(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return 0


def _run(command: str, *last: str) -> str:
    done = subprocess.run([*command.split(), *last], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworkError(
            f"`{' '.join([command, *last])}` failed: {done.stderr.strip()}\n"
            "  hosts need network namespaces, veth and tbf in the kernel\n  try on another Linux"
        )
    return done.stdout


@contextmanager
def _already_gone() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        return


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Lets no second Ctrl-C cut the clean-up short."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
