"""The process that holds the actors of a run on Ray until it has ended: ``python -m paceline.launch.ray_hosts FOLDER``.

Attempt after attempt: it asks Ray for a placement group, compares the machines, has the run started on each, prints
what they print, and asks ``health/diagnosis.py`` what to do when they have ended. ``--nodes 2:4`` takes as many hosts
as the cluster has room for, at each start. What the ends of hosts mean:

    refused by any host              leaves with 2
    done on any host                 leaves with 0
    a host lost, or killed           an attempt that failed
    saved because something asked    an attempt that made room; after ``cancel`` it leaves with 75
    anything else                    leaves with the code of the launchers, who have restarted ranks themselves
"""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import load_config
from paceline.config.sections import RecoveryConfig
from paceline.errors import LaunchError, UsageError
from paceline.health.diagnosis import FailedAttempt, Stop, TrainedSteps, after_failure
from paceline.health.exit_codes import DONE, FAILED, NO_PROGRESS, PREEMPTED, REFUSED
from paceline.launch import ray_cluster
from paceline.launch.job import LaunchJob
from paceline.launch.remote import forget_mark, look_order, run_order, start_command
from paceline.launch.ssh import compare
from paceline.run.folder import is_in_use
from paceline.run.notes import read_progress
from paceline.run.signals import BY_SIGNAL
from paceline.run.whereami import SWITCH, Surroundings
from paceline.terminal import echo

