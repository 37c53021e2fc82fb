"""What a run on Kubernetes is asked to be, and every problem of it at once. No torch in here.

A *node* here is a pod with one launcher and its ranks; Kubernetes puts it on a machine. ``SETTINGS`` are the words of a
command line: ``--set image=paceline:0.1 --set kind=jobset``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from paceline.config import Config, check_hosts
from paceline.errors import ConfigError, Problem, UsageError
from paceline.launch.job import LaunchJob, read_time, refuse_settings

Kind = Literal["job", "statefulset", "jobset", "trainjob"]
Gang = Literal["none", "kueue", "volcano"]
AccessMode = Literal["ReadWriteMany", "ReadWriteOnce"]

_MOST_NAME = 40  # Kubernetes takes 63, and appends indices to the names of pods and services
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_RESOURCE = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_IMAGE = re.compile(r"[\w./:@-]+")

# Segments of ranks that share memory take 40 MiB and NCCL some 10 MiB for each pair; loader workers need the rest.
_SHM_BASE_GIB, _SHM_RANK_GIB = 0.25, 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """What each pod gets. ``ranks``: of a pod without GPUs; with GPUs one rank has one of them."""

    gpus: int = 0
    ranks: int = 1
    cpus: int = 4
    memory_gib: int = 16
    shm_gib: float = 2.0
    gpu_resource: str = "nvidia.com/gpu"
    network: Mapping[str, int] = field(default_factory=dict)  # {"rdma/hca": 8}, {"vpc.amazonaws.com/efa": 32}

    @property
    def num_ranks(self) -> int:
        return self.gpus or self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlacement:
    """Which machines take the pods, and who schedules them together. ``queue``: of Kueue or Volcano."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    gang: Gang = "none"
    queue: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsVolume:
    """The volume with the run folders, which all pods share."""

    claim: str | None = None  # one that exists; None: one of size_gib and storage_class is made
    size_gib: int = 100
    storage_class: str | None = None
    access_mode: AccessMode = "ReadWriteMany"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """A run on Kubernetes. ``min_nodes``: the run starts with so many pods, and others join; None: with all."""

    name: str
    image: str
    kind: Kind = "job"
    nodes: int = 1
    min_nodes: int | None = None
    namespace: str | None = None
    resources: PodResources = field(default_factory=PodResources)
    placement: PodPlacement = field(default_factory=PodPlacement)
    volume: RunsVolume = field(default_factory=RunsVolume)
    secret: str | None = None
    max_restarts: int = 3
    time_limit_s: int | None = None
    shows_page: bool = True

    @property
    def fewest(self) -> int:
        return self.nodes if self.min_nodes is None else self.min_nodes

    @property
    def claim(self) -> str:
        return self.volume.claim or f"{self.name}-runs"

    @property
    def secret_name(self) -> str:
        """Returns the name of the Secret object whose key ``secret`` has the job's secret."""
        return self.secret or f"{self.name}-secret"


def check_options(options: KubernetesOptions, config: Config) -> None:
    """Raises ConfigError with all problems of the options, and of the config on so many ranks."""
    problems = [*_names(options), *_counts(options), *_memory(options), *_placement(options)]
    if not problems:
        per_pod, most = options.resources.num_ranks, options.nodes
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
    named = {"namespace": options.namespace, "secret": options.secret, "queue": options.placement.queue}
    named |= {"claim": options.volume.claim, "storage class": options.volume.storage_class}
    for what, name in named.items():
        if name is not None and (not _OBJECT_NAME.fullmatch(name) or len(name) > 63):
            rule = "such a name has at most 63 small letters, digits, dashes and dots"
            fix = "kubectl get lists the names that there are"
            yield Problem(what=f"the {what} {name!r} is no name of a Kubernetes object", rule=rule, fix=fix)


def _counts(options: KubernetesOptions) -> Iterator[Problem]:
    least, most = options.fewest, options.nodes
    if not 1 <= least <= most:
        rule = "a run has at least one node, and the fewest are not more than the most"
        yield Problem(what=f"{least} to {most} nodes", rule=rule, fix="try --nodes 2, or --nodes 2:4")
    resources = options.resources
    counts = {name: getattr(resources, name) for name in ("gpus", "ranks", "cpus", "memory_gib")}
    counts |= {"size_gib": options.volume.size_gib, "max_restarts": options.max_restarts}
    counts |= {"time_limit_s": options.time_limit_s or 1}
    counts |= {f"network resource {name}": count for name, count in resources.network.items()}
    for what, count in counts.items():
        fewest = 0 if what in ("gpus", "max_restarts") else 1
        if count < fewest:
            yield Problem(what=f"{what} = {count}", rule=f"it is at least {fewest}")
    for name in (resources.gpu_resource, *resources.network):
        if not _RESOURCE.fullmatch(name):
            rule = "it is a domain, a slash and a name, such as nvidia.com/gpu or rdma/hca"
            fix = "kubectl describe node lists the resources of a machine"
            yield Problem(what=f"{name!r} is no name of a device resource", rule=rule, fix=fix)
    if options.time_limit_s is not None and options.kind == "statefulset":
        what = f"a StatefulSet with a time limit of {options.time_limit_s} s"
        fix = "use --kind job, jobset or trainjob"
        yield Problem(what=what, rule="Kubernetes ends no StatefulSet by time", fix=fix)


