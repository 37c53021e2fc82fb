"""What a run on Kubernetes is asked to be, and every problem of it at once. No torch in here.

A *node* here is a pod with one launcher and its ranks; Kubernetes puts it on a machine. ``SETTINGS`` are the words of a
command line: ``--set image=paceline:0.1 --set kind=jobset``.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from paceline.config import Config, check_hosts, with_precision
from paceline.errors import ConfigError, Problem, UsageError
from paceline.launch.job import LaunchJob, read_time, refuse_settings
from paceline.launch.pod_patch import read_patch
from paceline.predict.memory.memory import rank_estimates

Kind = Literal["job", "statefulset", "jobset", "trainjob"]
Gang = Literal["none", "kueue", "volcano"]
AccessMode = Literal["ReadWriteMany", "ReadWriteOnce"]

_MOST_SHOWN = 60  # characters of a value in a message
_MOST_NAME = 40  # Kubernetes takes 63, and appends indices to the names of pods and services
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_RESOURCE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_IMAGE = re.compile(r"[\w./:@-]+")

# Segments of ranks that share memory take 40 MiB and NCCL some 10 MiB for each pair; loader workers need the rest.
_SHM_BASE_GIB, _SHM_RANK_GIB = 0.25, 0.125
# What a rank has where nobody says more: CPUs, GiB for its process, its loader workers and files that are read again.
_GPU_RANK = {"cpus": 6, "memory_gib": 16, "shm_gib": 2}
_CPU_RANK = {"cpus": 2, "memory_gib": 3, "shm_gib": 1}
_LEAST_SHM_GIB = 2
_MARGIN = 1.25  # an estimate is an estimate, and a pod over its limit is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """A run on Kubernetes, and what each of its pods gets; ``sized`` decides the sizes that are None.

    ``min_nodes``: the run starts with so many pods, and others join; None: with all. ``ranks``: of a pod without GPUs;
    with GPUs one rank has one of them. ``queue``: of Kueue or Volcano. ``claim``: a volume claim for the runs that is
    there already; None: one of ``size_gib`` and ``storage_class`` is made. ``patch``: of the template of the pods, for
    all that has no word here (``pod_patch.py``). ``scrape_from``: a namespace whose Prometheus may read the page.
    """

    name: str
    image: str
    kind: Kind = "job"
    nodes: int = 1
    min_nodes: int | None = None
    namespace: str | None = None
    gpus: int = 0
    ranks: int = 1
    cpus: int | None = None
    memory_gib: int | None = None
    shm_gib: float | None = None
    gpu_resource: str = "nvidia.com/gpu"
    network: Mapping[str, int] = field(default_factory=dict)  # {"rdma/hca": 8}, {"vpc.amazonaws.com/efa": 32}
    gang: Gang = "none"
    queue: str | None = None
    claim: str | None = None
    size_gib: int = 100
    storage_class: str | None = None
    access_mode: AccessMode = "ReadWriteMany"
    secret: str | None = None
    max_restarts: int = 3
    time_limit_s: int | None = None
    shows_page: bool = True
    scrape_from: str | None = None
    patch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fewest(self) -> int:
        return self.nodes if self.min_nodes is None else self.min_nodes

    @property
    def num_ranks(self) -> int:
        return self.gpus or self.ranks

    @property
    def claim_name(self) -> str:
        return self.claim or f"{self.name}-runs"

    @property
    def secret_name(self) -> str:
        """Returns the name of the Secret object whose key ``secret`` has the job's secret."""
        return self.secret or f"{self.name}-secret"


def sized(options: KubernetesOptions, config: Config) -> KubernetesOptions:
    """Returns the options with all sizes: those that are given, else by the ranks of a pod and the plan's estimate.

    memory = /dev/shm + what each rank has in any case + 1.25 x the estimate, with what is offloaded, and saved copies.
    """
    each, ranks = _GPU_RANK if options.gpus else _CPU_RANK, max(1, options.num_ranks)
    shm = max(_LEAST_SHM_GIB, each["shm_gib"] * ranks) if options.shm_gib is None else options.shm_gib
    memory = shm + each["memory_gib"] * ranks + _MARGIN * _host_bytes(options, config) / 2**30
    cpus = each["cpus"] * ranks if options.cpus is None else options.cpus
    memory_gib = math.ceil(memory) if options.memory_gib is None else options.memory_gib
    return replace(options, cpus=cpus, memory_gib=memory_gib, shm_gib=shm)