_LOOK_S = 0.1
_ASK_S = 2.0  # Ray, for bundles
_ANSWER_S = 120.0
_LATE_S = 10.0  # for the others, when a host is lost or has failed: they may be saving
_DONE_S = 60.0  # for the others, when one is done
_FREE_S = 60.0  # until a launcher that lost its actor has left the run's folder
_CANCELLED = BY_SIGNAL + signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnd:
    """How the command of one actor ended; ``code`` None: the actor is gone, and ``words`` say how."""

    host: str
    code: int | None
    words: str = ""

    @property
    def is_lost(self) -> bool:
        return self.code is None or self.code > BY_SIGNAL

    def __str__(self) -> str:
        if self.code is None:
            return f"host {self.host} was lost" + (f" ({self.words})" if self.words else "")
        if self.code > BY_SIGNAL:
            return f"the launcher on host {self.host} was killed by signal {self.code - BY_SIGNAL}"
        return f"host {self.host} left with exit code {self.code}"


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Runs a launch on a cluster. ``signals`` are those that have come, and are to be handed on."""

    job: LaunchJob
    options: ray_cluster.RayOptions
    cluster: ray_cluster.RayCluster
    policy: RecoveryConfig
    attempts: list[FailedAttempt] = field(default_factory=list)  # that ended before the run was done
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    signals: list[int] = field(default_factory=list)
    is_cancelled: bool = False

    def run(self) -> int:
        """Runs attempts until one says that the run has ended; returns its exit code."""
        folder = self.job.runs / self.job.run
        while True:
            ended = self._attempt()
            if isinstance(ended, int):
                return ended
            progress = read_progress(folder).values()
            first_step = min((each.first_step for each in progress), default=0)
            steps = TrainedSteps(first_step=first_step, last_step=max((each.last_step for each in progress), default=0))
            found = ended_by(ended, steps, options=self.options, is_cancelled=self.is_cancelled)
            if isinstance(found, int):
                return found
            if found.kind == "killed" and self.job.least < self.job.nodes:
                found = replace(found, kind="hosts")  # it goes on with those that are left
            self.attempts.append(found)
            decision = after_failure(self.policy, self.attempts, max_requeues=self.job.most_requeues)
            if isinstance(decision, Stop):
                echo("paceline: " + "; ".join(filter(None, [str(found), decision.reason])), err=True)
                return decision.exit_code(code_of(ended))
            most = self.job.most_requeues if found.kind == "preempted" else self.policy.max_restarts
            count = f"restart {decision.number} of {most}" if decision.number else "hosts that go are not charged"
            echo(f"paceline: {found} ({count}): all hosts start again from the newest checkpoint", err=True)
            deadline = time.monotonic() + _FREE_S  # the launcher of a lost actor saves first
            while is_in_use(folder) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)

    def hear(self, number: int, _: object = None) -> None:
        """Takes a signal, which the loop hands on."""
        self.signals.append(number)
        self.is_cancelled = True

    def _attempt(self) -> list[HostEnd] | int:
        """Starts all hosts once; returns how they ended, or the exit code of a run that did not start."""
        hosts: list[ray_cluster.PlacedWorker] = []
        places = Path(self.job.folder) / ray_cluster.PLACES
        places.unlink(missing_ok=True)
        try:
            reserved = self._reserve()
            if isinstance(reserved, int):
                return reserved
            group, number = reserved
            command = ["bash", "-c", start_command(self.job)]
            workers = self.cluster.start_workers(group, self.options, command, self.job.workdir)
            named = zip(_names([worker.address for worker in workers]), workers, strict=True)
            hosts = [replace(worker, name=name) for name, worker in named]
            answers, names = self._ask(hosts), tuple(host.name for host in hosts)
            # An actor of one rank has one GPU.
            asked = replace(self.job, hosts=names, nodes=len(names), least=len(names), gpus=self.options.gpus)
            if problems := list(compare(asked, answers, Path(self.job.config).read_text(encoding="utf-8"))):
                echo("paceline: " + "\n\n".join(map(str, problems)), err=True)
                return REFUSED
            first = answers[hosts[0].name]
            assert isinstance(first, dict)
            self._run(hosts, number, int(first["port"]))
            told = ", ".join(f"{host.name} on Ray node {host.node[:8]}" for host in hosts)
            places.write_text(f"{told}\n", encoding="utf-8")
            return self._follow(hosts)
        except ray_cluster.LostWorkerError as error:
            return [HostEnd(host="of the cluster", code=None, words=str(error))]
        finally:
            self.cluster.release(hosts)

    def _reserve(self) -> tuple[Any, int] | int:
        """Waits for a placement group; returns it and its hosts, or an exit code: cancelled, or nothing came."""
        deadline, said = time.monotonic() + self.options.wait_s, ""
        group, number = None, 0
        while not self.is_cancelled:
            room = ray_cluster.num_hosts(self.cluster.nodes(), self.options)
            wanted = min(self.job.nodes, max(self.job.least, room))
            if wanted != number:
                if group is not None:
                    self.cluster.release([])
                number, group = wanted, self.cluster.reserve(self.options, wanted * self.options.actors_of_host)
            if group is not None and group.wait(timeout_seconds=_ASK_S):
                return group, number
            if time.monotonic() > deadline:
                echo(f"paceline: Ray had no room for {number} hosts within {self.options.wait_s:g} s", err=True)
                return FAILED
            words = f"waiting for room on the Ray cluster: {number} hosts, and {room} would fit if nothing else ran"
            if words != said:
                echo(f"paceline: {words}", err=True)
                said = words
        return _CANCELLED

    def _ask(self, hosts: Sequence[ray_cluster.PlacedWorker]) -> dict[str, dict[str, Any] | str]:
        """Asks all machines what they have, the first one before the others: it leaves a mark in the shared folder."""
        mark, found = secrets.token_hex(8), dict[str, dict[str, Any] | str]()
        try:
            for some in (hosts[:1], hosts[1:]):
                addresses = [host.address if host is hosts[0] else "" for host in some]
                orders = [look_order(self.job, mark, address) for address in addresses]
                calls = [host.actor.ask.remote(order) for host, order in zip(some, orders, strict=True)]
                for host, call in zip(some, calls, strict=True):
                    found[host.name] = self.cluster.call(call, _ANSWER_S)
        finally:
            forget_mark(self.job.runs)
        return found

    def _run(self, hosts: Sequence[ray_cluster.PlacedWorker], number: int, port: int) -> None:
        command = ray_cluster.command_of(self.job, self.options, number, hosts[0].address, str(port))
        ranks = list(rank_variables(hosts, port)) if self.options.actor == "rank" else [{SWITCH: "none"}] * len(hosts)
        calls = [
            host.actor.run.remote(run_order(self.job, command, self.secret, host.name, **variables))
            for host, variables in zip(hosts, ranks, strict=True)
        ]
        for call in calls:
            self.cluster.call(call, _ANSWER_S)

    def _follow(self, hosts: Sequence[ray_cluster.PlacedWorker]) -> list[HostEnd]:
        """Prints what all hosts print, hands signals on, and ends the others when one is lost; returns all ends."""
        ends: dict[str, HostEnd] = {}
        each = [(host, "" if host is hosts[0] else f"{host.name}: ", ends) for host in hosts]
        threads = [threading.Thread(target=self._print, args=arguments, daemon=True) for arguments in each]
        for thread in threads:
            thread.start()
        since, is_stopping = None, False
        while any(thread.is_alive() for thread in threads):
            while self.signals:
                number = self.signals.pop(0)
                for host in hosts:
                    host.actor.signal.remote(number)
            if ends and since is None:
                since = time.monotonic()
            patience = _DONE_S if any(end.code == DONE for end in list(ends.values())) else _LATE_S
            if since is not None and time.monotonic() - since > patience and not is_stopping:
                is_stopping = True
                for host in hosts:
                    if host.name not in ends:
                        host.actor.stop.remote()
            time.sleep(_LOOK_S)
        return [ends[host.name] for host in hosts if host.name in ends]

    def _print(self, host: ray_cluster.PlacedWorker, prefix: str, ends: dict[str, HostEnd]) -> None:
        code: int | None = None
        try:
            while code is None:
                lines, code = self.cluster.call(host.actor.news.remote(), _ANSWER_S)
                for line in lines:
                    echo(f"{prefix}{line}")
            ends[host.name] = HostEnd(host=host.name, code=code)
        except ray_cluster.LostWorkerError as error:
            ends[host.name] = HostEnd(host=host.name, code=None, words=str(error))


def ended_by(
    ends: Sequence[HostEnd], steps: TrainedSteps, *, options: ray_cluster.RayOptions, is_cancelled: bool
) -> FailedAttempt | int:
    """Returns what ended a run whose hosts have all ended, or the exit code of one that does not start again."""
    codes = {end.code for end in ends}
    for code in (REFUSED, DONE):
        if code in codes:
            return code
    if is_cancelled:
        return code_of(ends)
    # Without launchers on the hosts nobody else has started a rank again that failed.
    is_failure = options.actor == "rank" and PREEMPTED not in codes
    cause = next((end for end in ends if end.is_lost), ends[0] if is_failure else None)
    if cause is None and PREEMPTED not in codes:
        return code_of(ends)
    return FailedAttempt(
        first_step=steps.first_step,
        kind="preempted" if cause is None else "killed" if cause.is_lost else "error",
        rank=0 if cause is None else list(ends).index(cause),
        step=steps.last_step,
        message="the run was asked to leave and saved" if cause is None else str(cause),
    )


def code_of(ends: Sequence[HostEnd]) -> int:
    """Returns the code that says most: a launcher that lost another one leaves with 1."""
    codes = [end.code for end in ends if end.code is not None and end.code <= BY_SIGNAL]
    special = [code for code in codes if code not in (DONE, FAILED)]
    return next((code for code in (PREEMPTED, NO_PROGRESS) if code in special), special[0] if special else FAILED)


def rank_variables(hosts: Sequence[ray_cluster.PlacedWorker], port: int) -> Iterator[dict[str, str]]:
    """Yields what torch's own launcher would set for each actor, where an actor is a rank; ranks of a node adjoin."""
    of_node = Counter(host.node for host in hosts)
    gpus = {node: [gpu for host in hosts if host.node == node for gpu in host.gpus] for node in of_node}
    seen: Counter[str] = Counter()
    for rank, host in enumerate(hosts):
        node, address = host.node, hosts[0].address
        around = Surroundings(launcher="Ray", kind="rank", number=rank, count=len(hosts), address=address, port=port)
        found = replace(around, local_rank=seen[node], host_ranks=of_node[node]).rank_variables()
        yield found | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus[node])} if gpus[node] else {})
        seen[node] += 1


def _names(addresses: Sequence[str]) -> list[str]:
    """Returns a name for each: its address, with a number where several Ray nodes share one."""
    counts, seen = Counter(addresses), Counter[str]()
    names = []
    for address in addresses:
        names.append(address if counts[address] == 1 else f"{address}#{seen[address]}")
        seen[address] += 1
    return names


def main(folder: Path) -> int:
    job = LaunchJob.read(folder)
    try:
        options = ray_cluster.read_options(job)
        policy = load_config(Path(job.config), [word.replace("{task}", "0") for word in job.overrides]).recovery
        cluster = ray_cluster.RayCluster.connect(options.address)
    except (LaunchError, UsageError) as error:
        echo(f"paceline: {error}", err=True)
        return REFUSED if isinstance(error, UsageError) else FAILED
    supervisor = Supervisor(job=job, options=options, cluster=cluster, policy=policy)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, supervisor.hear)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
