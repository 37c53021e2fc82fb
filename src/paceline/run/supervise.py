"""Attempt after attempt: a run whose ranks failed is started again from its newest checkpoint, while that helps.

The same loop runs in the launcher of one host and in those of several. torch's elastic agent starts one process per
rank, looks at them every 50 ms, and restarts nothing: the first failure ends the attempt, and no process is left. The
launchers agree on one account of it (``Launcher.agree_on_end``), and ``health/diagnosis.py`` decides for all:

    rank 1 was killed by SIGKILL after step 37; restarting 4 ranks from step 30 (restart 1 of 3)

New ranks are forked from a process that has torch loaded (``warm.py``), and load the checkpoint. Signals are
those of [Note: preemption] in ``signals.py``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline import errors
from paceline.checkpoint.find import is_whole, list_checkpoints, read_manifest, spots_in
from paceline.checkpoint.manifest import Line, line_from
from paceline.checkpoint.storage import absolute_path, is_snapshot
from paceline.cluster.detect import usable_cores
from paceline.config import Config, check_ranks, dump_yaml, load_config
from paceline.health.diagnosis import FailedAttempt, Stop, after_failure, first_cause
from paceline.health.exit_codes import PREEMPTED
from paceline.health.failure import Failure, silent_failure
from paceline.records.records import EndStatus
from paceline.run import notes
from paceline.run.agreement import HostFacts
from paceline.run.decide import rank_variables
from paceline.run.folder import change_config, config_of, read_plan
from paceline.run.keeper import MEMORY, Keeper, keeping
from paceline.run.location import RunLocation, find_start
from paceline.run.logs import say
from paceline.run.notes import RunFailedError, RunPreemptedError, RunStoppedError
from paceline.run.processes import allocator_variables, end_groups, loopback_interface, uses_gpu, uses_nccl
from paceline.run.records import Mark, end_records, mark_records, open_attempts
from paceline.run.rendezvous import BACKEND, CHANGED, HostsChangedError, LeftOutError, Rendezvous, rendezvous
from paceline.run.signals import BY_SIGNAL, ENDING, PREEMPTING, launcher_signals, scratch_folder, signals_ignored
from paceline.run.stay import SPARES, STAYS
from paceline.run.warm import WarmRanks
from paceline.run.watch import Watch, WatchPolicy, watch_policy
from paceline.run.whereami import Surroundings, host_name, interface_of

_LOG_BYTES = 2**16  # of a rank's log that are looked at
_PATIENCE_S = 5  # from the signal that asks ranks to end to the one that does not ask
# For a rank that is well to end its attempt; then it is killed. On a GPU a new process takes longer than this.
_STAYS_S, _STAYS_GPU_S = 1.5, 8.0
_SPARES_AFTER_S = 10.0  # from the last rank's start on: what spares do ahead would hold ranks up that are starting


def supervise(launcher: Launcher, config: Config, location: RunLocation) -> None:
    """Runs attempts until one is done. Raises the last one's error, with the reason why there is no other."""
    policy, folder = config.recovery, location.folder
    first, own = location.checkpoint, None
    if first is not None:  # the line of checkpoints that the run continues
        own = line_from(read_manifest(first).spot, list(spots_in(first.parent).values()))
    command = rank_command(launcher, first)
    while True:
        ended: FailedAttempt | None = None
        words = ""
        halved: tuple[str, str] | None = None
        try:
            launcher.start(command)
            return
        except HostsChangedError as error:
            words = str(error)
        except RunFailedError as error:
            is_asked = error.diagnosis.cause.kind == "out_of_memory" and policy.on_oom == "halve"
            halved = halved_config(folder) if is_asked else None
            can_halve = not is_asked or halved is not None
            ended = FailedAttempt.of(error.diagnosis, notes.read_progress(folder), can_halve=can_halve)
        failed, change, is_ours = launcher.agree_on_end(ended, words)
        decision = None if change else after_failure(policy, failed)
        if not folder.is_dir():
            if not failed:
                rule = "a run keeps its records and checkpoints there"
                raise errors.RunFolderError(f"{folder} is gone\n  {rule}\n  start it anew")
            decision = Stop(reason="not started again: its folder is gone")
        if isinstance(decision, Stop):
            raise _stopped(failed[-1], decision)
        if decision is not None and decision.halves_microbatch and is_ours and halved is not None:
            change_config(folder, *halved)
        checkpoint, where = first, "from the newest checkpoint"
        if not launcher.has_others:
            checkpoint, where = _starting_point(config, folder, first, own, launcher.memory)
        command = rank_command(launcher, checkpoint)
        if decision is None:
            say(f"{change}; restarting {where} (hosts that come or go are not charged)")
            continue
        what, of = str(failed[-1]), policy.max_restarts
        command += ["--restart", json.dumps({"number": decision.number, "of": of, "reason": what})]
        count, kind = config.parallel.ranks, "virtual " if config.comm.backend == "virtual" else ""
        ranks = "" if launcher.has_others else f"{count} {kind}rank{'s' if count != 1 else ''} "
        smaller = " with half the microbatch" if decision.halves_microbatch else ""
        say(f"{what}; restarting {ranks}{where}{smaller} (restart {decision.number} of {of})")


