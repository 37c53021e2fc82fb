"""Ranks on this machine: torch's elastic agent starts and supervises one process per rank.

The agent restarts nothing here: the first failure ends the attempt, the cause is told in one message, and no process is
left behind; ``supervise.py`` decides whether there is another. A worker's output goes to its own log; progress is what
the caller reads from the records.

[Note: preemption] SIGTERM, SIGUSR1 and SIGUSR2 are handed on to the ranks, which save and leave together. A second one
after a second or more ends the run at once. Schedulers signal all processes of a job: what comes within that second is
the same request. Where torch's agent cannot be told which signals to leave alone, it takes SIGTERM itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.cluster.detect import usable_cores
from paceline.errors import LaunchError, PacelineError, UsageError
from paceline.run.codes import PREEMPTED
from paceline.run.cores import allocator_variables
from paceline.run.failure import (
    Failure,
    RunPreemptedError,
    RunStoppedError,
    clear_failures,
    explain_failures,
    first_cause,
    read_failures,
    silent_failure,
)
from paceline.run.hangs import forget_hangs, was_hung
from paceline.run.nodes import Nodes, address_towards, interface_of, rendezvous_settings
from paceline.run.orphans import end_groups, forget_processes, noted_processes
from paceline.run.processes import loopback_interface
from paceline.run.progress import forget_progress
from paceline.run.records import end_records, open_attempts
from paceline.run.requests import BY_SIGNAL, PREEMPTING, SAME_REQUEST_S, was_preempted
from paceline.run.watch import WatchPolicy, note_deaths, note_mismatch, watching

if TYPE_CHECKING:
    from paceline.run.warm import WarmRanks

_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = (*_ENDING, *PREEMPTING)
_PATIENCE_S = 5  # from the signal that asks ranks to end to the one that does not ask


def launch_local(
    command: Sequence[str],
    folder: Path,
    *,
    ranks: int,
    num_records: int | None = None,
    threads: int | None = None,
    port: int = 0,
    variables: Mapping[str, str] | None = None,
    warm: WarmRanks | None = None,
    watch: WatchPolicy | None = None,
    nodes: Nodes | None = None,
) -> None:
    """Runs ``python -m <command>`` on ``ranks`` processes until all are done, with ``variables`` in their environment.

    ``num_records`` is how many ranks write records, where processes have several each; None: one each. With ``warm``
    the processes are forked from one that has torch loaded. ``watch`` says when ranks that stand still are ended; None:
    never. With ``nodes`` these are the ranks of one host of several, which watch themselves, and the agent starts them
    again by itself.

    Raises RunFailedError with the cause when a rank fails, UsageError when it refuses what was asked for,
    RunPreemptedError when a signal asked the ranks to stop and they have saved, and RunStoppedError when a signal ends
    the run. In each case the records get an end, and no rank is left.
    """
    if nodes is None:  # else others use the folder too
        clear_failures(folder)
        forget_processes(folder)
        forget_progress(folder)
        forget_hangs(folder)
    started, written = time.time(), range(num_records or ranks)
    arguments = ["-u", "-m", *command] if warm is None else warm.arguments(command)
    settings = {**_settings(ranks, threads, nodes), **(variables or {})}
    with _signals(folder) as asked, _environment(settings), _quiet_agent():
        try:
            watched = watching(folder, written, watch) if nodes is None else contextlib.nullcontext()
            with tempfile.TemporaryDirectory() as scratch, watched:
                agent = _agent_config(ranks, port, Path(scratch), nodes)
                _run_agent(arguments, folder, agent, Path(scratch), written=written, started=started, asked=asked)
        except SignalException as error:
            with _deaf():
                end_groups(noted_processes(folder, os.getpid()).values())
                end_records(folder, written, "stopped", f"ended by {error.sigval.name}", since=started)
            raise RunStoppedError(error.sigval) from None
        except (RendezvousError, RuntimeError, OSError) as error:  # the agent itself failed
            raise LaunchError(_explain_start(error, port)) from error
        finally:
            forget_processes(folder, os.getpid())


def check_port(port: int) -> None:
    """Raises LaunchError if the ranks cannot meet at a port; 0 stands for any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            raise LaunchError(_explain_port(error, port)) from error


def _run_agent(
    arguments: Sequence[str],
    folder: Path,
    agent: LaunchConfig,
    scratch: Path,
    *,
    written: range,
    started: float,
    asked: list[signal.Signals],
) -> None:
    try:
        elastic_launch(agent, sys.executable)(*arguments)
        if was_preempted(folder, since=started):
            raise RunPreemptedError("preempted: the state is saved")
        if was_hung(folder):
            raise _failed(read_failures(folder), folder, written, started)
    except ChildFailedError as error:
        with _deaf():
            end_groups(
                [*(failure.pid for failure in error.failures.values()), *noted_processes(folder, os.getpid()).values()]
            )
            codes = {int(failure.exitcode) for failure in error.failures.values()}
            if PREEMPTED in codes:
                end_records(folder, written, "stopped", "preempted", since=started)
                raise RunPreemptedError("preempted: the state is saved") from None
            number = _unsaved(codes, asked)
            if number is not None:
                raise SignalException(f"got signal {number}", number) from None
            note_mismatch(folder, written)
            failures = _failures(error, folder, scratch, open_attempts(folder, written, since=started))
            problem = _failed(note_deaths(folder, failures), folder, written, started)
            if isinstance(problem, UsageError):
                clear_failures(folder)  # refused: the folder of a resumed run stays as it was
        raise problem from None


