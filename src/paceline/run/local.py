"""Ranks on this machine: torch's elastic agent starts and supervises one process per rank.

The agent restarts nothing: the first failure ends the attempt, the cause is told in one message, and no process is left
behind; ``supervise.py`` decides whether there is another, on one host and on several. A worker's output goes to its own
log; progress is what the caller reads from the records. Signals are those of [Note: preemption] in ``signals.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.cluster.detect import usable_cores
from paceline.errors import LaunchError, PacelineError, UsageError
from paceline.health.diagnosis import FailedAttempt, first_cause
from paceline.health.exit_codes import PREEMPTED
from paceline.health.failure import Failure, silent_failure
from paceline.records.records import EndStatus
from paceline.run.agreement import HostFacts
from paceline.run.failure import RunPreemptedError, RunStoppedError, explain_failures
from paceline.run.nodes import Nodes, host_name, interface_of
from paceline.run.notes import (
    FAILURES,
    forget,
    forget_attempt,
    forget_processes,
    has_trained,
    noted_processes,
    read_failures,
    was_preempted,
)
from paceline.run.processes import loopback_interface
from paceline.run.rank_process import allocator_variables, end_groups
from paceline.run.records import end_records, open_attempts
from paceline.run.rendezvous import BACKEND, CHANGED, HostsChangedError, Rendezvous, rendezvous
from paceline.run.scratch import scratch_folder
from paceline.run.signals import BY_SIGNAL, ENDING, PREEMPTING, launcher_signals, signals_ignored
from paceline.run.told_verdicts import locate_deaths, note_mismatch
from paceline.run.watch import Watch, WatchPolicy

if TYPE_CHECKING:
    from paceline.run.warm import WarmRanks

_LOG_BYTES = 2**16  # of a rank's log that are looked at
_PATIENCE_S = 5  # from the signal that asks ranks to end to the one that does not ask


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """The processes of one launcher: ``ranks`` of them, with ``variables`` in their environment.

    ``num_records`` is how many ranks write records, where processes have several each; None: one each. With ``warm``
    the processes are forked from one that has torch loaded. ``watch`` says when ranks that stand still are ended; None:
    never. With ``nodes`` these are the ranks of one host of several; ``facts`` are what hosts must agree on.
    """

    ranks: int
    num_records: int | None = None
    threads: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    warm: WarmRanks | None = None
    watch: WatchPolicy | None = None
    nodes: Nodes | None = None
    facts: HostFacts | None = None
    run_id: str = field(default_factory=lambda: f"paceline-{os.getpid()}")


@contextlib.contextmanager
def launching(folder: Path, asked: LocalRanks) -> Iterator[Launcher]:
    """Yields what starts this host's ranks, once it has met the launchers of other hosts, if there are any.

    Raises RunStoppedError or RunPreemptedError when a signal ends the block. However it ends, the records get an end,
    and no rank is left.
    """
    made = Launcher(folder, asked)
    try:  # a signal may come as soon as there are handlers for it, and as long
        with (
            launcher_signals(made.processes, _stop) as made.signals,
            _environment(_settings(asked)),
            scratch_folder() as scratch,
            rendezvous(scratch, asked.run_id, asked.nodes, asked.facts) as made.met,
            _environment(made.met.variables),
        ):
            try:
                yield made
            except UsageError as error:
                made.met.end(refusal=str(error))
                raise
            except (PacelineError, RendezvousError):
                made.met.end()
                raise
            made.met.end()
    except SignalException as error:
        with signals_ignored():
            end_groups(made.processes())
            reason = made.end_by(error.sigval)
        raise reason from None
    except (RendezvousError, RuntimeError, OSError) as error:  # the agent itself failed
        raise LaunchError(f"the ranks could not be started: {error or type(error).__name__}") from error
    finally:
        forget_processes(folder, os.getpid())


@dataclass(slots=True)
class Launcher:
    """Starts the ranks of this host, attempt after attempt. ``ranks`` are those that write records here."""

    folder: Path
    asked: LocalRanks
    met: Rendezvous = field(init=False)
    signals: list[signal.Signals] = field(default_factory=list)  # that asked for room
    ranks: range = range(0)
    _started: float = field(default_factory=time.time)  # of the attempt
    _watched: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def has_others(self) -> bool:
        """Whether launchers of other hosts take part."""
        return self.asked.nodes is not None

    def processes(self) -> list[int]:
        """Returns the processes of the ranks that this launcher has started."""
        return list(noted_processes(self.folder, os.getpid()).values())

    def start(self, command: Sequence[str]) -> None:
        """Runs ``python -m <command>`` on all processes until they are done: one attempt.

        Raises RunFailedError with the cause when a rank fails, HostsChangedError when hosts come or go, UsageError when
        a rank refuses what was asked for, and RunPreemptedError when the ranks were asked to stop and have saved.
        """
        asked = self.asked
        arguments = ["-u", "-m", *command] if asked.warm is None else asked.warm.arguments(command)
        self._started = time.time()
        self.met.on_join = self._begin
        with scratch_folder() as scratch:
            self._run(arguments, _agent_config(asked, scratch, self.met), scratch)

    def settle(self, ended: FailedAttempt | None) -> tuple[list[FailedAttempt], bool, bool]:
        """Agrees with other hosts on how the attempt ended; None: hosts came or went.

        Returns all attempts that have failed, whether this one has, and whether the account is this launcher's.
        """
        if self.signals:  # and not all ranks have saved: whoever asked for room gets it
            _stop(self.signals[0])
        own = CHANGED if ended is None else ended.to_text()
        is_sure = not self.has_others or (ended is not None and ended.is_sure)
        told = self.met.settle(own, is_sure=is_sure or ended is None)
        failed = [FailedAttempt.from_text(text) for text in told if text != CHANGED]
        return failed, told[-1] != CHANGED, told[-1] == own

    def end_by(self, number: signal.Signals) -> LaunchError:
        """Ends the records of ranks that a signal has ended, and returns what is said of it.

        Where a signal asks for room, nothing may be lost: ranks, perhaps all of them on other hosts, have saved and
        left before it came here, or none of them had trained a step.
        """
        is_saved = was_preempted(self.folder, since=self._started)
        if number in PREEMPTING and (is_saved or not has_trained(self.folder, since=self._started)):
            self._end_records("stopped", "preempted")
            return RunPreemptedError(is_saved=is_saved)
        self._end_records("stopped", f"ended by {number.name}")
        return RunStoppedError(number)

    def _begin(self, place: int, size: int) -> None:
        """Begins to watch this host's ranks, which is at ``place`` of ``size``, once what others left is gone."""
        first, num = place * self.asked.ranks, self.asked.num_records or self.asked.ranks
        self.ranks = range(first, first + (self.asked.ranks if self.has_others else num))
        forget_attempt(self.folder, first, None if place == size - 1 else self.ranks.stop)
        if self.asked.watch is not None:
            num = len(self.ranks)
            hosts = {str(each): range(each * num, (each + 1) * num) for each in range(size)}
            channel = self.met.side_channel() if size > 1 else None
            watch = Watch(self.folder, hosts, self.asked.watch, host=str(place), channel=channel, named=host_name())
            self._watched.callback(watch.stop)
            watch.start()

    def _end_records(self, status: EndStatus, message: str) -> None:
        end_records(self.folder, self.ranks, status, message, since=self._started)

    def _run(self, arguments: Sequence[str], agent: LaunchConfig, scratch: Path) -> None:
        """Runs the agent until all ranks have left; raises why they did, if they were not done."""
        try:
            with _quiet_agent(), contextlib.ExitStack() as self._watched:  # no watch adds to records that have an end
                elastic_launch(agent, sys.executable)(*arguments)
        except RendezvousError:
            if was_preempted(self.folder, since=self._started):  # and the launcher where hosts meet has left first
                raise RunPreemptedError from None
            raise
        except ChildFailedError as error:
            with signals_ignored():
                end_groups([*(failure.pid for failure in error.failures.values()), *self.processes()])
                codes = {int(failure.exitcode) for failure in error.failures.values()}
                if PREEMPTED in codes:
                    self._end_records("stopped", "preempted")
                    # The agents of other hosts may have asked, as they do before ranks are started again.
                    raise (HostsChangedError if self.has_others and self.met.is_told() else RunPreemptedError) from None
                # Signals that ended ranks before they had saved: they ran out of time, or do not handle them.
                unsaved = [each for each in self.signals[:1] if -each in codes]
                unsaved += [each for each in PREEMPTING if BY_SIGNAL + each in codes]
                if unsaved:
                    _stop(unsaved[0])
                note_mismatch(self.folder, range(self.met.size * self.asked.ranks) if self.has_others else self.ranks)
                failures = locate_deaths(self.folder, self._failures(error, scratch))
                if failures:
                    self._end_records("failed", str(first_cause(failures)).splitlines()[0])
                problem = explain_failures(failures, self.folder)
                if isinstance(problem, UsageError):
                    forget(self.folder, FAILURES)  # refused: the folder of a resumed run stays as it was
            raise problem from None

    def _failures(self, error: ChildFailedError, scratch: Path) -> list[Failure]:
        """Collects how the ranks failed: what they left, and for those that left nothing, how they ended."""
        told = read_failures(self.folder)
        if verdicts := [failure for failure in told if failure.kind == "hang"]:
            return verdicts  # whichever host found it, and whatever a rank still wrote
        found = [failure for failure in told if failure.rank in self.ranks]
        exit_codes = {rank: int(each.exitcode) for rank, each in error.failures.items()}  # in the order they were seen
        unfinished = set(open_attempts(self.folder, self.ranks, since=self._started))
        exit_codes |= dict.fromkeys(unfinished - set(exit_codes), 0)
        for rank, code in exit_codes.items():
            if any(failure.rank == rank for failure in found):
                continue
            # What it printed before it opened its log, where it is known by its number on this host.
            names = [f"{rank - self.ranks.start}/{name}" for name in ("stdout.log", "stderr.log")]
            early = sorted(path for name in names for path in scratch.rglob(name))
            output = "".join(path.read_text(encoding="utf-8", errors="replace") for path in early)
            log = self.folder / "logs" / f"rank-{rank}.log"
            if output:
                with contextlib.suppress(OSError), log.open("a") as file:
                    file.write(output)
            found.append(silent_failure(rank, code, output if code > 0 else "", _end_of(log)))
        return found