def _memory(options: KubernetesOptions) -> Iterator[Problem]:
    resources = options.resources
    least = _SHM_BASE_GIB + _SHM_RANK_GIB * resources.num_ranks
    if resources.shm_gib < least:
        yield Problem(
            what=f"/dev/shm has {resources.shm_gib:g} GiB for {resources.num_ranks} ranks",  # nosec B108  # no file
            rule=f"ranks and loader workers share memory there: {least:g} GiB is the least",
            fix=f"set shm_gib = {max(2, round(2 * least))}",
        )
    if resources.shm_gib >= resources.memory_gib:
        yield Problem(
            what=f"/dev/shm has {resources.shm_gib:g} GiB of a pod with {resources.memory_gib} GiB",  # nosec B108
            rule="Kubernetes counts /dev/shm as memory of the pod: it must leave room for the ranks",
            fix=f"set memory_gib = {round(4 * resources.shm_gib)}, or a smaller shm_gib",
        )
    if options.nodes > 1 and options.volume.access_mode != "ReadWriteMany":
        what = f"{options.nodes} nodes with a volume of {options.volume.access_mode}"
        rule = "all nodes write to the run's folder: its volume must be ReadWriteMany"
        yield Problem(what=what, rule=rule, fix="use a storage class of a shared file system, or one node")


def _placement(options: KubernetesOptions) -> Iterator[Problem]:
    placement = options.placement
    if placement.gang == "none" and placement.queue is not None:
        what = f"queue {placement.queue} without a scheduler that has queues"
        fix = "set gang = kueue or gang = volcano"
        yield Problem(what=what, rule="queues are of Kueue or Volcano", fix=fix)
    if placement.gang == "kueue" and placement.queue is None:
        rule = "Kueue takes a run by the name of a LocalQueue"
        yield Problem(what="Kueue without a queue", rule=rule, fix="kubectl get localqueues lists them")
    for key, value in placement.node_selector.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            rule = "a label is a name, with a domain before it or not, and a value of at most 63 characters"
            fix = "kubectl get nodes --show-labels lists those that there are"
            yield Problem(what=f"the node selector {key}={value} is no label", rule=rule, fix=fix)


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
    return {name: _count(value) for name, value in _pairs(text).items()}


def _pairs(text: str) -> dict[str, str]:
    words = [word.partition("=") for word in text.split(",")]
    if not all(name and sign for name, sign, _ in words):
        raise ValueError("NAME=VALUE, with commas between several")
    return {name: value for name, _, value in words}


# Each word: the record and the field that it sets, and how its value is read.
SETTINGS: Mapping[str, tuple[str, str, Callable[[str], Any]]] = {
    "image": ("options", "image", str),
    "kind": ("options", "kind", _one_of(Kind)),
    "namespace": ("options", "namespace", str),
    "secret": ("options", "secret", str),
    "max_restarts": ("options", "max_restarts", _count),
    "page": ("options", "shows_page", _switch),
    "cpus": ("resources", "cpus", _count),
    "memory_gib": ("resources", "memory_gib", _count),
    "shm_gib": ("resources", "shm_gib", _number),
    "gpu_resource": ("resources", "gpu_resource", str),
    "network": ("resources", "network", _device_counts),
    "node_selector": ("placement", "node_selector", _pairs),
    "gang": ("placement", "gang", _one_of(Gang)),
    "claim": ("volume", "claim", str),
    "size_gib": ("volume", "size_gib", _count),
    "storage_class": ("volume", "storage_class", str),
    "access_mode": ("volume", "access_mode", _one_of(AccessMode)),
}


def read_options(job: LaunchJob) -> KubernetesOptions:
    """Returns the options. Raises UsageError for a word that there is not, or a value that it does not take."""
    refuse_settings(job, SETTINGS)
    found: dict[str, dict[str, Any]] = {"options": {}, "resources": {}, "placement": {}, "volume": {}}
    for word, text in job.settings.items():
        record, name, read = SETTINGS[word]
        try:
            found[record][name] = read(text)
        except ValueError as error:
            raise UsageError(f"--set {word}={text}\n  it is {error}\n  give another value") from None
    if "image" not in job.settings:
        raise UsageError(
            "--on kubernetes without an image\n  pods run a container image with Paceline in it\n"
            "  build one (make container), push it, and give it: --set image=REGISTRY/paceline:0.1"
        )
    queue = {} if job.queue is None else {"queue": job.queue}
    return KubernetesOptions(
        name=object_name(job.run),
        nodes=job.nodes,
        min_nodes=None if job.least == job.nodes else job.least,
        time_limit_s=None if job.time is None else read_time(job.time),
        resources=PodResources(gpus=job.gpus, ranks=job.ranks, **found["resources"]),
        placement=PodPlacement(**{**queue, **found["placement"]}),
        volume=RunsVolume(**found["volume"]),
        **found["options"],
    )


def object_name(name: str) -> str:
    """Returns the name of a run as Kubernetes takes it; one that is too long ends with a number made of all of it."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    found = found if found[:1].isalpha() else f"run-{found}".strip("-")
    if len(found) <= _MOST_NAME:
        return found
    return f"{found[: _MOST_NAME - 9].strip('-')}-{zlib.crc32(name.encode()):08x}"
