"""Kills processes of a run that keeps snapshots in memory, one after another, and says what became of each kill.

    python bench/snapshot_kills.py --kills 40 --output bench/results/snapshot-kills-cpu.json

Four launchers on this machine are the hosts of one run, with a rank each and two copies of every part. The first one,
where all meet, stays. Kinds of kills, drawn at random:

    rank, ranks        one rank, or two at once
    during a snapshot  a rank, while files of a snapshot are being written
    during a recovery  a rank, and another one as soon as the first one's successors are there
    keeper             a host's keeper; and a rank at the same moment
    host, hosts        a launcher, its keeper and its rank at once; two hosts

A kill counts as recovered when ranks have trained past the step at which it came, from a snapshot. Hosts come back
after their loss. In the end the run is interrupted, and nothing of it may be left.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from paceline.comm.control.kept import FOLDER
from paceline.run.notes import noted_processes, read_progress
from paceline_bench.timing import BenchRecord

_HOSTS = "abcd"
_KINDS = ("rank", "ranks", "during a snapshot", "during a recovery", "keeper", "host", "hosts")
_PATIENCE_S = 240.0
_EVERY = 10
_CONFIG = """
name: kills
model: {kind: mlp, hidden_dim: 256, dropout: 0.1}
data: {kind: synthetic_classification, features: 64, samples: 4096, eval_fraction: 0.0}
train: {steps: 100000000, global_batch: 24}
parallel: {device: cpu, threads: 1, strategy: fsdp}
checkpoint: {every_steps: 100000000, memory: {every_steps: EVERY, copies: 2}}
recovery: {max_restarts: 1000, restart_window: null, max_stalled_restarts: 1000}
monitor: {tensorboard: false, console: false, log_level: warning, keep_steps: all}
"""


class Kills:
    """The run, and what is done to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        (folder / "kills.yaml").write_text(_CONFIG.replace("EVERY", str(_EVERY)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "paceline", "train", "kills.yaml", "--nnodes", f"1:{len(_HOSTS)}"]
        self._command = [*command, "--node-ranks", "1", "--rdzv", meeting]
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self._path, self._offset = folder / "runs" / "kills" / "records" / "rank-0.jsonl", 0
        self.world, self.attempts, self.step, self.snapshots = 0, 0, 0, 0
        self.resumed: dict[str, Any] = {}

    def start(self, host: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PACELINE_HOST": host}
        with (self.folder / f"said-{host}").open("ab") as said:
            self.launchers[host] = subprocess.Popen(self._command, cwd=self.folder, env=environment, stderr=said)

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
                    self.resumed = {}
                elif record["type"] == "step":
                    self.step = record["step"]
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
                raise TimeoutError
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

    def kill(self, kind: str) -> list[str]:
        """Kills; returns the hosts that are gone."""
        one, other = self.random.sample(_HOSTS[1:], 2)
        if kind in ("host", "hosts"):
            gone = [one, other][: 1 + (kind == "hosts")]
            end([pid for host in gone for pid in self.processes(host)])
            for host in gone:
                self.launchers.pop(host).wait()
            return gone
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


def end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def one_kill(run: Kills, number: int) -> dict[str, Any]:
    """Kills once, and waits until the run is past it."""
    run.wait_for_all()
    kind = run.random.choice(_KINDS)
    time.sleep(run.random.uniform(0.0, 0.5))
    run.read()
    attempts, began = run.attempts, time.monotonic()
    step = max(each.last_step for each in read_progress(run.folder / "runs" / "kills").values())
    gone = run.kill(kind)
    more = 2 if kind == "during a recovery" else 1
    run.wait(lambda: run.attempts >= attempts + more and run.step > step and bool(run.resumed))
    seconds = time.monotonic() - began
    row = {"number": number, "kind": kind, "seconds": round(seconds, 2), "world": run.world}
    row |= {"steps_lost": max(0, step - int(run.resumed["step"])), "is_from_memory": is_snapshot(run.resumed["from"])}
    for host in gone:
        run.start(host)
    return row


def is_snapshot(path: str) -> bool:
    return path.startswith("snapshot:")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills processes of a run that keeps snapshots in memory.")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no other kill after so long")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    before, rows, failed, started = set(FOLDER.iterdir()), list[dict[str, Any]](), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as folder:
        run = Kills(Path(folder), asked.seed)
        try:
            for host in _HOSTS:
                run.start(host)
                run.wait(lambda: (run.folder / "runs" / "kills" / "config.yaml").is_file())
            while len(rows) + failed < asked.kills and time.monotonic() - started < asked.seconds:
                try:
                    rows.append(one_kill(run, len(rows) + failed + 1))
                    print(rows[-1], flush=True)
                except TimeoutError:
                    failed += 1
                    print(f"not recovered: {(run.folder / 'said-a').read_text()[-2000:]}", file=sys.stderr, flush=True)
                    break
        finally:
            pids = [pid for host in run.launchers for pid in run.processes(host)] if run.launchers else []
            for each in run.launchers.values():
                each.send_signal(signal.SIGINT)
            deadline = time.monotonic() + 60.0
            while time.monotonic() < deadline and any(map(psutil.pid_exists, pids)):
                for each in run.launchers.values():
                    each.poll()
                time.sleep(0.1)
    left = sorted(str(path) for path in set(FOLDER.iterdir()) - before)
    orphans = [pid for pid in pids if psutil.pid_exists(pid)]
    recovered = [each for each in rows if each["is_from_memory"]]
    summary = {"kind": "all", "kills": len(rows) + failed, "recovered_from_memory": len(recovered)}
    summary |= {"most_steps_lost": max((each["steps_lost"] for each in rows), default=None), "every_steps": _EVERY}
    summary |= {"left_in_memory": left, "orphans": len(orphans)}
    print(summary)
    command = shlex.join(["python", *sys.argv])
    record = BenchRecord(name="kills", command=command, rows=[*rows, summary], config={"seed": asked.seed})
    if asked.output is not None:
        record.write(asked.output)
    return int(len(recovered) < len(rows) + failed or bool(left) or bool(orphans))


if __name__ == "__main__":
    sys.exit(main())
