"""A rank of a launcher that somebody else started, such as torchrun: ``torchrun -m paceline train CONFIG``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.errors import PreemptedError
from paceline.run.attempt import Attempt
from paceline.run.codes import FAILED, PREEMPTED, REFUSED
from paceline.run.failure import Failure
from paceline.run.folder import RunFolder, claim_folder
from paceline.run.orphans import end_with_parent
from paceline.run.rank_process import keep_cores, leave_process, node_ranks, restarted_by_launcher, uses_gpu, uses_nccl
from paceline.run.requests import hear_requests

if TYPE_CHECKING:
    from paceline.cli.train import Place
    from paceline.comm.base import Communicator
    from paceline.config import Config

_PATIENCE_S = 2.0  # ranks that are done leave: the dry run, which has to load torch first, is for runs of some length


def run_under_launcher(
    asked: Config, *, force: bool, resume: str | None, as_json: bool, is_judged: bool = True
) -> None:
    """Runs this process as one rank of a launcher that somebody else started, such as torchrun.

    ``is_judged``: a run that needs more memory than this host has is refused, where it has all ranks.
    """
    from paceline.cli.train import check_host, find_place, show_decisions, show_result
    from paceline.cluster.detect import detect_machine, usable_cores
    from paceline.comm.torch_dist import connect, disconnect
    from paceline.config import check_ranks
    from paceline.errors import ConfigError, UsageError
    from paceline.records.console import ProgressView
    from paceline.run.beside import watch_beside
    from paceline.run.memory_check import check_memory
    from paceline.run.settings import set_variables
    from paceline.run.watch import watch_policy
    from paceline.train.resolve import resolve_together

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: a rank may sit in a collective
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is an agent, and not a shell that may go
        end_with_parent(os.getppid())
    place = find_place(asked, force=force, resume=resume)
    set_variables(asked, uses_nccl=uses_nccl(asked))
    device = None if asked.parallel.device == "auto" else asked.parallel.device
    if asked.comm.backend == "virtual":
        raise UsageError(
            "comm.backend = virtual under a launcher of processes\n  virtual ranks take turns in one process\n"
            "  start it with paceline train alone, or set comm.backend = auto"
        )
    machine = None if uses_gpu(asked) else detect_machine(with_gpus=False)  # with all cores
    cores = usable_cores()
    keep_cores(asked)
    comm = connect(asked.comm.backend, device=device, timeout_s=asked.comm.timeout_s)
    problems = check_ranks(asked, comm.size, node_ranks(asked))
    if problems:
        raise ConfigError(problems, source="config")
    parallel = asked.parallel.model_copy(update={"ranks": comm.size, "device": comm.device.type})
    config, choice = asked.model_copy(update={"parallel": parallel}), None
    if parallel.strategy == "auto":
        config, choice = resolve_together(config, comm, node_ranks(config), machine)
    check_host(config, node_ranks(config))
    if is_judged and choice is None and node_ranks(config) in (None, comm.size):
        check_memory(config, is_told=comm.rank == 0)
    claimed, foretold = _claim_together(comm, place, config, cores, force=force)
    view = ProgressView() if comm.rank == 0 and config.monitor.console and not as_json else None
    if view is not None:
        show_decisions(config, choice)
    attempt, started = Attempt(place.folder.absolute(), comm.rank, restart=restarted_by_launcher()), time.time()
    hear_requests(attempt.request.ask, grace_s=config.recovery.grace_s, leave=leave_process)
    comm = watch_beside(comm, place.folder.absolute(), watch_policy(config))
    try:
        with foretold:
            attempt.run(config, comm, resume=place.checkpoint, view=view)
    except BaseException as error:
        if view is not None:
            view.flush()
            view.close()
        if isinstance(error, PreemptedError):
            if comm.rank == 0:
                sys.stderr.write(f"paceline: {error}\n")
            leave_process(PREEMPTED)
        _leave_launcher(attempt.describe(error), place.folder, claimed, started)
    comm.barrier()  # every rank's records are complete
    if comm.rank == 0:
        show_result(place.folder, config, as_json=as_json, choice=choice)
    disconnect()


def _claim_together(
    comm: Communicator, place: Place, config: Config, cores: Sequence[int], *, force: bool
) -> tuple[RunFolder | None, AbstractContextManager[None]]:
    """Claims the run's folder on rank 0, which also predicts the run; all ranks learn whether it worked.

    ``cores`` are those that the ranks of this host share.
    """
    from paceline.comm.objects import broadcast_object
    from paceline.config import dump_yaml
    from paceline.errors import PacelineError

    claimed: RunFolder | None = None
    foretold: AbstractContextManager[None] = contextlib.nullcontext()
    problem: PacelineError | None = None
    if comm.rank == 0:
        try:
            claimed = claim_folder(place.folder, dump_yaml(config), force=force, resume=place.is_continued)
            foretold = _foretell(config, claimed, cores)
        except PacelineError as error:
            problem = error
    problem = broadcast_object(comm, problem)
    if problem is not None:
        raise problem
    return claimed, foretold


def _foretell(config: Config, claimed: RunFolder, cores: Sequence[int]) -> AbstractContextManager[None]:
    """Writes down what is expected of a run whose threads are its launcher's, where the config does not say.

    Returns the dry run that goes on beside it, on one host: of several, this one does not know the network between.
    """
    import torch

    from paceline.cli.train import predict_run
    from paceline.run.foretell import Foretold

    threads, here = config.parallel.threads or torch.get_num_threads(), node_ranks(config)
    expected = predict_run(config, threads=threads, node_ranks=here, cores=cores)
    if expected is not None:
        claimed.expect(expected.to_text())
    if here not in (None, config.parallel.ranks):
        return contextlib.nullcontext()
    return Foretold(config, claimed.path, expected, threads=threads, cores=cores, patience_s=_PATIENCE_S)


def _leave_launcher(failure: Failure, folder: Path, claimed: RunFolder | None, started: float) -> NoReturn:
    """Ends this process with a failure that nobody but this rank will tell."""
    from paceline.run.records import end_records

    if not failure.is_refusal:
        end_records(folder, [failure.rank], "failed", str(failure).splitlines()[0], since=started)
    elif claimed is not None:
        claimed.discard()
    is_lost = failure.cause == "lost"
    text = str(failure).splitlines()[0] if is_lost else "\n\n".join(filter(None, (str(failure), failure.traceback)))
    if failure.rank == 0 or not failure.is_refusal:  # every rank finds the same wrong input, and one tells it
        sys.stderr.write(f"paceline: {text}\n")
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:  # torchrun shows the earliest as the cause, to the second: a consequence comes a second later
        detail = {"py_callstack": text, "timestamp": str(int(failure.time) + is_lost)}
        content = {"message": {"message": str(failure), "extraInfo": detail}}
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    leave_process(REFUSED if failure.is_refusal else FAILED)
