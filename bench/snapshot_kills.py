"""Kills processes of a run that keeps snapshots in memory, one after another, and says what became of each kill.

    python bench/snapshot_kills.py --kills 40 --output bench/results/snapshot-kills-cpu.json

Three hosts in network namespaces (root; ``--loopback``: launchers on this one) are those of one run, with a rank each
and two copies of every part. All meet at the first one. Of each 40 kills, in an order drawn at random, there are

    7   rank               one rank
    6   ranks              two at once
    6   during a snapshot  a rank, while files of a snapshot are being written
    6   during a recovery  a rank, and another one as soon as the first one's successors are there
    4   keeper             a host's keeper, and its rank at the same moment
    4   under load         a rank, while twice as many processes as cores compute
    2   launcher           the launcher of a host: its rank and its keeper must end by themselves
    1   host               all processes of a host
    1   power              the same, and its link goes down before: nobody is told (a second ``host`` with --loopback)
    2   hosts              two hosts at once
    1   meeting launcher   that of the first host: all end by themselves, and are started again, from the disk

A kill counts as recovered when ranks have trained past the step at which it came, and none of those before what they
went on from is trained again. That is after ``seconds``; after ``back_s`` they have trained their first step again.
They go on from memory, but for the last kind. Hosts come back after their loss. In the end the run is interrupted; no
process, no folder in memory or of scratch files, and no port may be left of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from paceline.comm.control.kept import FOLDER
from paceline.run.notes import noted_processes, read_progress
from paceline_bench.timing import BenchRecord
from slow_links.network import INTERFACE, Network, check_able, hosts

_HOSTS = "abc"
_DECK = {
    "rank": 7,
    "ranks": 6,
    "during a snapshot": 6,
    "during a recovery": 6,
    "keeper": 4,
    "under load": 4,
    "launcher": 2,
    "host": 1,
    "power": 1,
    "hosts": 2,
    "meeting launcher": 1,
}
_PATIENCE_S = 300.0
_GONE_S = 60.0  # until the processes of a launcher that was killed must be gone; the others wait 30 s for it
_PORT = 29400
_MARK = "PACELINE_KILLS"
_LISTENS = "0A"  # of the states of a connection, in the system's tables
_EVERY = 10
_CONFIG = """
name: kills
model: {kind: mlp, hidden_dim: 256, dropout: 0.1}
data: {kind: synthetic_classification, features: 64, samples: 4096, eval_fraction: 0.0}
train: {steps: 100000000, global_batch: 12}
parallel: {device: cpu, threads: 1, strategy: fsdp}
checkpoint: {every_minutes: 0.3, memory: {every_steps: EVERY, copies: 2}}
recovery: {max_restarts: 1000, restart_window: null, max_stalled_restarts: 1000}
monitor: {tensorboard: false, console: false, log_level: warning, keep_steps: all}
"""


class Kills:
    """The run, and what is done to it. Without a ``network`` all hosts are this machine."""

    def __init__(self, folder: Path, seed: int, network: Network | None) -> None:
        self.folder, self.random, self.network = folder, random.Random(seed), network
        (folder / "kills.yaml").write_text(_CONFIG.replace("EVERY", str(_EVERY)))
        (folder / "scratch").mkdir()
        self.meeting = f"{network.address(0)}:{_PORT}" if network is not None else f"127.0.0.1:{free_port()}"
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._path, self._offset = folder / "runs" / "kills" / "records" / "rank-0.jsonl", 0
        self.world, self.attempts, self.step, self.snapshots = 0, 0, 0, 0
        self.resumed: dict[str, Any] = {}
        self.is_back = False  # the newest attempt has trained a step
        self._deck: list[str] = []

    def draw(self) -> str:
        if not self._deck:
            self._deck = [kind for kind, number in _DECK.items() for _ in range(number)]
            self.random.shuffle(self._deck)
        return self._deck.pop()

    def start(self, host: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        environment |= {"PACELINE_HOST": host, _MARK: str(self.folder), "TMPDIR": str(self.folder / "scratch")}
        command = [sys.executable, "-m", "paceline", "train", "kills.yaml", "--nnodes", f"1:{len(_HOSTS)}"]
        command += ["--node-ranks", "1", "--rdzv", self.meeting, "--resume", "auto"]
        with (self.folder / f"said-{host}").open("ab") as said:
            self.launchers[host] = subprocess.Popen(
                [*self.on(host), *command], cwd=self.folder, env=environment, stderr=said
            )

    def start_all(self) -> None:
        for host in _HOSTS:
            self.start(host)
            self.wait(lambda: (self.folder / "runs" / "kills" / "config.yaml").is_file())

    def on(self, host: str) -> list[str]:
        name = [] if self.network is None else [self.network.host(_HOSTS.index(host))]
        return ["ip", "netns", "exec", *name] if name else []

    def set_link(self, host: str, state: str) -> None:
        if self.network is not None:
            number = _HOSTS.index(host)
            name = self.network.host(number)
            subprocess.run(["ip", "-n", name, "link", "set", INTERFACE, state], check=True)
            if state == "up":
                way = ["10.77.0.0/16", "via", f"10.77.{number}.1"]
                subprocess.run(["ip", "-n", name, "route", "replace", *way], check=True)

    def read(self) -> None:
        """Takes in what rank 0 has recorded since."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                try:
                    record = json.loads(line)
                except ValueError:  # a rank was killed while it wrote it
                    continue
                if record["type"] == "run":
                    self.world, self.attempts, self.snapshots = record["world_size"], self.attempts + 1, 0
                    self.resumed, self.is_back = {}, False
                elif record["type"] == "step":
                    self.step, self.is_back = record["step"], True
                elif record["type"] == "event" and record["name"] in ("resume", "snapshot", "no_snapshots"):
                    self.snapshots += record["name"] == "snapshot"
                    if record["name"] == "resume":
                        self.resumed = {"step": record["step"], "from": record["detail"]["checkpoint"]}
                    if record["name"] == "no_snapshots":
                        raise SystemExit(f"snapshots were given up: {record['detail']}")

    def wait(self, is_met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self.read()
            if is_met():
                return
            if self.launchers["a"].poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(self.said())
            time.sleep(0.01)

    def wait_for_all(self) -> None:
        self.wait(lambda: self.world == len(_HOSTS) and self.snapshots >= 2)

    def rank_of(self, host: str) -> int:
        """Returns the process of a host's rank."""
        return next(iter(noted_processes(self.folder / "runs" / "kills", self.launchers[host].pid).values()))

    def processes(self, host: str, *, keeper: bool = False) -> list[int]:
        launcher = psutil.Process(self.launchers[host].pid)
        found = launcher.children(recursive=True)
        if keeper:
            return [each.pid for each in found if "paceline.run.keeper" in each.cmdline()]
        return [launcher.pid, *(each.pid for each in found)]

    def said(self) -> str:
        return "\n".join((self.folder / f"said-{host}").read_text()[-2000:] for host in _HOSTS)

    def kill(self, kind: str) -> list[str]:
        """Kills; returns the hosts that are gone."""
        one, other = self.random.sample(_HOSTS, 2)
        if kind in ("host", "power", "hosts", "launcher", "meeting launcher"):
            gone = self.random.sample(_HOSTS[1:], 2 if kind == "hosts" else 1)
            return self.lose(kind, ["a"] if kind == "meeting launcher" else gone)
        if kind == "during a snapshot":
            known = set(FOLDER.glob("paceline-run-*/snapshots/.step-*"))
            self.wait(lambda: bool(set(FOLDER.glob("paceline-run-*/snapshots/.step-*")) - known))
        pids = [self.rank_of(one)]
        if kind == "ranks":
            pids.append(self.rank_of(other))
        if kind == "keeper":
            pids += self.processes(one, keeper=True)
        attempts = self.attempts
        end(pids)
        if kind == "during a recovery":
            self.wait(lambda: self.attempts > attempts)
            end([self.rank_of(other)])
        return []

    def lose(self, kind: str, gone: list[str]) -> list[str]:
        """Kills launchers, and with them all that is on their hosts, unless that must end by itself."""
        known = [pid for host in gone for pid in self.processes(host)]
        if kind == "power":
            self.set_link(gone[0], "down")
        end([self.launchers[host].pid for host in gone] if "launcher" in kind else known)
        if kind == "meeting launcher":
            gone = list(_HOSTS)
            known += [pid for host in gone[1:] for pid in self.processes(host)]
        deadline = time.monotonic() + _GONE_S
        while any(map(is_alive, known)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not gone: {[pid for pid in known if is_alive(pid)]}\n{self.said()}")
            for launcher in self.launchers.values():
                launcher.poll()
            time.sleep(0.05)
        for host in gone:
            self.launchers.pop(host).wait()
        if kind == "power":
            self.set_link(gone[0], "up")
        return gone

    def interrupt(self) -> None:
        """Ends the run as Ctrl-C does."""
        for each in self.launchers.values():
            each.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _GONE_S
        while time.monotonic() < deadline and (self.marked() or self.ports()):
            for each in self.launchers.values():
                each.poll()
            time.sleep(0.1)

    def marked(self) -> list[int]:
        """Returns the processes that this run has started, directly or not."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if each.environ().get(_MARK) == str(self.folder) and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each.pid)
        return found

    def ports(self) -> list[str]:
        """Returns the ports of the hosts at which somebody listens."""
        found = []
        for host in _HOSTS if self.network is not None else "":
            command = [*self.on(host), "cat", "/proc/net/tcp", "/proc/net/tcp6"]
            shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            rows = [line.split() for line in shown.splitlines()]
            found += [f"{host}: {int(row[1].rpartition(':')[2], 16)}" for row in rows if row[3:4] == [_LISTENS]]
        return found


def is_nobodys(path: Path) -> bool:
    """Whether no process names a file in memory, or has mapped it: other runs of this machine have their own."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            known = " ".join(each.cmdline()) + Path(f"/proc/{each.pid}/maps").read_text()
            if str(path) in known:
                return False
    return True


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def load(number: int) -> Iterator[None]:
    """Has so many processes compute meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def one_kill(run: Kills, number: int) -> dict[str, Any]:
    """Kills once, and waits until the run is past it."""
    run.wait_for_all()
    kind = run.draw()
    if kind == "meeting launcher":
        run.wait(lambda: any((run.folder / "runs" / "kills" / "checkpoints").glob("step-*")))
    time.sleep(run.random.uniform(0.0, 0.5))
    with load(2 * (os.cpu_count() or 1) if kind == "under load" else 0):
        run.read()
        attempts, began = run.attempts, time.monotonic()
        step = max(each.last_step for each in read_progress(run.folder / "runs" / "kills").values())
        gone = run.kill(kind)
        if kind == "meeting launcher":
            run.start_all()
        more = 2 if kind == "during a recovery" else 1
        run.wait(lambda: run.attempts >= attempts + more and run.is_back and bool(run.resumed))
        back_s = time.monotonic() - began
        run.wait(lambda: run.step > step)
        seconds = time.monotonic() - began
    row = {"number": number, "kind": kind, "seconds": round(seconds, 2), "back_s": round(back_s, 2), "world": run.world}
    row |= {"steps_lost": max(0, step - int(run.resumed["step"])), "is_from_memory": is_snapshot(run.resumed["from"])}
    for host in gone:
        if host not in run.launchers:
            run.start(host)
    return row


def is_snapshot(path: str) -> bool:
    return path.startswith("snapshot:")


def is_recovered(row: dict[str, Any]) -> bool:
    """Whether a kill cost no more than it may: what is on disk may be newer, and all there is without that launcher."""
    return bool(row["is_from_memory"]) or row["kind"] == "meeting launcher" or row["steps_lost"] <= _EVERY


def kill_often(run: Kills, asked: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Kills until there were as many as asked for, or one was not recovered; returns each, and how many failed."""
    rows, started = list[dict[str, Any]](), time.monotonic()
    run.start_all()
    while len(rows) < asked.kills and time.monotonic() - started < asked.seconds:
        try:
            rows.append(one_kill(run, len(rows) + 1))
        except TimeoutError as error:
            print(f"not recovered: {error}", file=sys.stderr, flush=True)
            return rows, 1
        print(rows[-1], flush=True)
    return rows, 0


def summarize(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each kind."""
    for kind, number in Counter(each["kind"] for each in rows).most_common():
        own = [each for each in rows if each["kind"] == kind]
        seconds = [each["seconds"] for each in own]
        yield {
            "kind": f"all {kind}",
            "kills": number,
            "recovered": sum(map(is_recovered, own)),
            "most_steps_lost": max(each["steps_lost"] for each in own),
            "median_s": round(median(seconds), 2),
            "median_back_s": round(median(each["back_s"] for each in own), 2),
            "slowest_s": max(seconds),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills processes of a run that keeps snapshots in memory.")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3 * 3600.0, help="begin no other kill after so long")
    parser.add_argument(
        "--loopback", action="store_true", help="launchers on this host, in place of network namespaces"
    )
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # of launchers, too, which a shell may start without
    before, began = set(FOLDER.iterdir()), time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-kills-")))
        if not asked.loopback:
            check_able()
        network = None if asked.loopback else stack.enter_context(hosts(len(_HOSTS)))
        run = Kills(folder, asked.seed, network)
        try:
            rows, failed = kill_often(run, asked)
        finally:
            run.interrupt()
            orphans, ports = run.marked(), run.ports()
            end(orphans)
        left = [path for path in {*FOLDER.iterdir()} - before if is_nobodys(path)]
        left += (folder / "scratch").glob("paceline-run-*")
    recovered, memory = sum(map(is_recovered, rows)), sum(each["is_from_memory"] for each in rows)
    lost = [each["steps_lost"] for each in rows if each["is_from_memory"]]
    summary = {"kind": "all", "kills": len(rows) + failed, "recovered": recovered, "from_memory": memory}
    summary |= {"most_steps_lost": max(lost, default=None), "every_steps": _EVERY}
    summary |= {
        "left": sorted(map(str, left)),
        "orphans": len(orphans),
        "ports": ports,
        "seconds": round(time.monotonic() - began),
    }
    print(summary)
    command = shlex.join(["python", *sys.argv])
    config = {"seed": asked.seed, "hosts": len(_HOSTS), "namespaces": not asked.loopback}
    record = BenchRecord(name="kills", command=command, rows=[*rows, *summarize(rows), summary], config=config)
    if asked.output is not None:
        record.write(asked.output)
    return int(recovered < len(rows) + failed or bool(left or orphans or ports))


if __name__ == "__main__":
    sys.exit(main())
