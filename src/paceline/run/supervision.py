"""What ``paceline train`` hands to the supervision of its ranks: where to start from, what to say, how to shrink."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.chaos.notes import VARIABLE
from paceline.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from paceline.checkpoint.manifest import Line
    from paceline.config import Config
    from paceline.run.supervise import RestartNote, StartingPoint, Surroundings
    from paceline.train.survive.recovery import RestartPolicy

CPU_RANKS = 2  # where there is no GPU: enough to be distributed, and every machine has two cores

# What a rank needs, loaded once before ranks are forked.
_RANK_MODULES = (
    "paceline.run.worker",
    "paceline.train.assemble",
    "paceline.train.survive.go_back",
    "paceline.train.survive.saving",
    "paceline.comm.torch_dist",
    "paceline.run.watch",
    "paceline.run.beside",
    "torch._dynamo",  # which optimizers load, and which takes as long as torch itself
)
_SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "TORCHELASTIC_RUN_ID", VARIABLE)


def rank_modules(config: Config) -> list[str]:
    """Returns what a rank of a config loads before its first step, besides the user's own code."""
    modules = list(_RANK_MODULES)
    if config.data.kind == "digits":
        modules.append("sklearn.datasets")
    if config.monitor.tensorboard:
        modules.append("torch.utils.tensorboard")
    return modules


def rank_threads(config: Config, ranks: int | None = None) -> int | None:
    """Returns how many threads a rank of this host will compute with, before torch is there to tell of GPUs.

    ``ranks`` are those of this host, where they are given. None: the ranks will have GPUs.
    """
    parallel = config.parallel
    if parallel.threads is not None or parallel.device == "cuda":
        return parallel.threads
    count = ranks or (CPU_RANKS if parallel.ranks == "auto" else parallel.ranks)
    from paceline.cluster.detect import usable_cores

    return max(1, len(usable_cores()) // (1 if config.comm.backend == "virtual" else count))


def is_scheduled() -> bool:
    """Says whether something may have started this command before, with the same arguments."""
    return any(name in os.environ for name in _SCHEDULERS)


def restart_policy(config: Config) -> RestartPolicy:
    """Returns what a config says about starting again."""
    from paceline.train.survive.recovery import RestartPolicy

    return RestartPolicy(**{each.name: getattr(config.recovery, each.name) for each in fields(RestartPolicy)})


def rank_command(
    folder: Path, checkpoint: Path | str | None, restart: RestartNote | None, *, is_beside: bool = False
) -> list[str]:
    """Returns what each rank runs: a module and its arguments. ``is_beside``: the ranks watch themselves."""
    command = ["paceline.run.worker", str(folder), "--launcher", str(os.getpid())]
    if checkpoint is not None:
        command += ["--resume", str(checkpoint)]
    if restart is not None:
        command += ["--restart", json.dumps(asdict(restart))]
    return [*command, "--beside"] if is_beside else command


def surroundings(config: Config, folder: Path, first: Path | None) -> Surroundings:
    """Returns what supervision needs to know of the run in ``folder``, whose first attempt began at ``first``."""
    from paceline.run.supervise import Surroundings

    own = _line(first)
    return Surroundings(
        find=lambda: _starting_point(config, folder, first, own), say=_say, halve=lambda: halve_microbatch(folder)
    )


def halve_microbatch(folder: Path) -> bool:
    """Halves the microbatch of the config in a run's folder, for the next attempt; says whether it could.

    The global batch stays: it comes in more microbatches, and the run computes the same.
    """
    from paceline.config import check_ranks, dump_yaml, load_config
    from paceline.run.folder import change_config, config_of

    config = load_config(config_of(folder))
    try:
        used = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["batch"]["microbatch"]
    except (OSError, ValueError, KeyError):
        used = config.train.microbatch
    ranks = config.parallel.ranks
    if not isinstance(used, int) or used < 2 or not isinstance(ranks, int):
        return False
    train = config.train.model_copy(update={"microbatch": used // 2, "accumulate": None})
    smaller = config.model_copy(update={"train": train})
    try:
        if check_ranks(smaller, ranks):
            return False
    except ConfigError:
        return False
    change_config(folder, dump_yaml(smaller))
    return True


def _line(first: Path | None) -> Line | None:
    """Returns the line that a run is on which starts at a checkpoint, whatever was saved behind that before."""
    if first is None:
        return None
    from paceline.checkpoint.find import read_manifest, spots_in
    from paceline.checkpoint.manifest import line_from

    return line_from(read_manifest(first).spot, list(spots_in(first.parent).values()))


def _starting_point(config: Config, folder: Path, first: Path | None, own: Line | None = None) -> StartingPoint:
    """Finds the newest checkpoint of the run's line that is whole, and tells of newer ones that are not."""
    from paceline.checkpoint import find_checkpoint, list_checkpoints
    from paceline.checkpoint.storage import absolute_path
    from paceline.run.supervise import StartingPoint

    where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    passed: list[str] = []
    path: Path | None
    try:
        found = find_checkpoint("auto", where, config.checkpoint.verify, lambda each: passed.append(str(each)), own)
        path = absolute_path(found)
    except CheckpointError as error:
        path = first if first is not None and _is_whole(first, config) else None
        if list_checkpoints(where / "checkpoints") or list_checkpoints(where):
            passed.append(str(error))
    note = "\n  ".join(passed)
    if path is None:
        return StartingPoint(checkpoint=None, step=0, note=note)
    number = path.name.rpartition("-")[2]
    return StartingPoint(checkpoint=path, step=int(number) if number.isdecimal() else 0, note=note)


def _is_whole(checkpoint: Path, config: Config) -> bool:
    """Says whether a checkpoint can be started from."""
    from paceline.checkpoint import verify_checkpoint

    try:
        verify_checkpoint(checkpoint, config.checkpoint.verify)
    except CheckpointError:
        return False
    return True


def _say(text: str) -> None:
    typer.echo(f"paceline: {text}", err=True)
