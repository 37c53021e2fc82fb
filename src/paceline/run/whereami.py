"""Where am I: how this process was started, and by which variables it knows.

    recognise(os.environ)  ->  Surroundings(launcher="Slurm", kind="host", number=1, count=4, address="n1", port=20417)

Three things can be: ``alone`` (this process starts ranks on this machine), ``rank`` (a launcher has started one process
for each rank) and ``host`` (a launcher has started one process on each host, which starts the ranks there). Whatever
sets variables for its processes is asked in this order; the first that has is believed:

    torchrun            TORCHELASTIC_RUN_ID, RANK, ...                                    rank
    Ray Train           RAY_JOB_ID, RANK, WORLD_SIZE, ...                                 rank
    Kubeflow            PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...                   host
    the environment     RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT                        rank
                        NODE_RANK, NNODES (or WORLD_SIZE), MASTER_ADDR, MASTER_PORT       host
    Open MPI, Hydra     OMPI_COMM_WORLD_RANK, PMI_RANK, ...; MASTER_ADDR on several hosts rank
    Slurm               SLURM_PROCID, SLURM_STEP_NODELIST, ...: one task a node           host
                        several tasks a node                                              rank
    Kubernetes          JOB_COMPLETION_INDEX, NNODES, MASTER_ADDR                         host

What is missing or contradictory is refused, all of it at once: a process that trained alone instead would train an
unrelated run on each host. ``PACELINE_LAUNCHER=none`` says that this process is alone whatever the variables say.

[Note: hosts] ``paceline train CONFIG --nnodes 1:4 --rdzv HOST:PORT`` is the same on every host. The launcher on HOST
listens there alone (``rendezvous.py``), and must stay. All have one secret, which the first leaves in the run's folder.
When a host goes or comes, all ranks are started again from the newest checkpoint. One that is gone is missed at once if
its launcher has ended, else after five seconds; the others then wait ``LAST_CALL_S``.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import psutil

from paceline.errors import ConfigError, Problem, UsageError

SWITCH = "PACELINE_LAUNCHER"
SOURCE = "the launcher's environment"  # of the problems that are found here
_PORT = 29500  # torchrun's own, where a launcher leaves it open
_FIRST_PORT, _PORTS = 20000, 10000  # below those that systems hand out
_INTERACTIVE_STEP = "4294967290"  # the shell of salloc
_ENDPOINT = re.compile(r"(?P<host>\[[^\]]+\]|[^:\s]+):(?P<port>\d{1,5})")
LAST_CALL_S = 3
HOST = "PACELINE_HOST"  # what this host is called, where several have the same name, as containers may


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """How this process was started: ``number`` of ``count`` ranks or hosts, which meet at ``address`` and ``port``.

    ``least`` hosts are enough where the launcher may start fewer; see [Note: hosts]. ``host_ranks`` is how many ranks
    a host has; None: one per GPU. ``because`` are the variables that were read; the variable or option ``named_by``
    has the address.
    """

    launcher: str
    kind: Literal["alone", "rank", "host"] = "alone"
    number: int = 0
    count: int = 1
    least: int = 1
    local_rank: int | None = None
    host_ranks: int | None = None
    address: str = ""
    port: int = 0
    named_by: str = "MASTER_ADDR"
    because: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "alone":
            return f"{self.launcher}: this process starts the ranks of a run on this machine"
        read = f" ({', '.join(self.because)})" if self.because else ""
        return f"{self.launcher}: {self.kind} {self.number} of {self.count}, meeting at {self.endpoint}{read}"

    def rank_variables(self) -> dict[str, str]:
        """Returns what torch's own launcher would set for this process; a host's only process is its only rank."""
        if self.kind == "alone":
            return {}
        local, here = (0, 1) if self.kind == "host" else (self.local_rank, self.host_ranks)
        found = {"RANK": self.number, "WORLD_SIZE": self.count, "MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        found |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}
        return {name: str(value) for name, value in found.items() if value is not None}

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"

    def own_address(self) -> str:
        return address_towards(self.address, self.port, self.named_by)


def recognise(environment: Mapping[str, str]) -> Surroundings:
    """Finds out how this process was started. Raises ConfigError with all that is missing or contradictory."""
    if environment.get(SWITCH) == "none":
        return Surroundings(launcher=f"{SWITCH}=none")
    read = _VariableReader(environment)
    found = _recognise(read)
    if SWITCH in environment:
        read.problem(f"{SWITCH} = {environment[SWITCH]}", "the only value is none: this process starts its own ranks")
    if read.problems:
        raise ConfigError(read.problems, source=SOURCE)
    return found


def first_host(names: str) -> str:
    """Returns the first host of a list as Slurm writes it: ``gpu[07-09,12],login`` is gpu07."""
    first = re.split(r",(?![^\[]*\])", names)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def tasks_of_node(text: str, node: int) -> int | None:
    """Returns how many tasks a node has, of a list as Slurm writes it: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None or int(found[2] or 1) > 2**16:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node] if node < len(counts) else None


