"""Attempt after attempt: a run whose ranks failed is started again from its newest checkpoint, while that helps.

The same loop runs in the launcher of one host and in those of several. Where ranks fail, the launchers agree on one
account of it (``Launcher.settle``), ask ``health/diagnosis.py`` what to do, and so decide alike. It is told in one
sentence:

    rank 1 was killed by SIGKILL after step 37; restarting 4 ranks from step 30 (restart 1 of 3)

From the failure to the first new step: the agent looks every 50 ms, ends the other ranks, meets its new ranks (forked
from a process that has torch loaded, see ``warm_server.py``), and these load the checkpoint.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import Config, check_ranks, dump_yaml, load_config
from paceline.errors import CheckpointError, CommunicationError, ConfigError, LaunchError
from paceline.health.diagnosis import FailedAttempt, Stop, after_failure
from paceline.run.console import say
from paceline.run.failure import RunFailedError
from paceline.run.folder import change_config, config_of, read_plan
from paceline.run.local import Launcher
from paceline.run.location import RunLocation, find_start
from paceline.run.notes import read_progress
from paceline.run.rendezvous import HostsChangedError

if TYPE_CHECKING:
    from paceline.checkpoint.manifest import Line


def supervise(launcher: Launcher, config: Config, location: RunLocation) -> None:
    """Runs attempts until one is done. Raises the last one's error, with the reason why there is no other."""
    policy, folder = config.recovery, location.folder
    own = _line(location.checkpoint)
    command = rank_command(launcher, location.checkpoint)
    while True:
        ended: FailedAttempt | None = None
        try:
            launcher.start(command)
            return
        except HostsChangedError:
            pass
        except RunFailedError as error:
            is_asked = error.diagnosis.cause.kind == "out_of_memory" and policy.on_oom == "halve"
            can_halve = not is_asked or _halved(folder) is not None
            ended = FailedAttempt.of(error.diagnosis, read_progress(folder), can_halve=can_halve)
        failed, has_failed, is_ours = _settled(launcher, ended)
        decision = after_failure(policy, failed) if has_failed else None
        if not folder.is_dir():
            decision = Stop(reason="not started again: its folder is gone")
        if isinstance(decision, Stop):
            raise _stopped(failed[-1], decision)
        if decision is not None and decision.halves_microbatch and is_ours:
            halve_microbatch(folder)
        checkpoint, where = location.checkpoint, "from the newest checkpoint"
        if not launcher.has_others:
            checkpoint, where = _starting_point(config, folder, location.checkpoint, own)
        command = rank_command(launcher, checkpoint)
        if decision is None:
            say(f"hosts have come or gone; restarting {where}")
            continue
        what, of = str(failed[-1]), policy.max_restarts
        command += ["--restart", json.dumps({"number": decision.number, "of": of, "reason": what})]
        count, kind = config.parallel.ranks, "virtual " if config.comm.backend == "virtual" else ""
        ranks = "" if launcher.has_others else f"{count} {kind}rank{'s' if count != 1 else ''} "
        smaller = " with half the microbatch" if decision.halves_microbatch else ""
        say(f"{what}; restarting {ranks}{where}{smaller} (restart {decision.number} of {of})")


def _settled(launcher: Launcher, ended: FailedAttempt | None) -> tuple[list[FailedAttempt], bool, bool]:
    """Agrees with other hosts on how an attempt ended; see ``Launcher.settle``."""
    try:
        return launcher.settle(ended)
    except (CommunicationError, TimeoutError) as error:
        if ended is None:
            raise LaunchError(f"the run cannot go on: {error}") from error
        reason = "not started again: the launcher where hosts meet is gone"
        raise _stopped(ended, Stop(reason=reason)) from error


def _stopped(attempt: FailedAttempt, end: Stop) -> RunFailedError:
    assert attempt.diagnosis is not None  # every launcher tells it
    return RunFailedError(attempt.diagnosis, end)


def rank_command(launcher: Launcher, checkpoint: Path | str | None) -> list[str]:
    """Returns what each rank runs: a module and its arguments. Ranks of several hosts find the newest checkpoint."""
    command = ["paceline.run.worker", str(launcher.folder), "--launcher", str(os.getpid())]
    start = "auto" if launcher.has_others else checkpoint
    return command if start is None else [*command, "--resume", str(start)]


def halve_microbatch(folder: Path) -> bool:
    """Halves the microbatch of the config in a run's folder, for the next attempt; says whether it could.

    The global batch stays: it comes in more microbatches, and the run computes the same.
    """
    halved = _halved(folder)
    if halved is not None:
        change_config(folder, *halved)
    return halved is not None


def _halved(folder: Path) -> tuple[str, str] | None:
    """Returns the config and the plan of a run's folder with half the microbatch; None where it cannot be halved."""
    config, plan = load_config(config_of(folder)), read_plan(folder)
    used = 0 if plan is None else plan.layout.microbatch
    if plan is None or used < 2:
        return None
    smaller = config.with_values("train", microbatch=used // 2, accumulate=None)
    try:
        if check_ranks(smaller, plan.layout.ranks):
            return None
    except ConfigError:
        return None
    return dump_yaml(smaller), replace(plan.with_microbatch(used // 2), finds_microbatch=False).to_text()


def _line(first: Path | None) -> Line | None:
    """Returns the line of checkpoints that a run continues which starts at ``first``."""
    if first is None:
        return None
    from paceline.checkpoint.find import read_manifest, spots_in
    from paceline.checkpoint.manifest import line_from

    return line_from(read_manifest(first).spot, list(spots_in(first.parent).values()))


def _starting_point(
    config: Config, folder: Path, first: Path | None, own: Line | None = None
) -> tuple[Path | None, str]:
    """Finds the newest checkpoint of the run's line that is whole, in words too; tells of newer ones that are not."""
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
    if path is None:
        return None, "from the beginning: there is no checkpoint"
    number = path.name.rpartition("-")[2]
    return path, f"from step {int(number) if number.isdecimal() else 0}"
