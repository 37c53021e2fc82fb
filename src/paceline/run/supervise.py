"""Attempt after attempt: a run whose ranks failed is started again from its newest checkpoint, while that helps.

What to do is decided by ``health/diagnosis.py``; here it is done, and told in one sentence:

    rank 1 was killed by SIGKILL after step 37; restarting 4 ranks from step 30 (restart 1 of 3)

From the failure to the first new step: the agent looks every 50 ms, ends the other ranks, meets its new ranks (forked
from a process that has torch loaded, see ``warm_server.py``), and these load the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import Config, check_ranks, dump_yaml, load_config
from paceline.errors import CheckpointError, ConfigError
from paceline.health.diagnosis import FailedAttempt, Restart, Stop, after_failure
from paceline.run.console import say
from paceline.run.failure import RunFailedError
from paceline.run.folder import change_config, config_of, read_plan
from paceline.run.location import RunLocation, find_start
from paceline.run.notes import read_progress

if TYPE_CHECKING:
    from paceline.checkpoint.manifest import Line


def supervise(start: Callable[[list[str]], None], config: Config, location: RunLocation) -> None:
    """Runs attempts until one is done. Raises the last one's error, with the reason why there is no other.

    ``start`` runs a command on all ranks until they are done, and raises RunFailedError when one fails.
    """
    policy, folder = config.recovery, location.folder
    own = _line(location.checkpoint)
    is_virtual, count = config.comm.backend == "virtual", config.parallel.ranks
    ranks = f"{count} {'virtual ' if is_virtual else ''}rank{'s' if count != 1 else ''}"
    attempts: list[FailedAttempt] = []
    command = rank_command(folder, location.checkpoint)
    while True:
        try:
            start(command)
            return
        except RunFailedError as error:
            attempts.append(FailedAttempt.from_failure(error.diagnosis.cause, read_progress(folder)))
            decision = after_failure(policy, attempts)
            if isinstance(decision, Restart) and decision.halves_microbatch and not halve_microbatch(folder):
                decision = Stop(reason="not started again: the microbatch cannot be halved")
            if not folder.is_dir():
                decision = Stop(reason="not started again: its folder is gone")
            if isinstance(decision, Stop):
                raise RunFailedError(error.diagnosis, decision) from error
            what = str(attempts[-1])
        checkpoint, step = _starting_point(config, folder, location.checkpoint, own)
        note = {"number": decision.number, "of": policy.max_restarts, "reason": what}
        command = [*rank_command(folder, checkpoint), "--restart", json.dumps(note)]
        where = f"from step {step}" if checkpoint is not None else "from the beginning: there is no checkpoint"
        smaller = " with half the microbatch" if decision.halves_microbatch else ""
        say(f"{what}; restarting {ranks} {where}{smaller} (restart {decision.number} of {policy.max_restarts})")


def rank_command(folder: Path, checkpoint: Path | str | None) -> list[str]:
    """Returns what each rank runs: a module and its arguments. ``auto`` stands for the run's newest checkpoint."""
    command = ["paceline.run.worker", str(folder), "--launcher", str(os.getpid())]
    return command if checkpoint is None else [*command, "--resume", str(checkpoint)]


def halve_microbatch(folder: Path) -> bool:
    """Halves the microbatch of the config in a run's folder, for the next attempt; says whether it could.

    The global batch stays: it comes in more microbatches, and the run computes the same.
    """
    config, plan = load_config(config_of(folder)), read_plan(folder)
    used = 0 if plan is None else plan.layout.microbatch
    if plan is None or used < 2:
        return False
    smaller = config.with_values("train", microbatch=used // 2, accumulate=None)
    try:
        if check_ranks(smaller, plan.layout.ranks):
            return False
    except ConfigError:
        return False
    fewer = replace(plan.with_microbatch(used // 2), finds_microbatch=False)
    change_config(folder, dump_yaml(smaller), fewer.to_text())
    return True


def _line(first: Path | None) -> Line | None:
    """Returns the line of checkpoints that a run continues which starts at ``first``."""
    if first is None:
        return None
    from paceline.checkpoint.find import read_manifest, spots_in
    from paceline.checkpoint.manifest import line_from

    return line_from(read_manifest(first).spot, list(spots_in(first.parent).values()))


def _starting_point(
    config: Config, folder: Path, first: Path | None, own: Line | None = None
) -> tuple[Path | None, int]:
    """Finds the newest checkpoint of the run's line that is whole, and its step; tells of newer ones that are not."""
    from paceline.checkpoint.find import is_whole, list_checkpoints
    from paceline.checkpoint.storage import absolute_path

    passed: list[str] = []
    path: Path | None
    try:
        path = absolute_path(find_start(config, folder, "auto", passed.append, own))
    except CheckpointError as error:
        path = first if first is not None and is_whole(first, config.checkpoint.verify) else None
        where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
        if list_checkpoints(where / "checkpoints") or list_checkpoints(where):
            passed.append(str(error))
    if passed:
        say("\n  ".join(passed))
    number = "" if path is None else path.name.rpartition("-")[2]
    return path, int(number) if number.isdecimal() else 0