@dataclass(slots=True)
class _VariableReader:
    """Reads variables, and collects what is wrong with them."""

    environment: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        return any(self.environment.get(name) for name in names)

    def problem(self, what: str, rule: str, fix: str = f"or train in this process alone: {SWITCH}=none") -> None:
        self.problems.append(Problem(what=what, rule=rule, fix=fix))

    def text(self, name: str, meaning: str) -> str:
        found = self.environment.get(name, "")
        if not found:
            self.problem(f"{name} is not set", f"it is {meaning}")
        return found

    def number(self, name: str, meaning: str, *, least: int = 0, default: int | None = None) -> int:
        if default is not None and not self.has(name):
            return default
        given = self.text(name, meaning)
        if given and (not re.fullmatch(r"\d{1,9}", given) or int(given) < least):
            self.problem(f"{name} = {given}", f"it is {meaning}: a whole number from {least} on")
            return least
        return int(given or least)

    def number_if_set(self, name: str, meaning: str, *, least: int = 0) -> int | None:
        return self.number(name, meaning, least=least) if self.has(name) else None

    def port(self, name: str, default: int | None = None) -> int:
        found = self.number(name, "the port at which the ranks meet", least=1, default=default)
        if found >= 2**16:
            self.problem(f"{name} = {found}", "a port is a number below 65536", "choose a free one, such as 29500")
        return found

    def number_of(self, name: str, meaning: str, of: str, count: int, default: int | None = None) -> int:
        """Reads which of ``count`` this one is, as the variable ``of`` says how many there are."""
        number = self.number(name, meaning, default=default)
        if number >= count and not self.problems:
            self.problem(f"{name} = {number} with {of} = {count}", f"{name} counts from 0 to {of} - 1")
        return number


def _recognise(read: _VariableReader) -> Surroundings:
    if read.has("TORCHELASTIC_RUN_ID") and read.has("RANK"):
        return _rank_of_environment(read, "torchrun")
    if read.has("RAY_JOB_ID") and read.has("RANK"):
        return _rank_of_environment(read, "Ray Train")
    if read.has("PET_NNODES", "PET_NODE_RANK"):
        return _host_of_kubeflow(read)
    if read.has("RANK"):
        return _rank_of_environment(read, "the environment")
    if read.has("NODE_RANK"):
        return _host_of_environment(read, "the environment", "NODE_RANK")
    if read.has("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"):
        return _rank_of_mpi(read)
    if read.has("SLURM_JOB_ID") and not read.has("RAY_JOB_ID"):
        return _task_of_slurm(read)
    if read.has("PMI_RANK", "PMIX_RANK"):
        return _rank_of_mpi(read)
    if read.has("JOB_COMPLETION_INDEX"):
        return _host_of_environment(read, "Kubernetes", "JOB_COMPLETION_INDEX")
    # Nothing says which rank this is. A meeting point elsewhere, or a world of several, says that there are others.
    address, world = read.environment.get("MASTER_ADDR", ""), read.environment.get("WORLD_SIZE", "1")
    if world != "1" or not is_loopback(address or "localhost") or read.environment.get("NNODES", "1") != "1":
        names = ("NNODES", "WORLD_SIZE", "MASTER_ADDR")
        told = [f"{name}={read.environment[name]}" for name in names if read.has(name)]
        read.problem(
            f"{' '.join(told)}, and neither RANK nor NODE_RANK is set",
            "a process of several must know which it is: RANK where a launcher starts every rank, NODE_RANK where it "
            "starts one process on each host",
            f"set one of them, or take the others away; to train in this process alone: {SWITCH}=none",
        )
    return Surroundings(launcher="no launcher")


def _rank(read: _VariableReader, launcher: str, names: Sequence[str]) -> Surroundings:
    """Reads a rank by the ``names`` of its number, of that of all, of its number on its host, and of that of these."""
    world = read.number(names[1], "the number of ranks", least=1)
    number = read.number_of(names[0], "the number of this rank", names[1], world)
    local = read.number_if_set(names[2], "the number of this rank on its host")
    here = read.number_if_set(names[3], "the ranks of this host", least=1)
    found = Surroundings(launcher=launcher, kind="rank", number=number, count=world, because=tuple(names[:2]))
    return replace(found, local_rank=local, host_ranks=here)