def _host_bytes(options: KubernetesOptions, config: Config) -> float:
    """Estimates what the ranks of one pod hold in its memory, with as few pods as may train; 0: nobody knows."""
    device, ranks = "cuda" if options.gpus else "cpu", options.num_ranks
    spread = config.with_values("parallel", device=device, ranks=ranks * options.fewest)
    stages = rank_estimates(with_precision(spread, device), options.fewest)
    states = max((each.parameters + each.optimizer + each.buffers for each in stages), default=0.0)
    held = max((each.host if options.gpus else each.device_bytes for each in stages), default=0.0)
    return ranks * (held + states * config.checkpoint.may_use_background)


def check_options(options: KubernetesOptions, config: Config) -> None:
    """Raises ConfigError with all problems of the options, and of the config on so many ranks."""
    problems = [*_names(options), *_counts(options), *_memory(options), *_placement(options)]
    if not problems:
        per_pod, most = options.num_ranks, options.nodes
        spread = config.with_values("parallel", ranks=per_pod * most)
        problems = check_hosts(spread, per_pod, range(options.fewest, most + 1))
    if problems:
        raise ConfigError(problems, source=f"{options.name or 'run'} on Kubernetes")


def _names(options: KubernetesOptions) -> Iterator[Problem]:
    if not _NAME.fullmatch(options.name) or len(options.name) > _MOST_NAME:
        rule = f"a name has at most {_MOST_NAME} small letters, digits and dashes, and begins with a letter"
        yield Problem(what=f"the name {options.name!r} is no name of Kubernetes", rule=rule, fix="give another name")
    if not _IMAGE.fullmatch(options.image):
        rule = "it is a registry, a name, and a tag or digest without spaces"
        what = f"the image {options.image!r} is no reference of an image"
        yield Problem(what=what, rule=rule, fix="try paceline:0.1")
    for what in ("namespace", "secret", "queue", "claim", "storage_class", "scrape_from"):
        name = getattr(options, what)
        if name is not None and (not _OBJECT_NAME.fullmatch(name) or len(name) > 63):
            rule = "such a name has at most 63 small letters, digits, dashes and dots"
            fix = "kubectl get lists the names that there are"
            yield Problem(what=f"the {what} {name!r} is no name of a Kubernetes object", rule=rule, fix=fix)


def _counts(options: KubernetesOptions) -> Iterator[Problem]:
    least, most = options.fewest, options.nodes
    if not 1 <= least <= most:
        rule = "a run has at least one node, and the fewest are not more than the most"
        yield Problem(what=f"{least} to {most} nodes", rule=rule, fix="try --nodes 2, or --nodes 2:4")
    names = ("gpus", "ranks", "cpus", "memory_gib", "size_gib", "max_restarts", "time_limit_s")
    counts = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    counts |= {f"network resource {name}": count for name, count in options.network.items()}
    for what, count in counts.items():
        fewest = 0 if what in ("gpus", "max_restarts") else 1
        if count < fewest:
            yield Problem(what=f"{what} = {count}", rule=f"it is at least {fewest}")
    for name in (options.gpu_resource, *options.network):
        if not _RESOURCE.fullmatch(name):
            rule = "it is a domain, a slash and a name, such as nvidia.com/gpu or rdma/hca"
            fix = "kubectl describe node lists the resources of a machine"
            yield Problem(what=f"{name!r} is no name of a device resource", rule=rule, fix=fix)
    if options.time_limit_s is not None and options.kind == "statefulset":
        what = f"a StatefulSet with a time limit of {options.time_limit_s} s"
        fix = "use --kind job, jobset or trainjob"
        yield Problem(what=what, rule="Kubernetes ends no StatefulSet by time", fix=fix)


