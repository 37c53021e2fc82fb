"""One rank of a run: what the launcher starts on each process.

    python -m paceline.run.worker RUN_FOLDER --launcher PID [--resume CHECKPOINT|auto] [--restart JSON]

It reads the resolved config from the run's folder, joins the others, trains, and writes records. An error goes to
``logs/rank-<r>.error.json`` for the launcher, and to this rank's log. SIGTERM, SIGUSR1 and SIGUSR2 ask it to save and
leave, together with the others; ``auto`` stands for the run's newest checkpoint, and the beginning without one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from paceline.chaos.faults import VARIABLE
from paceline.chaos.inject import Injector
from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.storage import FileStore
from paceline.comm.base import Communicator
from paceline.comm.torch_dist import connect, disconnect
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, load_config
from paceline.engines.engine import ignore_phase
from paceline.errors import PreemptedError, RankFailedError
from paceline.health.exit_codes import FAILED, PREEMPTED, REFUSED
from paceline.health.failure import Failure, describe_error, is_refusal
from paceline.plan.plan import Plan, RunMachine
from paceline.records.sinks import Fanout, JsonlSink, LogSink, Sink, Strided
from paceline.run import processes
from paceline.run.folder import adopt_config, config_of, read_plan
from paceline.run.location import find_start
from paceline.run.logs import rank_logs
from paceline.run.notes import VERDICTS, StepNote, forget, note_preemption, note_process, write_failure
from paceline.run.records import end_record, name_strategy, records_path, run_record, write_start, write_trace
from paceline.run.signals import hear_requests
from paceline.run.warm import PARENT
from paceline.run.watch import keep_ledger
from paceline.search.request import decided_config, make_plan
from paceline.train.assemble import build_trainer
from paceline.train.evaluate import load_hooks
from paceline.train.step import StepResult
from paceline.train.survive.hooks import ConsensusHook, Saver
from paceline.train.survive.recovery import StopRequest
from paceline.train.trainer import EvaluateHook, Every, Hook, Trainer, find_together

_LOGGER = logging.getLogger("paceline")


def main() -> None:
    parser = argparse.ArgumentParser(prog="paceline.run.worker", description="One rank of a run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--restart", type=json.loads)
    arguments = parser.parse_args()
    folder, rank = arguments.folder.absolute(), int(os.environ["RANK"])  # absolute: the user's code may go elsewhere
    note_process(folder, rank, arguments.launcher)  # at once: whoever watches looks at the process
    processes.end_with_parent(int(os.environ.get(PARENT, arguments.launcher)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher decides; a rank may sit in a collective
    restart = arguments.restart
    times = StartTimes.since_start_of(arguments.launcher if restart is None else os.getpid())
    times.lap("processes")
    attempt, logs = RankRunner(folder, rank, restart=restart, times=times), contextlib.ExitStack()
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
        comm = connect(config.comm.backend, device=config.parallel.device, timeout_s=config.comm.timeout_s)
        times.lap("joining")
        plan = read_plan(folder)
        if plan is None or plan.layout.ranks != comm.size:  # where hosts come and go, ranks may be fewer or more
            machine = RunMachine(
                device=config.parallel.device, ranks=comm.size, node_ranks=processes.node_ranks(config)
            )
            plan = make_plan(config, machine, source=f"config, on {comm.size} ranks")
            config = decided_config(config, plan)
        attempt.run(config, comm, plan=plan, resume=arguments.resume)
        disconnect()
    except BaseException as error:
        attempt.leave(error)


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

    @classmethod
    def since_start_of(cls, process: int) -> Self:
        """Begins when a process did; where nobody can tell, now."""
        return cls(time.monotonic() - process_age(process))

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
    _trainer: Trainer | None = None
    _is_built: bool = False
    _first_step: int = 0

    def run(
        self,
        config: Config,
        comm: Communicator,
        *,
        plan: Plan | None = None,
        resume: str | Path | None = None,
        view: Sink | None = None,
    ) -> None:
        """Trains this rank's share and writes its records. Until set-up has worked, the folder stays as it is."""
        if config.parallel.threads is not None:
            torch.set_num_threads(config.parallel.threads)
        comm, records = keep_ledger(comm, self.folder), records_path(self.folder, self.rank)
        started = time.monotonic()
        try:
            where = os.environ.get(VARIABLE)  # of the faults that ``paceline chaos`` has for this rank
            checkpoints = _checkpoint_folder(config, self.folder)
            faults = None if where is None else Injector(Path(where), self.rank, checkpoints)
            own = load_hooks(config.train.hooks)
            hooks = make_hooks(config, self.folder, self.request, None if faults is None else faults.storage())
            hooks[1:1] = own.values()  # they see the evaluation of the step, and what they change is saved
            on_part = ignore_phase if self.times is None else self.times.lap
            trainer = self._trainer = build_trainer(
                config, comm, plan=plan, hooks=hooks, node_ranks=processes.node_ranks(config), on_part=on_part
            )
            trainer.losses, trainer.own_hooks = config.recovery, own
            trainer.find_checkpoint = lambda: find_start(config, self.folder, "auto", _LOGGER.warning, trainer.line)
            checkpoint = None if resume is None else Path(resume)
            if str(resume) == "auto":
                checkpoint = find_together(comm, trainer.find_checkpoint)
            if checkpoint is not None:
                trainer.load_state(open_checkpoint(checkpoint))
                on_part("checkpoint")
            if faults is not None:
                faults.attach(trainer)
        except BaseException as error:
            if not self._is_refusal(error):
                with contextlib.suppress(OSError), contextlib.closing(JsonlSink(records)) as sink:
                    sink.write(run_record(config, comm, None))
            raise
        self._is_built, self._first_step = True, trainer.step
        if self.rank == 0:
            adopt_config(self.folder)
            (self.folder / "plan.json").write_text(trainer.parts.plan.to_text(), encoding="utf-8")
        trainer.sink = self._open_sinks(config, view)
        note = StepNote(self.folder, self.rank, trainer.step)
        trainer.hooks.append(lambda _, result: note.write(result.step))
        if self.times is not None:
            trainer.hooks.insert(0, self.times)
        try:
            with contextlib.closing(trainer.sink):
                write_start(config, comm, trainer)
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
        """Writes the error for the launcher and into the log of this rank, and ends this process."""
        if isinstance(error, PreemptedError):
            note_preemption(self.folder)
            processes.leave_process(PREEMPTED)
        failure = self.describe(error)
        try:
            write_failure(self.folder, failure)
        finally:
            _LOGGER.critical("this rank fails", exc_info=error, extra={"who": f"rank {self.rank}"})
            processes.leave_process(REFUSED if failure.is_refusal else FAILED)

    def _is_refusal(self, error: BaseException) -> bool:
        has_trained = self._is_built and self._trainer is not None and self._trainer.step > self._first_step
        return is_refusal(error, is_built=self._is_built, has_trained=has_trained)

    def _train(self, config: Config, trainer: Trainer, resume: Path | None, started: float) -> None:
        assert trainer.sink is not None
        try:
            if self.restart is not None:
                trainer.note("restart", self.restart)
            if resume is not None:
                trainer.note("resume", {"checkpoint": str(resume)})
            trainer.run()
            write_trace(config, trainer, self.folder)
        except PreemptedError as error:
            trainer.flush(wait=True)
            trainer.sink.write(end_record("stopped", trainer.step, time.monotonic() - started, str(error)))
            raise
        except BaseException:
            for record in trainer.parts.meter.drain():  # steps that were finished before the one that failed
                trainer.sink.write(record)
            raise
        trainer.sink.write(end_record("done", trainer.step, time.monotonic() - started, trainer.end_reason))

    def _open_sinks(self, config: Config, view: Sink | None) -> Sink:
        goes_on = config.recovery.on_full_disk == "warn"
        sinks: list[Sink] = [JsonlSink(records_path(self.folder, self.rank), waits_for_space=goes_on)]
        if _LOGGER.isEnabledFor(logging.INFO):
            sinks.append(Strided(LogSink(_LOGGER), config.monitor.log_every))
        if view is not None:
            sinks.append(view)
        return Fanout(sinks, goes_on_when_full=goes_on)


def make_hooks(config: Config, folder: Path, request: StopRequest, storage: FileStore | None = None) -> list[Hook]:
    """Returns what runs after each step: evaluation, saving, and the ranks' agreement about stopping and losses."""
    parallel = config.parallel
    about = {  # what a checkpoint tells of the run that it belongs to
        "name": config.name,
        "strategy": name_strategy(config, parallel.ranks if isinstance(parallel.ranks, int) else 0),
        "mesh": {name: getattr(parallel, name) for name in ("pipeline", "tensor")},
        "config": config.model_dump(mode="json"),
    }
    where, on_full = _checkpoint_folder(config, folder), config.recovery.on_full_disk
    saver = Saver(where, config.checkpoint, about, storage, on_full, ask_every=config.monitor.log_every)
    # The last: a wish to stop is obeyed when everything else of the step is done, and is not saved twice.
    consensus = ConsensusHook(request, saver.save_now, config.recovery)
    return [Every(config.train.eval_every, EvaluateHook()), saver, consensus]


def _checkpoint_folder(config: Config, folder: Path) -> Path:
    return folder / "checkpoints" if config.checkpoint.folder is None else Path(config.checkpoint.folder)


if __name__ == "__main__":
    main()
