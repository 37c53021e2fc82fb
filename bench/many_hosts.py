"""The start of a run on many hosts, with fake agents on this machine: what launchers do before ranks are started.

    python bench/many_hosts.py --hosts 100 300 --output many-hosts.json

Every agent is the real rendezvous of a launcher (``run/rendezvous.py``), with its own address on the loopback; the
one that has the control server has a process of its own. Fake is that no ranks follow, and that agents share processes
and cores: on a cluster each has its own. So an answer of a partner may take minutes here, and the server is given the
cores first (``nice``, as root). The phases, from the first agent that begins one to the last that is through:

    meet     connect to the control server, prove the secret, compare versions, config and folders
    join     the round begins
    links    each host listens, and connects to its partners (``run/links.py``)
    store    what ranks do at the control store: a key of each host, those of two others, and a barrier of all
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from paceline.comm.control import server
from paceline.comm.control import store as client
from paceline.comm.control.store import ControlStore
from paceline.run import links
from paceline.run.agreement import HostFacts
from paceline.run.rendezvous import Rendezvous, rendezvous
from paceline.run.whereami import Surroundings
from paceline_bench.timing import BenchRecord

AGENTS = 25  # of one process
PATIENCE = timedelta(seconds=600)
PHASES = ("meet", "join", "links", "store")


class Agent(threading.Thread):
    """One launcher, which notes when each phase begins and ends, and stays until it is told to leave."""

    def __init__(self, number: int, nodes: Surroundings, folder: Path, is_over: Any) -> None:
        super().__init__(name=f"agent {number}", daemon=True)
        self.number, self.nodes, self.folder, self.is_over = number, nodes, folder, is_over
        self.times: dict[str, tuple[float, float]] = {}
        self.is_through = threading.Event()
        self.error = ""

    def run(self) -> None:
        """Goes through all phases."""
        try:
            self._run()
        except Exception as error:  # it is told with the others', which wait for it in vain
            self.error = f"{type(error).__name__}: {error}"
            print(f"{self.name}: {self.error}", file=sys.stderr, flush=True)
        self.is_through.set()

    def _run(self) -> None:
        folders = (str(self.folder),)
        facts = HostFacts(
            host=f"n{self.number}", paceline="1", torch="2", ranks=1, config={}, folders=folders, mark=str(self.number)
        )
        start = time.monotonic()
        with rendezvous(self.folder, "run", self.nodes, facts) as made:
            self.note("meet", start)
            start = time.monotonic()
            made.addresses = []  # the links are checked below, by the clock
            info = made.next_rendezvous()
            self.note("join", start)
            self._check(made, info.rank, info.world_size)
            self._meet(made, info.rank, info.world_size)
            self.is_through.set()
            self.is_over.wait()

    def _check(self, made: Rendezvous, place: int, size: int) -> None:
        start, store = time.monotonic(), ControlStore(made._client, prefix="links/1/")
        own = f"127.1.{self.number // 250}.{self.number % 250 + 1}"
        blocked = links.check_links(store, made._secret, [own], place=place, size=size, seed=1)
        assert not blocked, links.explain(blocked)
        self.note("links", start)

    def _meet(self, made: Rendezvous, place: int, size: int) -> None:
        start, store = time.monotonic(), ControlStore(made._client, prefix="ranks/1/")
        store.set(f"rank {place}", self.name)
        store.wait([f"rank {(place + step) % size}" for step in (1, -1)], PATIENCE)
        store.meet("joined", place, size, PATIENCE)
        self.note("store", start)

    def note(self, phase: str, start: float) -> None:
        self.times[phase] = start, time.monotonic()


def run_agents(numbers: Sequence[int], nodes: Surroundings, folder: Path, results: Any, is_over: Any) -> None:
    """Runs some agents in this process; tells when all are through, and leaves when all of all processes are."""
    links.ANSWER_S = links._MEET_S = server._HANDSHAKE_S = client._CONNECT_S = client._SILENT_S = 300.0
    if 0 in numbers and os.geteuid() == 0:
        os.nice(-10)
    agents = [Agent(number, nodes, folder, is_over) for number in numbers]
    for each in agents:
        each.start()
    for each in agents:
        each.is_through.wait()
    results.put(([each.times for each in agents], [each.error for each in agents if each.error]))
    is_over.wait()
    for each in agents:
        each.join()


def measure(num_hosts: int) -> dict[str, Any]:
    """Starts so many agents, and returns the seconds of each phase and what the server had open in the end."""
    os.environ["PACELINE_SECRET"] = "0123456789abcdef0123456789abcdef"
    context = multiprocessing.get_context("fork")
    results, is_over = context.Queue(), context.Event()
    port = 20_000 + os.getpid() % 10_000
    nodes = Surroundings(
        launcher="bench", kind="host", least=num_hosts, count=num_hosts, address="127.0.0.1", port=port
    )
    groups = [[0], *(list(range(first, min(num_hosts, first + AGENTS))) for first in range(1, num_hosts, AGENTS))]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-hosts-") as folder:
        processes = [
            context.Process(target=run_agents, args=(group, nodes, Path(folder), results, is_over)) for group in groups
        ]
        for process in processes:
            process.start()
        found = [results.get(timeout=PATIENCE.total_seconds()) for _ in groups]
        first = psutil.Process(processes[0].pid)
        connections = [each for each in first.net_connections("tcp") if each.laddr.port == port and each.raddr]
        row: dict[str, Any] = {
            "hosts": num_hosts,
            "all_s": round(time.monotonic() - start, 2),
            "server_connections": len(connections),
            "server_memory_mb": round(first.memory_info().rss / 1e6),
            "link_checks_of_a_host": len(links.partners_of(0, num_hosts, 1)),
            "errors": [error for _, errors in found for error in errors][:5],
        }
        is_over.set()
        for process in processes:
            process.join(60)
            process.kill()
    times = [each for group, _ in found for each in group]
    for phase in PHASES:
        spans = [each[phase] for each in times if phase in each]
        row[f"{phase}_s"] = round(max(end for _, end in spans) - min(begin for begin, _ in spans), 2) if spans else None
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the start of a run on many fake hosts.")
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if min(asked.hosts) < 2:
        parser.error(f"--hosts {min(asked.hosts)}: at least two hosts meet")
    rows = []
    for num_hosts in asked.hosts:
        rows.append(measure(num_hosts))
        print(rows[-1], flush=True)
    if asked.output is not None:
        BenchRecord(
            name="many hosts",
            command=" ".join(["python", "bench/many_hosts.py", *sys.argv[1:]]),
            rows=rows,
            config={"agents_of_a_process": AGENTS, "cores": os.cpu_count()},
        ).write(asked.output)
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
