"""``--on ray``: one actor for each host (or rank) on a Ray cluster that runs already, in a placement group.

A process on this machine (``ray_hosts.py``) holds the actors, keeps the log and, in the end, the exit code. Ray has no
part in the training: the actors start ``paceline train`` on their machines, which meet at the first of them. All that
this package calls of Ray is here; it is an extra (``pip install 'paceline[ray]'``) without types, loaded by name.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from paceline.errors import LaunchError, UsageError
from paceline.launch import background
from paceline.launch.background import cancel as cancel
from paceline.launch.job import JobState, LaunchJob, TargetMachines, gpu_memory, refuse_options, refuse_settings
from paceline.launch.remote import give_order
from paceline.untrusted import parse_json_object

# Each word: the form of its value, and what it is.
SETTINGS: Mapping[str, tuple[str, str]] = {
    "address": (r"\S+", "where the Ray cluster is; without it RAY_ADDRESS, then the cluster of this machine"),
    "actor": (r"host|rank", "host: an actor for each host, which starts the ranks there; rank: one for each rank"),
    "spread": (r"strict|pack", "strict: each host on a Ray node of its own; pack: as few Ray nodes as possible"),
    "cpus": (r"\d{1,5}", "CPUs of each actor, by default one for each rank"),
    "wait_s": (r"\d{1,7}", "seconds to wait for Ray nodes, by default 600"),
    "autoscale": (r"yes|no", "yes: Ray nodes that are missing will come"),
    "pythonpath": (r"\S+", "PYTHONPATH of the runs, where Paceline is not installed"),
}
_NOT_HERE = {"--hosts": "Ray chooses the machines", "--time": "Ray has no time limits", "--queue": "Ray has no queues"}
_STRATEGIES = {("host", "strict"): "STRICT_SPREAD", ("host", "pack"): "PACK", ("rank", "pack"): "PACK"}
_CALLS = 4  # of an actor at once: one waits for output while others signal
_ANSWER_S = 120.0
_ACCELERATOR = "accelerator_type:"
_NEWS_S = 1.0  # that a call waits for output
_MOST_LINES = 1000
_END_S = 10.0
_MOST_WORDS = 120  # of Ray's own, in a sentence of ours
_CAUSES = {  # by a phrase of Ray's
    "low on memory": "Ray ended it, since its node was short of memory",
    "node has died": "its Ray node is gone",
    "worker process has died": "its process on the Ray node is gone",
    "killed by `ray.kill`": "it was ended through Ray",
    "is unavailable": "its Ray node does not answer",
}
PLACES = "places"  # in the launch's folder: which host is where


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How a run takes its place on a Ray cluster: ``actors_of_host`` bundles of ``bundle`` for each host."""

    address: str
    actor: Literal["host", "rank"]
    strategy: str
    cpus: int
    gpus: int
    ranks: int
    wait_s: float
    waits_for_nodes: bool
    pythonpath: str

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray sets aside for one actor."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    @property
    def actors_of_host(self) -> int:
        return 1 if self.actor == "host" else self.ranks


def read_options(job: LaunchJob) -> RayOptions:
    """Returns the options of a launch. Raises UsageError for a word or a value that Ray's target does not take."""
    refuse_options(job, _NOT_HERE)
    refuse_settings(job, SETTINGS)
    for word, text in job.settings.items():
        form, meaning = SETTINGS[word]
        if re.fullmatch(form, text) is None:
            raise UsageError(f"--set {word}={text}\n  {meaning}\n  give another value")
    actor = cast(Literal["host", "rank"], job.settings.get("actor", "host"))
    spread = job.settings.get("spread", "strict" if actor == "host" else "pack")
    if (actor, spread) not in _STRATEGIES:
        what = "--set actor=rank with --set spread=strict"
        raise UsageError(f"{what}\n  ranks of one host share a Ray node\n  use actor=host")
    return RayOptions(
        address=job.settings.get("address", "auto"),
        actor=actor,
        strategy=_STRATEGIES[actor, spread],
        cpus=int(job.settings.get("cpus", job.ranks if actor == "host" else 1)),
        gpus=job.gpus if actor == "host" else min(1, job.gpus),
        ranks=job.ranks,
        wait_s=float(job.settings.get("wait_s", 600)),
        waits_for_nodes=job.settings.get("autoscale") == "yes",
        pythonpath=job.settings.get("pythonpath", ""),
    )