def _failed(failures: list[Failure], folder: Path, written: range, started: float) -> PacelineError:
    """Ends the records of ranks that failed, and returns what is told."""
    if failures:
        cause = str(first_cause(failures)).splitlines()[0]
        end_records(folder, written, "failed", cause, since=started)
    return explain_failures(failures, folder)


def _unsaved(codes: set[int], asked: list[signal.Signals]) -> signal.Signals | None:
    """Returns the signal that ended ranks which had not saved yet: they had no time left, or do not know of it."""
    if asked and -asked[0] in codes:
        return asked[0]
    return next((number for number in PREEMPTING if BY_SIGNAL + number in codes), None)


def _agent_config(ranks: int, port: int, scratch: Path, nodes: Nodes | None) -> LaunchConfig:
    known = LaunchConfig.__dataclass_fields__
    handled = ",".join(each.name for each in _ENDING if signal.getsignal(each) is not signal.SIG_IGN)
    newer: dict[str, Any] = {"signals_to_handle": handled, "shutdown_timeout": _PATIENCE_S}
    return LaunchConfig(
        min_nodes=1 if nodes is None else nodes.least,
        max_nodes=1 if nodes is None else nodes.most,
        nproc_per_node=ranks,
        run_id=f"paceline-{os.getpid()}" if nodes is None else nodes.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}" if nodes is None else nodes.endpoint,
        # Alone it keeps the store; else it would join whoever has the port.
        rdzv_configs={"is_host": True} if nodes is None else rendezvous_settings(),
        # Without an address it looks this machine's name up, which laptops often cannot.
        local_addr="localhost" if nodes is None else address_towards(nodes.host, nodes.port),
        max_restarts=0 if nodes is None else nodes.max_restarts,
        monitor_interval=0.05,
        # What a worker prints before it opens its own log.
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch), redirects=Std.ALL),
        **{name: value for name, value in newer.items() if name in known},  # not in torch 2.6
    )


def _settings(ranks: int, threads: int | None, nodes: Nodes | None) -> dict[str, str]:
    share = max(1, len(usable_cores()) // ranks)
    near = loopback_interface() if nodes is None else interface_of(address_towards(nodes.host, nodes.port))
    return {
        "OMP_NUM_THREADS": str(threads or share),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", near or loopback_interface()),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        "PYTHONUNBUFFERED": "1",
        **allocator_variables(),
        # The agent's shared store is announced in the first round only: who joins later would wait for it in vain.
        **({} if nodes is None else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    }


def _failures(error: ChildFailedError, folder: Path, scratch: Path, unfinished: list[int]) -> list[Failure]:
    """Collects how the ranks failed: what they left, and for those that left nothing, how they ended."""
    found = read_failures(folder)
    exit_codes = {rank: int(each.exitcode) for rank, each in error.failures.items()}  # in the order they were seen
    exit_codes |= dict.fromkeys(set(unfinished) - set(exit_codes), 0)
    for rank, code in exit_codes.items():
        if any(failure.rank == rank for failure in found):
            continue
        output = _early_output(rank, scratch)
        if output:
            with contextlib.suppress(OSError), (folder / "logs" / f"rank-{rank}.log").open("a") as log:
                log.write(output)
        found.append(silent_failure(rank, code, output if code > 0 else ""))
    return found


def _early_output(rank: int, scratch: Path) -> str:
    """Returns what a rank printed before it opened its log."""
    paths = sorted(path for name in ("stdout.log", "stderr.log") for path in scratch.rglob(f"{rank}/{name}"))
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def _explain_start(error: Exception, port: int) -> str:
    cause = error.__cause__ or error
    text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    if port and ("EADDRINUSE" in text or "in use" in text):
        return _explain_port(OSError(errno.EADDRINUSE, text), port)
    return f"the ranks could not be started: {text}"


def _explain_port(error: OSError, port: int) -> str:
    is_used = error.errno == errno.EADDRINUSE
    what = f"port {port} is in use" if is_used else f"port {port} cannot be used: {error.strerror or error}"
    return f"{what}\n  the ranks meet there\n  choose another with --port, or leave it out for a free one"


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
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


@contextlib.contextmanager
def _signals(folder: Path) -> Iterator[list[signal.Signals]]:
    """Turns signals into SignalException from the first moment on, and gives them back in the end.

    The agent does the same, but only once it starts ranks, and keeps them. One that is ignored stays so: with nohup, a
    run outlives its terminal. Those of [Note: preemption] go to the ranks first; yields those that did.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    asked: list[signal.Signals] = []
    asked_at = 0.0

    def stop(number: int, _: FrameType | None) -> None:
        raise SignalException(f"got signal {number}", signal.Signals(number))

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now, processes = time.monotonic(), noted_processes(folder, os.getpid())
        if asked and now - asked_at < SAME_REQUEST_S:
            return
        if asked or not processes:
            stop(number, frame)
        asked.append(signal.Signals(number))
        asked_at = now
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, hand_on if number in PREEMPTING else stop)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Lets a short piece of work finish whatever signals come."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silences the agent's log, whose many loggers have levels of their own: what matters is told in our words."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
