"""Options of a run on Kubernetes from the words of a command line: ``--set image=paceline:0.1 --set kind=jobset``.

SETTINGS says which words there are, and what each means. No torch in here.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, get_args

from paceline.errors import UsageError
from paceline.launch.job import LaunchJob, read_time, refuse_settings
from paceline.launch.kubernetes_options import (
    MOST_NAME,
    AccessMode,
    Gang,
    Kind,
    KubernetesOptions,
    PodPlacement,
    PodResources,
    RunsVolume,
)

_NAME_PARTS = re.compile(r"[^a-z0-9]+")


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError("a whole number")
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text):
        raise ValueError("a number")
    return float(text)


def _switch(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


def _one_of(kind: Any) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in get_args(kind):
            raise ValueError(f"one of {', '.join(get_args(kind))}")
        return text

    return read


def _counts(text: str) -> dict[str, int]:
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
    "network": ("resources", "network", _counts),
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
    """Returns the name of a run as Kubernetes takes it: small letters, digits and dashes.

    One that is too long ends with a number made of all of it, so that ``NAME`` and ``NAME-2`` stay two.
    """
    found = _NAME_PARTS.sub("-", name.lower()).strip("-")
    found = found if found[:1].isalpha() else f"run-{found}".strip("-")
    if len(found) <= MOST_NAME:
        return found
    return f"{found[: MOST_NAME - 9].strip('-')}-{zlib.crc32(name.encode()):08x}"
