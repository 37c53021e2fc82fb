"""One rank of a run: what the launcher starts on each process.

    python -m paceline.run.worker RUN_FOLDER --launcher PID [--resume CHECKPOINT|auto] [--restart JSON]
    torchrun -m paceline train CONFIG           a rank of a launcher that somebody else started: run_under_launcher

It reads the resolved config from the run's folder, joins the others, trains, and writes records. An error goes to
``logs/rank-<r>.error.json`` and to its log. ``auto`` stands for the run's newest checkpoint, or the beginning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.chaos.faults import VARIABLE
from paceline.chaos.inject import Injector
from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.storage import FileStore, is_snapshot
from paceline.cluster.detect import detect_machine, usable_cores
from paceline.comm.base import Communicator
from paceline.comm.ledger.file import LedgerReader, ledger_path
from paceline.comm.objects import ask_first_rank
from paceline.comm.torch_dist import connect, disconnect
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, load_config
from paceline.engines.blocks import try_compiler
from paceline.engines.engine import ignore_phase
from paceline.errors import CheckpointError, LostRankError, MisfitError, PreemptedError, RankFailedError, UsageError
from paceline.health.exit_codes import FAILED, PREEMPTED, REFUSED
from paceline.health.failure import Failure, describe_error, is_refusal
from paceline.plan.plan import Plan, RunMachine
from paceline.records.console import ProgressView
from paceline.records.sinks import Fanout, JsonlSink, LogSink, Sink, Strided
from paceline.records.thin import lines_kept
from paceline.run import processes, records
from paceline.run.decide import BackgroundPrediction, Decision, decide_run, predict_run, rank_variables, show_decisions
from paceline.run.folder import RunFolder, adopt_config, checkpoint_folder, config_of, read_plan
from paceline.run.forked import PARENT
from paceline.run.keeper import MEMORY
from paceline.run.location import RunLocation, RunOptions, RunResult, claim_run, find_start, locate_run, read_result
from paceline.run.logs import rank_logs, say
from paceline.run.notes import VERDICTS, StepNote, forget, note_preemption, note_process, noted_processes, write_failure
from paceline.run.observe import observing_from_a_rank
from paceline.run.signals import hear_requests
from paceline.run.stay import STAYS, AttemptOverError, is_told_over
from paceline.run.watch import keep_ledger, watch_itself, watch_policy
from paceline.search.request import decided_config, make_plan
from paceline.train.assemble import build_trainer
from paceline.train.evaluate import load_hooks
from paceline.train.step import StepResult
from paceline.train.survive.hooks import ConsensusHook, Saver
from paceline.train.survive.recovery import StopRequest
from paceline.train.survive.snapshots import Snapshots
from paceline.train.trainer import EvaluateHook, Every, Hook, Trainer

_LOGGER = logging.getLogger("paceline")
_PATIENCE_S = 2.0  # ranks that are done leave: the dry run, which has to load torch first, is for runs of some length


def main() -> None:
    parser = argparse.ArgumentParser(prog="paceline.run.worker", description="One rank of a run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--restart", type=json.loads)
    parser.add_argument("--since", type=float, help="by time.monotonic(), of a process that was there before")
    parser.add_argument("--process", default="new")
    arguments = parser.parse_args()
    folder, rank = arguments.folder.absolute(), int(os.environ["RANK"])  # absolute: the user's code may go elsewhere
    note_process(folder, rank, arguments.launcher)  # at once: whoever watches looks at the process
    processes.end_with_parent(int(os.environ.get(PARENT, arguments.launcher)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher decides; a rank may sit in a collective
    restart = arguments.restart
    began = time.monotonic() - process_age(arguments.launcher if restart is None else os.getpid())
    times = StartTimes(arguments.since or began)
    times.lap("processes")
    if restart is not None:
        restart["process"] = arguments.process
    attempt = RankRunner(folder, rank, restart=restart, times=times, launcher=arguments.launcher)
    logs = contextlib.ExitStack()
    try:
        config = load_config(config_of(folder))
        hear_requests(attempt.request.ask, grace_s=config.recovery.grace_s, leave=processes.leave_process)
        processes.redirect_output(folder / "logs" / f"rank-{rank}.log")
        logs.enter_context(rank_logs(folder, rank, config.monitor.log_level, owns_output=True))
        if config.comm.backend == "virtual":
            plan = read_plan(folder)
            assert plan is not None
            _run_virtual(config, plan, attempt, arguments.resume)
            return
        processes.keep_cores(config)
        processes.keep_compiled(config)
        processes.open_device(config)
        comm = connect(config.comm.backend, device=config.parallel.device, timeout_s=config.comm.timeout_s)
        times.lap("joining")
        plan = read_plan(folder)
        if plan is None or plan.layout.ranks != comm.size:  # where hosts come and go, ranks may be fewer or more
            here = processes.node_ranks(config)
            machine = RunMachine(device=config.parallel.device, ranks=comm.size, node_ranks=here)
            plan = make_plan(config, machine, source=f"config, on {comm.size} ranks")
            config = decided_config(config, plan)
        attempt.run(config, comm, plan=plan, resume=arguments.resume)
        disconnect()
    except BaseException as error:
        try:
            attempt.leave(error)
        finally:  # this process stays
            logs.close()
            forget(folder, f"logs/rank-{rank}.pid")


def prepare(arguments: Sequence[str]) -> None:
    """Does what takes a new process long, and asks for no other rank: a spare does it ahead (``warm.py``)."""
    config = load_config(config_of(Path(arguments[0])))
    processes.keep_compiled(config)
    processes.open_device(config, waits=True)
    if config.model.compile not in (False, "none"):
        try_compiler("cuda" if processes.uses_gpu(config) else "cpu")


def _run_virtual(config: Config, plan: Plan, first: RankRunner, resume: str | None) -> None:
    """Runs all ranks in this process, in turn. Where one fails, leaves with its error."""
    ranks, timeout_s = plan.layout.ranks, config.comm.timeout_s
    first.times = None  # they take turns
    attempts = [first, *(replace(first, rank=rank) for rank in range(1, ranks))]

    def run(comm: Communicator) -> None:
        attempts[comm.rank].run(config, comm, plan=plan, resume=resume)

    try:
        run_virtual(run, ranks, device=plan.device, timeout_s=timeout_s)
    except RankFailedError as error:
        attempts[error.rank].leave(error.__cause__ or error)


@dataclass(slots=True)
class StartTimes:
    """A hook that notes how long a run took to come to its first step: an event ``first_step`` in a rank's records.

    processes    from the launcher's start to the rank's first line: Python, torch, the decisions
    joining      the ranks find one another
    data, model  made by the rank; with the engine around the model, the optimizer and the loaders
    checkpoint   read, where the run goes on from one
    step         the first step, in which torch compiles
    """

    began: float  # by time.monotonic()
    parts: dict[str, float] = field(default_factory=dict)
    is_told: bool = False

    def lap(self, part: str) -> None:
        self.parts[part] = time.monotonic() - self.began - sum(self.parts.values())

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if not self.is_told:
            self.is_told = True
            self.lap("step")
            parts = {part: round(seconds, 3) for part, seconds in self.parts.items()}
            trainer.note("first_step", {"seconds": round(sum(self.parts.values()), 3), **parts}, step=result.step)


def process_age(process: int) -> float:
    """Returns for how many seconds a process has been there, on Linux; 0 where nobody can tell."""
    with contextlib.suppress(OSError, ValueError, AttributeError, IndexError):
        # Of psutil's figure the start of the machine is a part, in whole seconds.
        after_name = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    return 0.0


@dataclass(slots=True)
class RankRunner:
    """Runs one rank through one attempt at a run. Virtual ranks share the ``request`` of their process's signals."""

    folder: Path
    rank: int
    restart: dict[str, Any] | None = None
    request: StopRequest = field(default_factory=StopRequest)
    times: StartTimes | None = None
    view: Sink | None = None
    launcher: int = 0  # its process
    _trainer: Trainer | None = None
    _first_step: int | None = None  # once the trainer is built

    def run(
        self, config: Config, comm: Communicator, *, plan: Plan | None = None, resume: str | Path | None = None
    ) -> None:
        """Trains this rank's share and writes its records. Until set-up has worked, the folder stays as it is."""
        if config.parallel.threads is not None:
            torch.set_num_threads(config.parallel.threads)
        comm, path = keep_ledger(comm, self.folder), records.records_path(self.folder, self.rank)
        started = time.monotonic()
        try:
            where = os.environ.get(VARIABLE)  # of the faults that ``paceline chaos`` has for this rank
            checkpoints = checkpoint_folder(config, self.folder)
            faults = None
            if where is not None:
                find_ranks = partial(noted_processes, self.folder)
                faults = Injector(Path(where), self.rank, checkpoints, self.launcher, find_ranks)
            own = load_hooks(config.train.hooks)
            hooks = make_hooks(config, self.folder, self.request, None if faults is None else faults.storage())
            hooks[1:1] = own.values()  # they see the evaluation of the step, and what they change is saved
            on_part = ignore_phase if self.times is None else self.times.lap
            trainer = self._trainer = build_trainer(
                config, comm, plan=plan, hooks=hooks, node_ranks=processes.node_ranks(config), on_part=on_part
            )
            trainer.losses, trainer.own_hooks = config.recovery, own
            trainer.memory = memory_folder()
            find = partial(find_start, config, self.folder, "auto", _LOGGER.warning)
            trainer.find_checkpoint = lambda: find(trainer.line, trainer.memory)
            checkpoint = trainer.find_start() if str(resume) == "auto" else None if resume is None else Path(resume)
            if checkpoint is not None:
                load_start(trainer, checkpoint)
                on_part("checkpoint")
            if faults is not None:
                faults.attach(trainer)
        except BaseException as error:
            if not self._is_refusal(error):
                with contextlib.suppress(OSError), contextlib.closing(JsonlSink(path)) as sink:
                    sink.write(records.run_record(config, comm, None))
            raise
        self._first_step = trainer.step
        if self.rank == 0:
            adopt_config(self.folder)
            (self.folder / "plan.json").write_text(trainer.parts.plan.to_text(), encoding="utf-8")
        trainer.sink = self._open_sinks(config, comm.size)
        note = StepNote(self.folder, self.rank, trainer.step)
        trainer.hooks.append(lambda _, result: note.write(result.step))
        if self.times is not None:
            trainer.hooks.insert(0, self.times)
        try:
            with contextlib.closing(trainer.sink):
                records.write_start(config, comm, trainer)
                self._train(config, trainer, checkpoint, started)
        except PreemptedError:
            comm.barrier()  # the first to leave ends the others, who may still be writing
            raise
        comm.ledger.finish()
        if self.rank == 0:
            forget(self.folder, VERDICTS)  # of an attempt before

    def describe(self, error: BaseException) -> Failure:
        return describe_error(self.rank, error, is_refusal=self._is_refusal(error))

    def leave(self, error: BaseException) -> NoReturn:
        """Writes the error for the launcher and into the log of this rank, and ends this process or its attempt."""
        if isinstance(error, AttemptOverError):
            raise error
        if isinstance(error, PreemptedError):
            note_preemption(self.folder)
            processes.leave_process(PREEMPTED)
        failure = self.describe(error)
        try:
            write_failure(self.folder, failure)
        finally:
            _LOGGER.critical("this rank fails", exc_info=error, extra={"who": f"rank {self.rank}"})
            if STAYS in os.environ and (failure.cause == "lost" or is_told_over()):
                raise AttemptOverError
            processes.leave_process(REFUSED if failure.is_refusal else FAILED)

    def _is_refusal(self, error: BaseException) -> bool:
        first = self._first_step
        has_trained = first is not None and self._trainer is not None and self._trainer.step > first
        return is_refusal(error, is_built=first is not None, has_trained=has_trained)

    def _train(self, config: Config, trainer: Trainer, resume: Path | None, started: float) -> None:
        assert trainer.sink is not None
        try:
            if self.restart is not None:
                trainer.note("restart", self.restart)
            if resume is not None:
                trainer.note("resume", {"checkpoint": str(resume)})
            trainer.run()
            records.write_trace(config, trainer, self.folder)
        except PreemptedError as error:
            trainer.flush(wait=True)
            trainer.sink.write(records.end_record("stopped", trainer.step, time.monotonic() - started, str(error)))
            raise
        except BaseException:
            for record in trainer.parts.meter.drain():  # steps that were finished before the one that failed
                trainer.sink.write(record)
            for saver in [hook for hook in trainer.hooks if isinstance(hook, Saver)]:
                saver.leave()  # so that this process can stay
            raise
        trainer.sink.write(records.end_record("done", trainer.step, time.monotonic() - started, trainer.end_reason))

    def _open_sinks(self, config: Config, ranks: int) -> Sink:
        goes_on = config.recovery.on_full_disk == "warn"
        path, most = records.records_path(self.folder, self.rank), lines_kept(config.monitor.keep_steps, ranks)
        sinks: list[Sink] = [JsonlSink(path, waits_for_space=goes_on, most=most)]
        if _LOGGER.isEnabledFor(logging.INFO):
            sinks.append(Strided(LogSink(_LOGGER), config.monitor.log_every))
        if self.view is not None:
            sinks.append(self.view)
        return Fanout(sinks, goes_on_when_full=goes_on)


