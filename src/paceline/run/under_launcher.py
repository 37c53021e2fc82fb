"""A rank of a launcher that somebody else started, such as torchrun: ``torchrun -m paceline train CONFIG``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from paceline.cluster.detect import detect_machine, usable_cores
from paceline.comm.base import Communicator
from paceline.comm.ledger.file import LedgerReader, ledger_path
from paceline.comm.objects import ask_first_rank
from paceline.comm.torch_dist import connect, disconnect
from paceline.config import Config
from paceline.errors import PreemptedError, UsageError
from paceline.health.exit_codes import FAILED, PREEMPTED, REFUSED
from paceline.health.failure import Failure
from paceline.records.console import ProgressView
from paceline.run import processes
from paceline.run.decide import BackgroundPrediction, Decision, decide_run, predict_run, rank_variables, show_decisions
from paceline.run.folder import RunFolder
from paceline.run.location import RunLocation, RunOptions, RunResult, claim_run, locate_run, read_result
from paceline.run.logs import log, rank_logs, say
from paceline.run.observe import sampling, tracking
from paceline.run.records import end_records
from paceline.run.signals import hear_requests
from paceline.run.watch import watch_itself, watch_policy
from paceline.run.worker import RankRunner, StartTimes

_PATIENCE_S = 2.0  # ranks that are done leave: the dry run, which has to load torch first, is for runs of some length


def run_under_launcher(asked: Config, options: RunOptions) -> RunResult | None:
    """Runs this process as one rank of a launcher that somebody else started; returns the result on rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: a rank may sit in a collective
    times = StartTimes.since_start_of(os.getpid())
    times.lap("processes")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is an agent, and not a shell that may go
        processes.end_with_parent(os.getppid())
    # Ranks that an agent has started again are of the same run: no new number.
    is_first = processes.restarted_by_launcher() is None
    location = locate_run(asked, force=options.force, resume=options.resume, may_number=is_first)
    os.environ.update(rank_variables(asked, uses_nccl=processes.uses_nccl(asked)))
    if asked.comm.backend == "virtual":
        raise UsageError(
            "comm.backend = virtual under a launcher of processes\n  virtual ranks take turns in one process\n"
            "  start it with paceline train alone, or set comm.backend = auto"
        )
    machine = None if processes.uses_gpu(asked) else detect_machine(with_gpus=False)  # with all cores
    cores = usable_cores()
    processes.keep_cores(asked)
    device = None if asked.parallel.device == "auto" else asked.parallel.device
    comm = connect(asked.comm.backend, device=device, timeout_s=asked.comm.timeout_s)
    decision = decide_run(asked, comm=comm, machine=machine, checks_memory=options.checks_memory)
    claimed, location, prediction = _claim_together(comm, location, decision, cores, force=options.force)
    decision = replace(decision, config=location.settle(decision.config))
    config, choice = decision.config, decision.choice
    view = ProgressView() if comm.rank == 0 and config.monitor.console and not options.is_quiet else None
    if view is not None:
        show_decisions(config, choice, decision.notes)
    times.lap("joining")
    _run_rank(decision, comm, location, claimed, prediction, view, times)
    comm.barrier()  # every rank's records are complete
    result = read_result(location.folder, config, choice) if comm.rank == 0 else None
    disconnect()
    return result


def _run_rank(
    decision: Decision,
    comm: Communicator,
    location: RunLocation,
    claimed: RunFolder | None,
    prediction: AbstractContextManager[None],
    view: ProgressView | None,
    times: StartTimes,
) -> None:
    """Trains this rank; where it fails, leaves the process."""
    folder, started, config = location.folder.absolute(), time.time(), decision.config
    attempt = RankRunner(folder, comm.rank, restart=processes.restarted_by_launcher(), times=times)
    hear_requests(attempt.request.ask, grace_s=config.recovery.grace_s, leave=processes.leave_process)
    comm = watch_itself(comm, folder, watch_policy(config))
    try:
        with (
            rank_logs(folder, comm.rank, config.monitor.log_level, owns_output=False),
            _observing(folder, config, comm),
            prediction,
        ):
            attempt.run(config, comm, plan=decision.plan, resume=location.checkpoint, view=view)
    except BaseException as error:
        if view is not None:
            view.flush()
            view.close()
        if isinstance(error, PreemptedError):
            if comm.rank == 0:
                say(str(error))
            processes.leave_process(PREEMPTED)
        _leave_launcher(attempt.describe(error), location.folder, claimed, started)


@contextlib.contextmanager
def _observing(folder: Path, config: Config, comm: Communicator) -> Iterator[None]:
    """Samples the host in the first of its ranks, and feeds trackers in rank 0: the launcher is not ours."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), processes.node_ranks(config) or comm.size
    here = range(comm.rank, comm.rank + local_ranks)

    def find() -> dict[int, int]:
        readers = {rank: LedgerReader.open(ledger_path(folder, rank)) for rank in here}
        return {rank: reader.pid for rank, reader in readers.items() if reader is not None}

    with (
        tracking(folder, config, log) if comm.rank == 0 else contextlib.nullcontext(),
        sampling(folder, config.monitor.sample_s if local_rank == 0 else None, find, log),
    ):
        yield


def _claim_together(
    comm: Communicator, location: RunLocation, decision: Decision, cores: Sequence[int], *, force: bool
) -> tuple[RunFolder | None, RunLocation, AbstractContextManager[None]]:
    """Claims the run's folder on rank 0, which also predicts the run; all ranks learn whether it worked, and where."""
    claimed: RunFolder | None = None
    prediction: AbstractContextManager[None] = contextlib.nullcontext()

    def claim() -> RunLocation:
        nonlocal claimed, prediction
        claimed, found = claim_run(location, decision.config, decision.plan.to_text(), force=force)
        prediction = _predict(decision.config, claimed, cores)
        return found

    settled = ask_first_rank(comm, claim)
    return claimed, settled, prediction


def _predict(config: Config, claimed: RunFolder, cores: Sequence[int]) -> AbstractContextManager[None]:
    """Writes down what is expected of a run; returns the dry run beside it, of one host: networks are not known."""
    threads, here = config.parallel.threads or torch.get_num_threads(), processes.node_ranks(config)
    expected = predict_run(config, threads=threads, node_ranks=here, cores=cores)
    if expected is not None:
        claimed.write_prediction(expected.to_text())
    if here not in (None, config.parallel.ranks):
        return contextlib.nullcontext()
    return BackgroundPrediction(config, claimed.path, expected, threads=threads, cores=cores, patience_s=_PATIENCE_S)


def _leave_launcher(failure: Failure, folder: Path, claimed: RunFolder | None, started: float) -> NoReturn:
    """Reports this rank's failure, which no launcher of ours will, and ends the process."""
    if not failure.is_refusal:
        end_records(folder, [failure.rank], "failed", str(failure).splitlines()[0], since=started)
    elif claimed is not None:
        claimed.discard()
    is_lost = failure.cause == "lost"
    text = str(failure).splitlines()[0] if is_lost else "\n\n".join(filter(None, (str(failure), failure.traceback)))
    if failure.rank == 0 or not failure.is_refusal:  # every rank finds the same wrong input, and one tells it
        say(text)
    # torchrun shows the earliest as the cause, to the second: a consequence comes a second later.
    processes.tell_agent(str(failure), text, failure.time + is_lost)
    processes.leave_process(REFUSED if failure.is_refusal else FAILED)