def _agent_config(asked: LocalRanks, scratch: Path, met: Rendezvous) -> LaunchConfig:
    nodes = asked.nodes
    known = LaunchConfig.__dataclass_fields__
    handled = ",".join(each.name for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN)
    newer: dict[str, Any] = {"signals_to_handle": handled, "shutdown_timeout": _PATIENCE_S}
    return LaunchConfig(
        min_nodes=1 if nodes is None else nodes.least,
        max_nodes=1 if nodes is None else nodes.most,
        nproc_per_node=asked.ranks,
        run_id=asked.run_id,
        rdzv_backend=BACKEND,
        rdzv_endpoint="localhost" if nodes is None else nodes.endpoint,
        rdzv_configs={"made": met},
        # Without an address it looks this machine's name up, which laptops often cannot.
        local_addr="localhost" if nodes is None else nodes.own_address(),
        max_restarts=0,
        monitor_interval=0.05,
        # What a worker prints before it opens its own log.
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch), redirects=Std.ALL),
        **{name: value for name, value in newer.items() if name in known},  # not in torch 2.6
    )


def _settings(asked: LocalRanks) -> dict[str, str]:
    nodes, share = asked.nodes, max(1, len(usable_cores()) // asked.ranks)
    near = loopback_interface() if nodes is None else interface_of(nodes.own_address())
    return {
        "OMP_NUM_THREADS": str(asked.threads or share),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", near or loopback_interface()),
        **({"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", f"={near}")} if nodes is None else {}),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        "PYTHONUNBUFFERED": "1",
        **allocator_variables(),
        **asked.variables,
    }


def _end_of(log: Path) -> str:
    """Returns the end of a rank's log, if there is one."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
        return file.read().decode("utf-8", "replace")
    return ""


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _stop(number: int) -> NoReturn:
    raise SignalException(f"got signal {number}", signal.Signals(number))


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silences the agent's log, whose many loggers have levels of their own: what matters is told in our words."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