def make_hooks(config: Config, folder: Path, request: StopRequest, storage: FileStore | None = None) -> list[Hook]:
    """Returns what runs after each step: evaluation, saving, and the ranks' agreement about stopping and losses."""
    parallel = config.parallel
    strategy = records.name_strategy(config, parallel.ranks if isinstance(parallel.ranks, int) else 0)
    mesh = {name: getattr(parallel, name) for name in ("pipeline", "context", "tensor")}
    about: dict[str, Any] = {"name": config.name, "strategy": strategy, "mesh": mesh}  # a checkpoint tells of its run
    about["config"] = config.model_dump(mode="json")
    where, on_full = checkpoint_folder(config, folder), config.recovery.on_full_disk
    saver = Saver(where, config.checkpoint, about, storage, on_full, ask_every=config.monitor.log_every)
    memory, settings = memory_folder(), config.checkpoint.memory
    every = None if memory is None else settings.every_steps
    snapshots = None if memory is None or every is None else Snapshots(memory, every, settings.copies, about)
    # The last: a wish to stop is obeyed when everything else of the step is done, and is not saved twice.
    consensus = ConsensusHook(request, saver.save_now, config.recovery, snapshots)
    evaluates = Every(config.train.eval_every, EvaluateHook())
    return [evaluates, saver, *([] if snapshots is None else [snapshots]), consensus]


