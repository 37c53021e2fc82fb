"""Options of a run on Ray from the words of a command line: ``--set address=10.0.0.1:6379 --set actor=rank``.

SETTINGS says which words there are, and what each means. No torch and no Ray in here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from paceline.errors import UsageError
from paceline.launch.job import LaunchJob, refuse_options, refuse_settings

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
_NOT_HERE = {
    "--array": "it is an option of Slurm",
    "--hosts": "Ray chooses the machines",
    "--time": "Ray has no time limits",
    "--queue": "Ray has no queues",
}
_STRATEGIES = {("host", "strict"): "STRICT_SPREAD", ("host", "pack"): "PACK", ("rank", "pack"): "PACK"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How a run takes its place on a Ray cluster: ``actors`` bundles of ``bundle`` for each host."""

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
        raise UsageError(
            "--set actor=rank with --set spread=strict\n  ranks of one host share a Ray node\n  use actor=host"
        )
    gpus = job.gpus if actor == "host" else min(1, job.gpus)
    return RayOptions(
        address=job.settings.get("address", "auto"),
        actor=actor,
        strategy=_STRATEGIES[actor, spread],
        cpus=int(job.settings.get("cpus", job.ranks if actor == "host" else 1)),
        gpus=gpus,
        ranks=job.ranks,
        wait_s=float(job.settings.get("wait_s", 600)),
        waits_for_nodes=job.settings.get("autoscale") == "yes",
        pythonpath=job.settings.get("pythonpath", ""),
    )