def _stopped(attempt: FailedAttempt, end: Stop) -> RunFailedError:
    assert attempt.diagnosis is not None  # every launcher tells it
    return RunFailedError(attempt.diagnosis, end)


def rank_command(launcher: Launcher, checkpoint: Path | str | None) -> list[str]:
    """Returns what each rank runs: a module and its arguments. Ranks of several hosts find the newest checkpoint."""
    command = ["paceline.run.worker", str(launcher.folder), "--launcher", str(os.getpid())]
    start = "auto" if launcher.has_others else checkpoint
    return command if start is None else [*command, "--resume", str(start)]


def halved_config(folder: Path) -> tuple[str, str] | None:
    """Returns a run's config and plan with half the microbatch and the same global batch; None where that cannot be."""
    config, plan = load_config(config_of(folder)), read_plan(folder)
    used = 0 if plan is None else plan.layout.microbatch
    if plan is None or used < 2:
        return None
    smaller = config.with_values("train", microbatch=used // 2, accumulate=None)
    try:
        if check_ranks(smaller, plan.layout.ranks):
            return None
    except errors.ConfigError:
        return None
    return dump_yaml(smaller), replace(plan.with_microbatch(used // 2), finds_microbatch=False).to_text()


def _starting_point(
    config: Config, folder: Path, first: Path | None, own: Line | None, memory: Path | None
) -> tuple[Path | None, str]:
    """Finds the newest checkpoint of the run's line that is whole, in words too; tells of newer ones that are not."""
    passed: list[str] = []
    path: Path | None
    try:
        path = absolute_path(find_start(config, folder, "auto", passed.append, own, memory))
    except errors.CheckpointError as error:
        path = first if first is not None and is_whole(first, config.checkpoint.verify) else None
        where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
        if list_checkpoints(where / "checkpoints") or list_checkpoints(where):
            passed.append(str(error))
    if passed:
        say("\n  ".join(passed))
    if path is None:
        return None, "from the beginning: there is no checkpoint"
    number = path.name.rpartition("-")[2]
    store = " in the memory of hosts" if is_snapshot(path) else ""
    return path, f"from step {int(number) if number.isdecimal() else 0}{store}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRanks:
    """The processes of one launcher, with ``variables`` in their environment, forked by ``warm`` where that is given.

    ``num_records`` ranks write records (None: one each). ``watch`` ends ranks that stand still, hosts share ``facts``.
    """

    ranks: int
    num_records: int | None = None
    threads: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    warm: WarmRanks | None = None
    watch: WatchPolicy | None = None
    nodes: Surroundings | None = None
    keeps_snapshots: bool = False
    facts: HostFacts | None = None
    run_id: str = field(default_factory=lambda: f"paceline-{os.getpid()}")

    @classmethod
    def of(cls, config: Config, ranks: int, secret: Mapping[str, str] | None = None, **others: Any) -> Self:
        """Returns ``ranks`` processes for a config. Raises ConfigError where the environment contradicts it."""
        variables = {**rank_variables(config, uses_nccl=uses_nccl(config)), **(secret or {})}
        threads, watch = config.parallel.threads, watch_policy(config)
        if config.recovery.keep_processes and watch is not None:  # it sees what NCCL is told to leave alone
            variables[STAYS] = str(_STAYS_GPU_S if uses_gpu(config) else _STAYS_S)
            if config.recovery.spares:
                variables[SPARES] = f"{config.recovery.spares},{_SPARES_AFTER_S}"
        keeps = config.checkpoint.memory.every_steps is not None
        return cls(ranks=ranks, threads=threads, variables=variables, watch=watch, keeps_snapshots=keeps, **others)


@contextlib.contextmanager
def launching(folder: Path, asked: LocalRanks) -> Iterator[Launcher]:
    """Yields what starts this host's ranks, once other launchers are met; a signal raises when no rank is left."""
    made = Launcher(folder, asked)
    try:  # a signal may come as soon as there are handlers for it, and as long
        with (
            launcher_signals(made.living, _stop) as made.signals,
            _environment(_settings(asked)),
            scratch_folder() as scratch,
            rendezvous(scratch, asked.run_id, asked.nodes, asked.facts) as made.met,
            _environment(made.met.variables),
            keeping(asked.nodes, is_wanted=asked.keeps_snapshots) as made.keeper,
            _environment({} if made.memory is None else {MEMORY: str(made.memory)}),
        ):
            try:
                yield made
            except errors.UsageError as error:
                made.met.end(refusal=str(error))
                raise
            except LeftOutError:
                raise  # the run goes on without this host
            except (errors.PacelineError, RendezvousError):
                made.met.end()
                raise
            made.met.end()
    except SignalException as error:
        with signals_ignored():
            end_groups(made.processes())
            reason = made.end_by(error.sigval)
        raise reason from None
    except RendezvousError as error:
        raise errors.LaunchError(str(error)) from error
    except (RuntimeError, OSError) as error:  # the agent itself failed
        raise errors.LaunchError(f"the ranks could not be started: {str(error) or type(error).__name__}") from error
    finally:
        # The system uses process numbers again.
        notes.forget(folder, *(f"logs/rank-{rank}.pid" for rank in notes.noted_processes(folder, os.getpid())))


@dataclass(slots=True)
class Launcher:
    """Starts the ranks of this host, attempt after attempt. ``ranks`` are those that write records here."""

    folder: Path
    asked: LocalRanks
    met: Rendezvous = field(init=False)
    keeper: Keeper | None = None
    signals: list[signal.Signals] = field(default_factory=list)  # that asked for room
    ranks: range = range(0)
    _marks: dict[int, Mark] = field(default_factory=dict)  # where records of the attempt begin; none: it has not begun
    _watched: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _pids: dict[int, int] = field(default_factory=dict)
    _left: set[int] = field(default_factory=set)  # ranks that were gone before the agent ended any

    @property
    def has_others(self) -> bool:  # launchers of other hosts
        return self.asked.nodes is not None

    @property
    def memory(self) -> Path | None:
        """The folder of this host's snapshots, if it keeps any."""
        return None if self.keeper is None else self.keeper.root

    def processes(self) -> list[int]:
        return list(notes.noted_processes(self.folder, os.getpid()).values())

    def living(self) -> list[int]:
        return [pid for pid in self.processes() if psutil.pid_exists(pid)]

    def start(self, command: Sequence[str]) -> None:
        """Runs ``python -m <command>`` on all processes until they are done: one attempt.

        Raises RunFailedError with the cause when a rank fails, HostsChangedError when hosts come or go, UsageError when
        a rank refuses what was asked for, and RunPreemptedError when the ranks were asked to stop and have saved.
        """
        asked = self.asked
        arguments = ["-u", "-m", *command] if asked.warm is None else asked.warm.arguments(command)
        self._marks = {}
        self.met.on_join, self.met.on_look = self._begin, self._look
        with scratch_folder() as scratch:
            self._run(arguments, _agent_config(asked, scratch, self.met), scratch)

    def agree_on_end(self, ended: FailedAttempt | None, words: str = "") -> tuple[list[FailedAttempt], str, bool]:
        """Agrees with other hosts on how the attempt ended; None: hosts came or went, as ``words`` say.

        Returns all attempts that have failed, which hosts came or went, and whether the account is this launcher's.
        """
        if self.signals:  # and not all ranks have saved: whoever asked for room gets it
            _stop(self.signals[0])
        own = words or f"{CHANGED}others have come or gone" if ended is None else ended.to_text()
        is_sure = not self.has_others or (ended is not None and ended.is_sure)
        try:
            told = self.met.agree_on_end(own, is_sure=is_sure or ended is None)
        except (errors.CommunicationError, TimeoutError) as error:
            if ended is None:
                raise errors.LaunchError(f"the run cannot go on: {error}") from error
            raise _stopped(ended, Stop(reason="not started again: the launcher where hosts meet is gone")) from error
        failed = [FailedAttempt.from_text(text) for text in told if not text.startswith(CHANGED)]
        return failed, told[-1] if told[-1].startswith(CHANGED) else "", told[-1] == own

    def end_by(self, number: signal.Signals) -> errors.LaunchError:
        """Ends the records of ranks that a signal has ended, and returns what is said of it."""
        is_saved = self._was_preempted()
        if number in PREEMPTING and (is_saved or not (self._marks and notes.has_trained(self.folder))):
            self._end_records("stopped", "preempted")
            return RunPreemptedError(is_saved=is_saved)
        self._end_records("stopped", f"ended by {number.name}")
        return RunStoppedError(number)

    def _begin(self, place: int, size: int) -> None:
        """Begins to watch this host's ranks, which is at ``place`` of ``size``, once what others left is gone."""
        first, num = place * self.asked.ranks, self.asked.num_records or self.asked.ranks
        self.ranks = range(first, first + (self.asked.ranks if self.has_others else num))
        notes.forget_attempt(self.folder, first, None if place == size - 1 else self.ranks.stop)
        self._marks = mark_records(self.folder, self.ranks)
        self._pids, self._left = {}, set()
        if self.keeper is not None:
            self.keeper.meet(place, size, self.met)
        if self.asked.watch is not None:
            num = len(self.ranks)
            hosts = {str(each): range(each * num, (each + 1) * num) for each in range(size)}
            channel = self.met.side_channel() if size > 1 else None
            watch = Watch(self.folder, hosts, self.asked.watch, host=str(place), channel=channel, named=host_name())
            self._watched.callback(watch.stop)
            watch.start()

    def _look(self) -> None:
        """Notes ranks that have left while the agent takes all for healthy; on one host they need no proof."""
        if self.has_others:
            if len(self._pids) < len(self.ranks):
                with contextlib.suppress(OSError, ValueError):  # a note that is being written
                    self._pids = notes.noted_processes(self.folder, os.getpid())
            self._left |= {rank for rank, pid in self._pids.items() if not psutil.pid_exists(pid)}

    def _end_records(self, status: EndStatus, message: str) -> None:
        end_records(self.folder, self._marks, status, message)

    def _was_preempted(self) -> bool:
        return bool(self._marks) and notes.was_preempted(self.folder)

    def _run(self, arguments: Sequence[str], agent: LaunchConfig, scratch: Path) -> None:
        try:
            with contextlib.ExitStack() as self._watched:  # no watch adds to records that have an end
                self._watched.callback(logging.disable, logging.root.manager.disable)
                logging.disable(logging.CRITICAL)  # the agent's many loggers: what matters is told in our words
                elastic_launch(agent, sys.executable)(*arguments)
        except (RendezvousError, errors.CommunicationError) as error:
            # The launcher where hosts meet may have left first.
            if self._was_preempted():
                raise RunPreemptedError from None
            if self.met.is_cut_off:
                raise HostsChangedError from None
            if self.has_others and isinstance(error, errors.CommunicationError):  # of this launcher's own
                raise HostsChangedError(f"{CHANGED}on {host_name()}, {error}") from error
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
                everybody = range(self.met.size * self.asked.ranks) if self.has_others else self.ranks
                notes.note_mismatch(self.folder, everybody)
                failures = notes.locate_deaths(self.folder, self._failures(error, scratch))
                if failures:
                    self._end_records("failed", str(first_cause(failures)).splitlines()[0])
                problem = notes.explain_failures(failures, self.folder)
                if isinstance(problem, errors.UsageError):
                    notes.forget(self.folder, notes.FAILURES)  # refused: the folder of a resumed run stays as it was
            raise problem from None

    def _failures(self, error: ChildFailedError, scratch: Path) -> list[Failure]:
        """Collects how the ranks failed: what they left, and for those that left nothing, how they ended."""
        told = notes.read_failures(self.folder)
        if verdicts := [failure for failure in told if failure.kind == "hang"]:
            return verdicts  # whichever host found it, and whatever a rank still wrote
        found = [failure for failure in told if failure.rank in self.ranks]
        exit_codes = {rank: int(each.exitcode) for rank, each in error.failures.items()}  # in the order they were seen
        unfinished = set(open_attempts(self.folder, self._marks))
        if self.has_others:  # where one lost a rank of another host, the agent has ended those beside it
            unfinished &= self._left
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
            end = ""
            with contextlib.suppress(OSError), log.open("rb") as tail:
                tail.seek(max(0, os.fstat(tail.fileno()).st_size - _LOG_BYTES))
                end = tail.read().decode("utf-8", "replace")
            found.append(silent_failure(rank, code, output if code > 0 else "", end))
        return found


def _agent_config(asked: LocalRanks, scratch: Path, met: Rendezvous) -> LaunchConfig:
    nodes = asked.nodes
    handled = ",".join(each.name for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN)
    newer: dict[str, Any] = {"shutdown_timeout": _PATIENCE_S}  # not in torch 2.10
    return LaunchConfig(
        min_nodes=1 if nodes is None else nodes.least,
        max_nodes=1 if nodes is None else nodes.count,
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
        signals_to_handle=handled,
        **{name: value for name, value in newer.items() if name in LaunchConfig.__dataclass_fields__},
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


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


def _stop(number: int) -> NoReturn:
    raise SignalException(f"got signal {number}", signal.Signals(number))