def load_start(trainer: Trainer, checkpoint: Path) -> None:
    """Loads what a run goes on from. Raises LostRankError where memory that was found is gone: another is chosen."""
    try:
        found = open_checkpoint(checkpoint)
        trainer.load_state(found)
    except (CheckpointError, OSError) as error:
        if not is_snapshot(checkpoint) or isinstance(error, MisfitError):
            raise
        raise LostRankError(f"what hosts held in memory is gone: {str(error).splitlines()[0]}") from error


def memory_folder() -> Path | None:
    """Returns the folder that this host's launcher has made for snapshots, if it keeps any."""
    return Path(os.environ[MEMORY]) if MEMORY in os.environ else None


def run_under_launcher(asked: Config, options: RunOptions) -> RunResult | None:
    """Runs this process as one rank of a launcher that somebody else started; returns the result on rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: a rank may sit in a collective
    times = StartTimes(time.monotonic() - process_age(os.getpid()))
    times.lap("processes")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is an agent, and not a shell that may go
        processes.end_with_parent(os.getppid())
    # Ranks that an agent has started again are of the same run: no new number.
    is_first = processes.restarted_by_launcher() is None
    location = locate_run(asked, force=options.force, resume=options.resume, may_number=is_first)
    os.environ.update(rank_variables(asked, uses_nccl=processes.uses_nccl(asked)))
    if asked.comm.backend == "virtual":
        what, rule = "comm.backend = virtual under a launcher of processes", "virtual ranks take turns in one process"
        raise UsageError(f"{what}\n  {rule}\n  start it with paceline train alone, or set comm.backend = auto")
    if asked.checkpoint.memory.every_steps is not None:
        what = "checkpoint.memory under a launcher of processes"
        rule = "snapshots are held by a keeper on each host, which Paceline's own launcher starts"
        raise UsageError(f"{what}\n  {rule}\n  start the run with paceline train, or leave checkpoint.memory out")
    machine = None if processes.uses_gpu(asked) else detect_machine(with_gpus=False)  # with all cores
    cores = usable_cores()
    processes.keep_cores(asked)
    device = None if asked.parallel.device == "auto" else asked.parallel.device
    comm = connect(asked.comm.backend, device=device, timeout_s=asked.comm.timeout_s)
    decision = decide_run(asked, comm=comm, machine=machine, checks_memory=options.checks_memory)
    claimed, location, prediction = _claim_together(comm, location, decision, cores, force=options.force)
    decision = replace(decision, config=location.named_config(decision.config))
    config, choice = decision.config, decision.choice
    view = ProgressView() if comm.rank == 0 and config.monitor.console and not options.is_quiet else None
    if view is not None:
        show_decisions(config, choice, decision.notes)
    times.lap("joining")
    with claimed or contextlib.nullcontext():  # so that this process may go on with the run, by another call
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
    folder, config = location.folder.absolute(), decision.config
    marks = records.mark_records(folder, [comm.rank])
    attempt = RankRunner(folder, comm.rank, restart=processes.restarted_by_launcher(), times=times, view=view)
    hear_requests(attempt.request.ask, grace_s=config.recovery.grace_s, leave=processes.leave_process)
    comm = watch_itself(comm, folder, watch_policy(config))
    try:
        with (
            rank_logs(folder, comm.rank, config.monitor.log_level, owns_output=False),
            _observing(folder, config, comm),
            prediction,
        ):
            attempt.run(config, comm, plan=decision.plan, resume=location.checkpoint)
    except BaseException as error:
        if view is not None:
            view.flush()
            view.close()
        if isinstance(error, PreemptedError):
            if comm.rank == 0:
                say(str(error))
            processes.leave_process(PREEMPTED)
        _leave_launcher(attempt.describe(error), location.folder, claimed, marks)


def _observing(folder: Path, config: Config, comm: Communicator) -> AbstractContextManager[None]:
    """Samples the host in the first of its ranks, and feeds trackers in rank 0: the launcher is not ours."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), processes.node_ranks(config) or comm.size
    here = range(comm.rank, comm.rank + local_ranks)

    def find() -> dict[int, int]:
        readers = {rank: LedgerReader.open(ledger_path(folder, rank)) for rank in here}
        return {rank: reader.pid for rank, reader in readers.items() if reader is not None}

    told = config.model_dump(mode="json")
    return observing_from_a_rank(folder, config.monitor, told, comm, find if local_rank == 0 else None)


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

    located = ask_first_rank(comm, claim)
    return claimed, located, prediction