def _memory(options: KubernetesOptions) -> Iterator[Problem]:
    least, shm, memory = _SHM_BASE_GIB + _SHM_RANK_GIB * options.num_ranks, options.shm_gib, options.memory_gib
    if shm is not None and shm < least:
        yield Problem(
            what=f"/dev/shm has {shm:g} GiB for {options.num_ranks} ranks",  # nosec B108  # no file
            rule=f"ranks and loader workers share memory there: {least:g} GiB is the least",
            fix=f"set shm_gib = {max(_LEAST_SHM_GIB, round(2 * least))}, or leave it out",
        )
    if shm is not None and memory is not None and shm >= memory:
        yield Problem(
            what=f"/dev/shm has {shm:g} GiB of a pod with {memory} GiB",  # nosec B108
            rule="Kubernetes counts /dev/shm as memory of the pod: it must leave room for the ranks",
            fix=f"set memory_gib = {round(4 * shm)}, or a smaller shm_gib",
        )
    if options.nodes > 1 and options.access_mode != "ReadWriteMany":
        what = f"{options.nodes} nodes with a volume of {options.access_mode}"
        rule = "all nodes write to the run's folder: its volume must be ReadWriteMany"
        yield Problem(what=what, rule=rule, fix="use a storage class of a shared file system, or one node")


def _placement(options: KubernetesOptions) -> Iterator[Problem]:
    if options.gang == "none" and options.queue is not None:
        what = f"queue {options.queue} without a scheduler that has queues"
        fix = "set gang = kueue or gang = volcano"
        yield Problem(what=what, rule="queues are of Kueue or Volcano", fix=fix)
    if options.gang == "kueue" and options.queue is None:
        rule = "Kueue takes a run by the name of a LocalQueue"
        yield Problem(what="Kueue without a queue", rule=rule, fix="kubectl get localqueues lists them")


def _of_form(form: str, convert: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Returns a reader of texts of a form, which raises ValueError with ``what`` for others."""

    def read(text: str) -> Any:
        if re.fullmatch(form, text) is None:
            raise ValueError(what)
        return convert(text)

    return read


_count = _of_form(r"\d{1,9}", int, "a whole number")
_number = _of_form(r"\d{1,9}(\.\d{1,6})?", float, "a number")
_switch = _of_form(r"yes|no", "yes".__eq__, "yes or no")


def _one_of(kind: Any) -> Callable[[str], Any]:
    return _of_form("|".join(get_args(kind)), str, f"one of {', '.join(get_args(kind))}")


def _device_counts(text: str) -> dict[str, int]:
    words = [word.partition("=") for word in text.split(",")]
    if not all(name and sign for name, sign, _ in words):
        raise ValueError("NAME=VALUE, with commas between several")
    return {name: _count(value) for name, _, value in words}


# How the value of each word is read. A word is the name of a field, but for "page".
SETTINGS: dict[str, Callable[[str], Any]] = {"image": str, "kind": _one_of(Kind), "namespace": str, "secret": str}
SETTINGS |= {"max_restarts": _count, "page": _switch, "scrape_from": str, "cpus": _count, "memory_gib": _count}
SETTINGS |= {"shm_gib": _number, "gpu_resource": str, "network": _device_counts, "gang": _one_of(Gang), "claim": str}
SETTINGS |= {"size_gib": _count, "storage_class": str, "access_mode": _one_of(AccessMode), "patch": read_patch}


def read_options(job: LaunchJob) -> KubernetesOptions:
    """Returns the options. Raises UsageError for a word that there is not, or a value that it does not take."""
    refuse_settings(job, SETTINGS)
    found: dict[str, Any] = {}
    for word, text in job.settings.items():
        try:
            found["shows_page" if word == "page" else word] = SETTINGS[word](text)
        except ValueError as error:
            shown = text if len(text) < _MOST_SHOWN and "\n" not in text else "..."
            raise UsageError(f"--set {word}={shown}\n  it is {error}\n  give another value") from None
    if "image" not in job.settings:
        fix = "build one (make container), push it, and give it: --set image=REGISTRY/paceline:0.1"
        raise UsageError(f"--on kubernetes without an image\n  pods run a container image with Paceline in it\n  {fix}")
    return KubernetesOptions(
        name=object_name(job.run),
        nodes=job.nodes,
        min_nodes=None if job.least == job.nodes else job.least,
        time_limit_s=None if job.time is None else read_time(job.time),
        gpus=job.gpus,
        ranks=job.ranks,
        queue=job.queue,
        **found,
    )


def object_name(name: str) -> str:
    """Returns the name of a run as Kubernetes takes it; one that is too long ends with a number made of all of it."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    found = found if found[:1].isalpha() else f"run-{found}".strip("-")
    if len(found) <= _MOST_NAME:
        return found
    return f"{found[: _MOST_NAME - 9].strip('-')}-{zlib.crc32(name.encode()):08x}"
