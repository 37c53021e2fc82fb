"""Detects the present machine, without torch: its processor, cores, memory and GPUs, and the cluster that it is.

Where the catalog has the GPUs that ``nvidia-smi`` tells of, the machine is taken for that device's usual node; how they
are joined is assumed. A file that ``paceline calibrate`` wrote here takes the catalog's place.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from paceline.cluster.devices import Catalog, Cluster, Device, Node, load_cluster
from paceline.cluster.entries import read_catalog, shipped
from paceline.errors import UsageError
from paceline.units import MIB, format_bytes

_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 20.0
_CPU_HOST = "cpu-host"
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_FLAGS = ("flags", "Features")  # the line of /proc/cpuinfo that lists instructions: of x86, and of ARM
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the system reports of itself; GPUs by the names that their driver has."""

    processor: str
    cores: int
    memory_bytes: float
    gpus: tuple[str, ...] = ()
    gpu_memory_bytes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """This machine, the cluster it is taken for (None where nothing like it is known), and what was assumed."""

    machine: Machine
    cluster: Cluster | None
    assumed: tuple[str, ...]


def detect_machine(*, with_gpus: bool = True) -> Machine:
    """Detects this machine; ``with_gpus`` asks the driver for GPUs, which may take a second."""
    gpus = read_smi(_ask_smi()) if with_gpus else []
    return Machine(
        processor=_cpuinfo(("model name",)) or platform.processor() or platform.machine(),
        cores=len(usable_cores()),
        memory_bytes=host_memory(),
        gpus=tuple(name for name, _ in gpus),
        gpu_memory_bytes=tuple(size for _, size in gpus),
    )


def usable_cores() -> tuple[int, ...]:
    """Returns the cores that this process may run on, which ranks that it starts share out."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def bf16_instructions(proc: Path = _PROC) -> tuple[str, ...]:
    """Returns the bf16 instructions of this host's processor; without any, torch emulates bf16, slower than fp32."""
    told = _cpuinfo(_FLAGS, proc)
    return tuple(name for name in BF16_INSTRUCTIONS if name in told.split())


def _cpuinfo(keys: Collection[str], proc: Path = _PROC) -> str:
    """Returns the first value of these keys; nothing on a system that does not tell."""
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (each.partition(":")[::2] for each in lines)
    return next((value.strip() for key, value in pairs if key.strip() in keys and value.strip()), "")


def host_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> float:
    """Returns the bytes that the processes of this host may have: its memory, or the limit of their container."""
    return min([float(psutil.virtual_memory().total), *_limits(proc, groups)])


def _limits(proc: Path, groups: Path) -> Iterator[float]:
    """Iterates over the limits of this process's control group and of those around it, of both versions."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and "memory" not in names.split(","):
            continue
        root, file = (groups / "memory", "memory.limit_in_bytes") if names else (groups, "memory.max")
        inner = root / path.lstrip("/")  # which a container may not see: then its own is at the root
        for folder in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                yield float(int((folder / file).read_text(encoding="utf-8")))
            if folder == root:
                break


def detect_cluster(machine: Machine, entry: Path | None = None) -> Detected:
    """Returns the cluster that a machine is most like, or what ``entry`` says of it. Raises UsageError."""
    if entry is not None and load_cluster(str(entry)).device.is_cpu == bool(machine.gpus):
        rule = "the ranks run on the other"
        fix = f"measure that one: paceline calibrate --device {'cuda' if machine.gpus else 'cpu'} --output FILE"
        raise UsageError(f"{entry} is an entry of {'a CPU' if machine.gpus else 'a GPU'}\n  {rule}\n  {fix}")
    if not machine.gpus:
        return _as_cpu_host(machine, entry)
    if entry is not None:
        node = replace(load_cluster(str(entry)).node, devices=len(machine.gpus))
        return _one_node(machine, node, f"the GPUs are as {entry} says")
    counts = Counter(machine.gpus)
    name, count = counts.most_common(1)[0]
    others = [f"{n}x {other} is left out: nodes have one kind" for other, n in counts.items() if other != name]
    try:
        device = Catalog().device(name)
    except UsageError as error:
        return Detected(machine=machine, cluster=None, assumed=(str(error),))
    node = replace(Catalog().node(device.name), device=device, devices=count)
    return _one_node(machine, node, f"the GPUs are joined as in {node.name}, by {node.inside.name}", *others)


def _one_node(machine: Machine, node: Node, *assumed: str) -> Detected:
    cluster = Cluster(name=f"{node.devices}x {node.device.name}", node=node, nodes=1, between=None)
    return Detected(machine=machine, cluster=cluster, assumed=assumed)


def alone_device(entry: Path | None = None) -> Device | None:
    """Returns what one rank is that has all cores of a CPU host, where an entry, or the catalog, measured that."""
    name = f"{_cpu_host(entry).device.name}-alone"
    entries = shipped() if entry is None else shipped().with_file(read_catalog(entry))
    return Catalog(entries=entries).node(name).device if name in entries.nodes else None


def _cpu_host(entry: Path | None) -> Node:
    return Catalog().node(_CPU_HOST) if entry is None else load_cluster(str(entry)).node


def read_smi(text: str) -> list[tuple[str, float]]:
    """Reads names and bytes of memory from what ``nvidia-smi`` prints; lines that say something else are left out."""
    found = []
    for line in text.splitlines():
        name, _, size = line.rpartition(",")
        if name.strip() and size.strip().isdigit():
            found.append((name.strip(), float(size) * MIB))
    return found


def _as_cpu_host(machine: Machine, entry: Path | None) -> Detected:
    try:
        node = _cpu_host(entry)
    except UsageError:
        told = "the catalog has no CPU host: measure this one with paceline calibrate --output mine.yaml"
        return Detected(machine=machine, cluster=None, assumed=(told,))
    device = replace(node.device, memory_bytes=machine.memory_bytes / machine.cores)
    node = replace(node, device=device, devices=machine.cores)
    shared = f"ranks share {format_bytes(machine.memory_bytes)} of memory out equally"
    if entry is not None:
        return _one_node(machine, node, f"each of {machine.cores} cores is as fast as {entry} says", shared)
    told = f"each of {machine.cores} cores is as fast as one of {_CPU_HOST}, which was measured elsewhere"
    return _one_node(machine, node, told, shared, "measure this machine: paceline calibrate --output mine.yaml")


_asked: list[subprocess.Popen[str]] = []  # questions whose answers nobody has read yet


def ask_ahead() -> None:
    """Asks the driver for GPUs and does not wait: the next ``detect_machine`` reads the answer."""
    with contextlib.suppress(OSError):  # no driver here
        _asked.append(subprocess.Popen(_SMI, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))


def _ask_smi() -> str:
    if not _asked:
        ask_ahead()
    if not _asked:
        return ""
    with _asked.pop() as process:
        try:
            text, _ = process.communicate(timeout=_SMI_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # a driver that hangs
            process.kill()
            return ""
    return text if process.returncode == 0 else ""