def _predict(config: Config, claimed: RunFolder, cores: Sequence[int]) -> AbstractContextManager[None]:
    """Writes down what is expected of a run; returns the dry run beside it, of one host: networks are not known."""
    threads, here = config.parallel.threads or torch.get_num_threads(), processes.node_ranks(config)
    expected = predict_run(config, threads=threads, node_ranks=here, cores=cores)
    if expected is not None:
        claimed.write_prediction(expected.to_text())
    if here not in (None, config.parallel.ranks):
        return contextlib.nullcontext()
    return BackgroundPrediction(config, claimed.path, expected, threads=threads, cores=cores, patience_s=_PATIENCE_S)


def _leave_launcher(
    failure: Failure, folder: Path, claimed: RunFolder | None, marks: Mapping[int, records.Mark]
) -> NoReturn:
    if not failure.is_refusal:
        records.end_records(folder, marks, "failed", str(failure).splitlines()[0])
    elif claimed is not None:
        claimed.discard()
    is_lost = failure.cause == "lost"
    text = str(failure).splitlines()[0] if is_lost else "\n\n".join(filter(None, (str(failure), failure.traceback)))
    if failure.rank == 0 or not failure.is_refusal:  # every rank finds the same wrong input, and one tells it
        say(text)
    # torchrun shows the earliest as the cause, to the second: a consequence comes a second later.
    processes.tell_agent(str(failure), text, failure.time + is_lost)
    processes.leave_process(REFUSED if failure.is_refusal else FAILED)


if __name__ == "__main__":
    main()
