"""``--on ray``: one actor for each host (or rank) on a Ray cluster that runs already, in a placement group.

A process on this machine (``ray_hosts.py``) holds the actors, keeps the log and, in the end, the exit code. Ray has no
part in the training: the actors start ``paceline train`` on their machines, which meet at the first of them.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch import background
from paceline.launch.background import cancel as cancel
from paceline.launch.job import JobState, LaunchJob
from paceline.launch.ray_cluster import RayCluster, RayNode
from paceline.launch.ray_settings import RayOptions, read_options
from paceline.launch.target import TargetMachines

PLACES = "places"  # in the launch's folder: which host is where


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
            there = "; ".join(_describe(node) for node in cluster.nodes())
            where = "a Ray node of its own" if options.strategy == "STRICT_SPREAD" else "a Ray node"
            raise UsageError(
                f"--nodes {job.least}, and the Ray cluster {cluster.address} has room for {room}\n"
                f"  each {options.actor} needs {needs} on {where}: {there or 'no node lives'}\n"
                "  ask for less (--nodes, --gpus-per-node, --set cpus=N), or let nodes come: --set autoscale=yes"
            )
        notes.append(f"there is room for {room} hosts now; the run waits for {job.least}")
    elif room < job.nodes:
        notes.append(f"there is room for {room} hosts of {job.nodes} now, and {job.least} are enough")
    memory = [node.resources["memory"] for node in able if "memory" in node.resources]
    gpus = [node.gpu_bytes for node in able]
    return TargetMachines(
        where="a node of the Ray cluster",
        device_bytes=None if not gpus or None in gpus else min(each for each in gpus if each is not None),
        host_bytes=min(memory, default=None),
        notes=tuple(notes),
    )


def num_hosts(nodes: list[RayNode], options: RayOptions) -> int:
    """Returns how many hosts of the run would fit on these nodes, if nothing else ran there."""
    room = [node.num_bundles(options.bundle) for node in nodes]
    if options.strategy == "STRICT_SPREAD":
        return sum(each > 0 for each in room)
    return sum(room) // options.actors_of_host


def render(job: LaunchJob) -> str:
    """Returns the placement group, and what its actors run."""
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
    """Starts the process that holds the actors."""
    (Path(job.folder) / "script").write_text(render(job), encoding="utf-8")
    return background.hold(job, "paceline.launch.ray_hosts")


def state(job: LaunchJob) -> JobState:
    """Says where the hosts are, and whether the process that holds them lives."""
    found = background.state(job)
    places = Path(job.folder) / PLACES
    if found.kind == "running" and places.is_file():
        return JobState(kind="running", words=f"running: {places.read_text(encoding='utf-8').strip()}")
    if found.kind == "running":
        return JobState(kind="waiting", words="waiting for Ray nodes")
    return found


def _describe(node: RayNode) -> str:
    gpus = f", {node.resources['GPU']:g} GPUs" if node.resources.get("GPU") else ""
    return f"Ray node {node.address} ({node.id[:8]}): {node.resources.get('CPU', 0):g} CPUs{gpus}"
