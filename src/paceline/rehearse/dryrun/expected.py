"""What a run is expected to take, by a dry run: any model and engine, kernel by kernel, on the present machine.

    python -m paceline.rehearse.dryrun.expected '{"config": YAML, "threads": N, "cores": [0, 1], "entry": FILE}'

It prints what prediction.json holds, in a process of its own below the priority of the ranks, while these start. Where
ranks are forked from a process that has torch loaded, so is this one. What it cannot say is left to the formulas.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cluster.detect import Machine, detect_machine
from paceline.config import Config, config_from_dict
from paceline.config.yaml_text import parse_document
from paceline.errors import PacelineError
from paceline.predict.memory.memory import WORKSPACE_BYTES
from paceline.search.expect import present_cluster, unpriced
from paceline.search.expectation import Expectation
from paceline.untrusted import parse_json

_MODULE = "paceline.rehearse.dryrun.expected"
_NICENESS = 19
Start = Callable[[Sequence[str]], list[str]]
# What a replay of measured kernels was off by at most on the machines that it was tried on: see docs/prediction.md.
_BAND = 0.15


def expect_by_dry_run(
    config: Config, machine: Machine, *, threads: int | None = None, entry: Path | None = None
) -> Expectation:
    """Records and replays a step of a config whose device and ranks are settled; a reason where that cannot be."""
    from paceline.predict.replay.replay import replay
    from paceline.rehearse.dryrun.parts import with_stand_in
    from paceline.rehearse.dryrun.record import record_stages

    ranks = config.parallel.decided_ranks
    reason = unpriced(config, 1, entry)
    if reason:
        return Expectation(ranks=ranks, reason=reason)
    try:
        cluster, assumed = present_cluster(config, machine, ranks, threads, entry)
        if not cluster.device.memory_rates:
            return Expectation(ranks=ranks, reason=f"{cluster.device.name} has no measured kernels")
        programs, rough = with_stand_in(config, lambda asked: record_stages(asked, ranks=ranks))
        found = replay(programs, cluster, with_loop=True)
    except PacelineError as error:
        return Expectation(ranks=ranks, reason=str(error))
    memory = None  # on a CPU records have the process's, as estimates do; of a GPU, what its allocator holds
    if not cluster.device.is_cpu:
        memory = float(found.total_memory - found.memory["framework"] + WORKSPACE_BYTES)
    return Expectation(
        ranks=ranks,
        cluster=cluster.name,
        plan=f"{programs[0].strategy} over {ranks}, kernel by kernel",
        step_s=found.seconds,
        step_s_low=found.seconds * (1 - _BAND),
        step_s_high=found.seconds * (1 + _BAND),
        memory_bytes=memory,
        fitted=not rough,
        assumed=(*assumed, rough) if rough else assumed,
    )


def plain_start(command: Sequence[str]) -> list[str]:
    return ["-m", *command]


class Background:
    """A dry run beside a run. ``result`` is asked for when the run is done.

    ``cores`` are those that the ranks share: it counts them, and runs on them; none: those of this process. ``start``
    makes the arguments of the Python that runs a module: a process of its own, unless there is one to fork it from.
    """

    def __init__(
        self,
        config_yaml: str,
        *,
        threads: int | None = None,
        cores: Sequence[int] = (),
        entry: Path | None = None,
        start: Start = plain_start,
    ) -> None:
        path = None if entry is None else str(entry.absolute())
        asked = json.dumps({"config": config_yaml, "threads": threads, "cores": list(cores), "entry": path})
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no process to be had: the formulas have said something
            self._process = subprocess.Popen(
                [sys.executable, *start([_MODULE, asked])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )

    def result(self, timeout_s: float = 10.0) -> Expectation:
        """Returns what came out: figures, or the reason why there are none; waits so long at most."""
        if self._process is None:
            return Expectation(reason="there was no process to be had for a dry run")
        try:
            text, _ = self._process.communicate(timeout=timeout_s)
            return Expectation.of_text(text.decode())
        except subprocess.TimeoutExpired:
            return Expectation(reason=f"no dry run was done {timeout_s:g} s after the run: the machine was busy")
        except (ValueError, OSError):
            return Expectation(reason="the dry run failed: paceline predict says why")
        finally:
            self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def better_of(formula: Expectation | None, dry: Expectation | None) -> Expectation | None:
    """Returns the dry run's figures where there are any, with the estimate's memory if need be; else both reasons."""
    if dry is None or formula is None:
        return dry or formula
    if dry.step_s is None:
        reasons = dict.fromkeys(filter(None, (formula.reason, dry.reason)))
        return formula if formula.step_s is not None else replace(formula, reason="; ".join(reasons))
    return dry if dry.memory_bytes is not None else replace(dry, memory_bytes=formula.memory_bytes)


def main() -> None:
    asked = parse_json(sys.argv[1])
    _step_back(asked["cores"])
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    config = config_from_dict(parse_document(asked["config"], "config").values, "config")
    import torch  # which takes seconds

    torch.set_num_threads(1)
    machine = detect_machine(with_gpus=config.parallel.device == "cuda")
    entry = None if asked["entry"] is None else Path(asked["entry"])
    sys.stdout.write(expect_by_dry_run(config, machine, threads=asked["threads"], entry=entry).to_text())


def _step_back(cores: Sequence[int]) -> None:
    """Leaves the processors to the ranks: where the system can, this process gets only what nobody else wants.

    ``cores`` are the run's: a rank that started it may keep to its own. Linux shares cores out among sessions first, if
    each is a group of its own; so this process gets a session, and the session the least share.
    """
    if sys.platform == "linux":
        if cores:
            with contextlib.suppress(OSError):  # taken away meanwhile
                os.sched_setaffinity(0, cores)
        with contextlib.suppress(OSError):  # it leads one already
            os.setsid()
        with contextlib.suppress(OSError):  # no such groups
            Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="ascii")
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return
    if hasattr(os, "nice"):
        os.nice(_NICENESS)


def _end_with(parent: int) -> None:
    """Ends this process when the launcher is gone: nobody will ask for its result."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