def _rank_of_environment(read: _VariableReader, launcher: str) -> Surroundings:
    found = _rank(read, launcher, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if found.local_rank is not None and found.host_ranks is not None and not read.problems:
        read.number_of("LOCAL_RANK", "the number of this rank on its host", "LOCAL_WORLD_SIZE", found.host_ranks)
    address = read.text("MASTER_ADDR", "the host at which the ranks meet")
    # Our own launcher gives its socket, and in place of the port the number of the meeting, which begins with 0.
    is_ours = address.startswith(("unix:", "tcp:"))
    port = read.number("MASTER_PORT", "the number of the meeting") if is_ours else read.port("MASTER_PORT")
    return replace(found, address=address, port=port, because=(*found.because, "MASTER_ADDR"))


def _host_of_kubeflow(read: _VariableReader) -> Surroundings:
    least, most = _counts(read, "PET_NNODES")
    lone = 0 if most == 1 else None
    number = read.number_of("PET_NODE_RANK", "the number of this host", "PET_NNODES", most, default=lone)
    ranks = read.environment.get("PET_NPROC_PER_NODE", "auto")
    if ranks not in ("auto", "gpu", "cpu") and not re.fullmatch(r"[1-9]\d{0,5}", ranks):
        read.problem(f"PET_NPROC_PER_NODE = {ranks}", "it is the number of ranks of a host, or auto", "set a number")
    host_ranks = int(ranks) if ranks.isdecimal() else None
    if most == 1 and host_ranks is None:
        return Surroundings(launcher="Kubeflow TrainJob", because=("PET_NNODES",))
    endpoint, named_by = read.environment.get("PET_RDZV_ENDPOINT", ""), "PET_MASTER_ADDR"
    if endpoint and not read.has("PET_MASTER_ADDR"):
        address, _, digits = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
        port = int(digits) if digits.isdecimal() else _PORT
        named_by = "PET_RDZV_ENDPOINT"
    else:
        is_lone = most == 1 and not read.has("PET_MASTER_ADDR")
        address = "127.0.0.1" if is_lone else read.text("PET_MASTER_ADDR", "the host at which the others meet")
        port = read.port("PET_MASTER_PORT", _PORT)
    because = tuple(name for name in ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE") if read.has(name))
    found = Surroundings(launcher="Kubeflow TrainJob", kind="host", number=number, count=most, because=because)
    return replace(found, least=least, host_ranks=host_ranks, address=address, port=port, named_by=named_by)


def _host_of_environment(read: _VariableReader, launcher: str, index: str) -> Surroundings:
    """A process on each host. Without NNODES, WORLD_SIZE counts hosts: nobody has counted ranks yet."""
    counts, least, most = "NNODES" if read.has("NNODES") else "WORLD_SIZE", 1, 1
    if read.has(counts):
        least, most = _counts(read, counts)
        lone = 0 if most == 1 else None
        number = read.number_of(index, "the number of this host", counts, most, default=lone)
    else:
        what = f"{index} = {read.environment.get(index, '')}, and neither NNODES nor WORLD_SIZE is set"
        read.problem(what, "one of them is the number of hosts")
        number = read.number(index, "the number of this host")
    ranks = read.number_if_set("LOCAL_WORLD_SIZE", "the ranks of a host", least=1)
    if not read.problems and most == 1:
        return Surroundings(launcher=launcher, because=(index, counts))
    address = read.text("MASTER_ADDR", "the host at which the others meet")
    because = (index, counts, "MASTER_ADDR")
    found = Surroundings(launcher=launcher, kind="host", number=number, count=most, least=least, because=because)
    return replace(found, host_ranks=ranks, address=address, port=read.port("MASTER_PORT", _PORT))


def _rank_of_mpi(read: _VariableReader) -> Surroundings:
    if read.has("OMPI_COMM_WORLD_RANK"):
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    elif read.has("PMI_RANK"):
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    else:
        names = ["PMIX_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    found = _rank(read, "MPI", names)
    if found.count == 1 and not read.problems:
        return Surroundings(launcher="MPI", because=(names[1],))
    if found.host_ranks == found.count and not read.has("MASTER_ADDR"):
        of_job = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_FD", "PMI_PORT", "HYDI_CONTROL_FD")
        job = next((read.environment[name] for name in of_job if read.has(name)), "")
        return replace(found, address="127.0.0.1", port=_port_for(job))
    if not read.has("MASTER_ADDR"):
        rule = "MPI does not say on which host rank 0 is, and the ranks of several hosts meet there"
        fix = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..., with the first host of the list"
        read.problem("MASTER_ADDR is not set", rule, fix)
    return replace(found, address=read.environment.get("MASTER_ADDR", ""), port=read.port("MASTER_PORT", _PORT))


def _task_of_slurm(read: _VariableReader) -> Surroundings:
    job = read.environment["SLURM_JOB_ID"]
    if not read.has("SLURM_STEP_ID") or read.environment["SLURM_STEP_ID"] == _INTERACTIVE_STEP:
        nodes = read.number("SLURM_JOB_NUM_NODES", "the number of nodes of the job", least=1, default=1)
        if nodes > 1:
            what = f"Slurm job {job} has {nodes} nodes, and this process is on one of them"
            fix = f"srun paceline train ...; to train on this node alone: {SWITCH}=none"
            read.problem(what, "srun starts a process on every node", fix)
        return Surroundings(launcher="Slurm", because=("SLURM_JOB_ID",))
    tasks = read.number("SLURM_STEP_NUM_TASKS", "the number of tasks of the step", least=1)
    nodes = read.number("SLURM_STEP_NUM_NODES", "the number of nodes of the step", least=1)
    task = read.number_of("SLURM_PROCID", "the number of this task", "SLURM_STEP_NUM_TASKS", tasks)
    if tasks == 1:
        return Surroundings(launcher="Slurm", because=("SLURM_STEP_NUM_TASKS",))
    address, named_by = read.environment.get("MASTER_ADDR", ""), "MASTER_ADDR"
    if not address:
        address, named_by = first_host(read.text("SLURM_STEP_NODELIST", "the nodes of the step")), "SLURM_STEP_NODELIST"
    port = read.port("MASTER_PORT", _port_for(f"{job}.{read.environment['SLURM_STEP_ID']}"))
    because = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    host = Surroundings(launcher="Slurm", kind="host", number=task, count=tasks, least=tasks, because=because)
    host = replace(host, address=address, port=port, named_by=named_by)
    if tasks == nodes:
        return host
    node = read.number("SLURM_NODEID", "the number of this node")
    local = read.number("SLURM_LOCALID", "the number of this task on its node")
    here = tasks_of_node(read.text("SLURM_STEP_TASKS_PER_NODE", "the tasks of each node"), node)
    return replace(host, kind="rank", local_rank=local, host_ranks=here)


def _counts(read: _VariableReader, name: str) -> tuple[int, int]:
    """Reads a number of hosts: ``4``, or the fewest and the most, ``2:4``."""
    given = read.text(name, "the number of hosts")
    counts = _parse_counts(given)
    if given and counts is None:
        read.problem(f"{name} = {given}", "it is a number of hosts, or the fewest and the most: 2:4", "set a number")
    return counts or (1, 1)


def _parse_counts(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    return (least, most) if 1 <= least <= most else None


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _port_for(job: str) -> int:
    """Returns a port that all processes of a job find by themselves, and others of the host mostly do not."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def parse_nodes(counts: str, endpoint: str, ranks: int | None = None) -> Surroundings:
    """Reads ``--nnodes`` (``2`` or ``1:4``) and ``--rdzv`` (``HOST:PORT``). Raises UsageError for what is neither."""
    hosts = _parse_counts(counts)
    if hosts is None:
        rule = "it is a number of hosts, or the fewest and the most: 1:4"
        raise UsageError(f"--nnodes {counts}\n  {rule}\n  try --nnodes 1:2")
    place = _ENDPOINT.fullmatch(endpoint)
    if place is None or not 0 < int(place["port"]) < 2**16:
        what = f"--rdzv {endpoint}"
        fix = "try --rdzv $(hostname):29400 on a first host, and the same text on the others"
        raise UsageError(f"{what}\n  it is the name of one of the hosts, and a port of it: HOST:PORT\n  {fix}")
    address, port = place["host"].strip("[]"), int(place["port"])
    found = Surroundings(launcher="--nnodes", kind="host", least=hosts[0], count=hosts[1], host_ranks=ranks)
    return replace(found, address=address, port=port, named_by="--rdzv")


def address_towards(host: str, port: int, named_by: str = "--rdzv") -> str:
    """Returns the address under which others that reach ``host`` reach this machine. Raises UsageError without one."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        what = f"{named_by}{' ' if named_by.startswith('-') else ' = '}{host}: {error.strerror or error} (port {port})"
        raise UsageError(f"{what}\n  all launchers must reach that host\n  check its name") from error


def host_name() -> str:
    return os.environ.get(HOST) or socket.gethostname()


def interface_of(address: str) -> str | None:
    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == address for entry in entries)), None)