class LostWorkerError(Exception):
    """An actor died, or its Ray node did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A machine of the cluster that lives: its address and what Ray may give away of it."""

    id: str
    address: str
    resources: Mapping[str, float]

    def num_bundles(self, bundle: Mapping[str, float]) -> int:
        """Returns how many bundles would fit on this node if nothing else were there."""
        return min(int(self.resources.get(name, 0.0) // amount) if amount else 2**16 for name, amount in bundle.items())

    @property
    def gpu_bytes(self) -> float | None:
        """The memory of its GPUs, if the catalog knows the kind that Ray has found."""
        kinds = (name.removeprefix(_ACCELERATOR).lower() for name in self.resources if name.startswith(_ACCELERATOR))
        return next((memory for kind in kinds if (memory := gpu_memory(kind)) is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorker:
    """An actor, the node that it is on, and its name in messages."""

    actor: Any
    node: str
    address: str
    gpus: tuple[str, ...] = ()
    name: str = ""


@dataclass(slots=True)
class RayCluster:
    """A connection to a Ray cluster. Everything that was placed ends with it."""

    ray: Any
    address: str
    _groups: list[Any] = field(default_factory=list)

    @classmethod
    def connect(cls, address: str) -> RayCluster:
        """Connects to the cluster at ``address``. Raises LaunchError where none answers or Ray is not installed."""
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            why = "Ray is not installed here\n  --on ray starts actors on a Ray cluster"
            raise LaunchError(f"{why}\n  pip install 'paceline[ray]'") from error
        if not ray.is_initialized():
            try:
                host, _, port = address.rpartition(":")
                if host and port.isdecimal() and "/" not in host:  # Ray itself tries for a minute where nothing listens
                    socket.create_connection((host, int(port)), timeout=10.0).close()
                ray.init(address=address, namespace="paceline", log_to_driver=False, logging_level="ERROR")
            except (OSError, RuntimeError, ValueError, TimeoutError) as error:  # ConnectionError is an OSError
                said = str(error).strip().splitlines()
                what = f"no Ray cluster answers at address {address}: {said[0] if said else type(error).__name__}"
                fix = "start one (ray start --head), or name it: --set address=HOST:6379, or RAY_ADDRESS"
                raise UsageError(f"{what}\n  --on ray uses a cluster that runs already\n  {fix}") from error
        return cls(ray, str(ray.get_runtime_context().gcs_address))

    def nodes(self) -> list[RayNode]:
        """Returns the nodes that live, in the order of their addresses."""
        found = []
        for each in (node for node in self.ray.nodes() if node["Alive"]):
            address = str(each["NodeManagerAddress"])
            found.append(RayNode(id=str(each["NodeID"]), address=address, resources=each["Resources"]))
        return sorted(found, key=lambda node: (node.address, node.id))

    def reserve(self, options: RayOptions, count: int) -> Any:
        """Asks Ray for ``count`` bundles, which it sets aside together or not at all."""
        util = importlib.import_module("ray.util")
        group = util.placement_group([options.bundle] * count, strategy=options.strategy)
        self._groups.append(group)
        return group

    def start_workers(
        self, group: Any, options: RayOptions, command: Sequence[str], workdir: str
    ) -> list[PlacedWorker]:
        """Starts an actor in each bundle. Raises LostWorkerError where one does not start."""
        place = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        kind = self.ray.remote(RemoteWorker)
        actors = [
            kind.options(
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                max_concurrency=_CALLS,
                scheduling_strategy=place(placement_group=group, placement_group_bundle_index=index),
                **({"runtime_env": {"env_vars": {"PYTHONPATH": path}}} if (path := options.pythonpath) else {}),
            ).remote(list(command), workdir)
            for index in range(len(group.bundle_specs))
        ]
        placed = []
        for actor in actors:
            node, address, gpus = self.call(actor.place.remote(), _ANSWER_S)
            placed.append(PlacedWorker(actor=actor, node=node, address=address, gpus=tuple(gpus)))
        return sorted(placed, key=lambda worker: (worker.address, worker.node))

    def call(self, reference: Any, within_s: float) -> Any:
        """Returns what a call of an actor returned. Raises LostWorkerError if the actor is gone or does not answer."""
        errors = importlib.import_module("ray.exceptions")
        try:
            return self.ray.get(reference, timeout=within_s)
        except errors.GetTimeoutError as error:
            raise LostWorkerError(f"did not answer within {within_s:g} s") from error
        except errors.RayError as error:
            raise LostWorkerError(cause_of(str(error)) or type(error).__name__) from error

    def release(self, workers: Sequence[PlacedWorker]) -> None:
        """Ends actors, and gives their bundles back."""
        for worker in workers:
            with contextlib.suppress(Exception):  # it is gone already, in whichever words Ray says so
                self.ray.kill(worker.actor)
        util = importlib.import_module("ray.util")
        while self._groups:
            group = self._groups.pop()
            util.remove_placement_group(group)
            deadline = time.monotonic() + _ANSWER_S
            while util.placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < deadline:
                time.sleep(0.1)


def cause_of(words: str) -> str:
    """Returns what Ray's words about an actor come to, which are several hundred characters; else their last line."""
    lines = [line.strip() for line in words.splitlines() if line.strip()] or [""]
    short = lines[-1] if len(lines[-1]) <= _MOST_WORDS else lines[-1][: _MOST_WORDS - 3] + "..."
    return next((cause for phrase, cause in _CAUSES.items() if phrase in words), short)


class RemoteWorker:
    """The actor: it has ``paceline.launch.remote`` run on its machine by ``command``, and hands over orders and output.

    Several threads call it at once. When it is gone, the pipe closes, and the run there is asked to save and to leave.
    """

    def __init__(self, command: Sequence[str], workdir: str) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=workdir, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)

    def place(self) -> tuple[str, str, list[str]]:
        """Returns the Ray node, the address, and the GPUs that Ray gave to this actor."""
        ray = importlib.import_module("ray")
        gpus = [str(each) for each in ray.get_gpu_ids()]
        return str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address()), gpus

    def ask(self, order: Mapping[str, object]) -> dict[str, Any] | str:
        """Gives an order that is answered by one line of JSON; returns why there is no answer as a text."""
        assert self._process.stdout is not None
        give_order(self._process, order)
        said = ""
        for line in self._process.stdout:
            said = line.decode("utf-8", "replace").strip() or said
            with contextlib.suppress(ValueError):
                return parse_json_object(line)
        return f"does not start Paceline: {said or f'exit code {self._process.wait()}'}"

    def run(self, order: Mapping[str, object]) -> None:
        """Starts the command of an order. The job's secret is in the order, and so on no command line."""
        give_order(self._process, order)
        self._reader.start()

    def news(self) -> tuple[list[str], int | None]:
        """Returns the lines that the command has printed since, after a second at most; its exit code when it ended."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._lines.get(timeout=_NEWS_S))
            while len(found) < _MOST_LINES:
                found.append(self._lines.get_nowait())
        code = self._process.poll()
        if code is None:
            return found, None
        self._reader.join(_NEWS_S)  # processes that the command left behind may hold its output open
        while not self._lines.empty():
            found.append(self._lines.get_nowait())
        return found, 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        give_order(self._process, {"do": "signal", "number": number})

    def stop(self) -> None:
        """Ends the command without a save: at once, or after some seconds by force."""
        for number in (signal.SIGINT, signal.SIGKILL):
            self.signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                return
        self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode("utf-8", "replace").rstrip())


def machines(job: LaunchJob) -> TargetMachines:
    """Asks the cluster for its nodes. Raises UsageError where too few of them are large enough."""
    options = read_options(job)
    cluster = RayCluster.connect(options.address)
    able = [node for node in cluster.nodes() if node.num_bundles(options.bundle) > 0]
    room = num_hosts(able, options)
    notes = [f"the Ray cluster is {cluster.address}", *(_describe(node) for node in able)]
    if room < job.least:
        if not options.waits_for_nodes:
            needs = " and ".join(f"{amount:g} {name}" for name, amount in options.bundle.items())
            there = "; ".join(map(_describe, cluster.nodes()))
            where = "a Ray node of its own" if options.strategy == "STRICT_SPREAD" else "a Ray node"
            what = f"--nodes {job.least}, and the Ray cluster {cluster.address} has room for {room}"
            rule = f"each {options.actor} needs {needs} on {where}: {there or 'no node lives'}"
            fix = "ask for less (--nodes, --gpus-per-node, --set cpus=N), or let nodes come: --set autoscale=yes"
            raise UsageError(f"{what}\n  {rule}\n  {fix}")
        notes.append(f"there is room for {room} hosts now; the run waits for {job.least}")
    elif room < job.nodes:
        notes.append(f"there is room for {room} hosts of {job.nodes} now, and {job.least} are enough")
    memory = [node.resources["memory"] for node in able if "memory" in node.resources]
    gpus = [node.gpu_bytes for node in able]
    known = None if not gpus or None in gpus else min(each for each in gpus if each is not None)
    where, least = "a node of the Ray cluster", min(memory, default=None)
    return TargetMachines(where=where, device_bytes=known, host_bytes=least, notes=tuple(notes))


def num_hosts(nodes: list[RayNode], options: RayOptions) -> int:
    """Returns how many hosts of the run would fit on these nodes, if nothing else ran there."""
    room = [node.num_bundles(options.bundle) for node in nodes]
    if options.strategy == "STRICT_SPREAD":
        return sum(each > 0 for each in room)
    return sum(room) // options.actors_of_host


def render(job: LaunchJob) -> str:
    options = read_options(job)
    per_host, hosts = options.actors_of_host, job.nodes
    lines = [f"placement group: {options.strategy}, {hosts * per_host} bundles of {json.dumps(options.bundle)}"]
    each = job.ranks // per_host
    for bundle in range(hosts * per_host):
        ranks = f"rank {bundle}" if each == 1 else f"ranks {bundle * each} to {(bundle + 1) * each - 1}"
        lines.append(f"bundle {bundle}: {ranks}{', where the others meet' if bundle == 0 and hosts > 1 else ''}")
    command = command_of(job, options, hosts, "ADDRESS-OF-BUNDLE-0", str(job.port or "PORT"))
    lines.append(f"each runs: {shlex.join(command)}")
    return "".join(f"{line}\n" for line in lines)


def command_of(job: LaunchJob, options: RayOptions, hosts: int, address: str, port: str) -> list[str]:
    """Returns what each actor runs: a launcher of several, the only launcher, or a rank."""
    if hosts < job.nodes:
        job = replace(job, overrides=(*job.overrides, f"parallel.ranks={hosts * job.ranks}"))
    if options.actor == "rank" or hosts == 1:
        return job.command()
    return job.command("--nnodes", str(hosts), "--rdzv", f"{address}:{port}", "--node-ranks", str(job.ranks))


def submit(job: LaunchJob) -> str:
    (Path(job.folder) / "script").write_text(render(job), encoding="utf-8")
    return background.hold(job, "paceline.launch.ray_hosts")


def state(job: LaunchJob) -> JobState:
    found, places = background.state(job), Path(job.folder) / PLACES
    if found.kind != "running":
        return found
    if not places.is_file():
        return JobState(kind="waiting", words="waiting for Ray nodes")
    return JobState(kind="running", words=f"running: {places.read_text(encoding='utf-8').strip()}")


def _describe(node: RayNode) -> str:
    gpus = f", {node.resources['GPU']:g} GPUs" if node.resources.get("GPU") else ""
    return f"Ray node {node.address} ({node.id[:8]}): {node.resources.get('CPU', 0):g} CPUs{gpus}"
