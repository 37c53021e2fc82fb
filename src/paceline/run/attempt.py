"""One rank's part in one attempt at a run: set-up, training, records, and what is left when it fails.

The set-up gives the trainer what it needs to survive: its hooks, the checkpoint to start from, the way back to the last
one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.chaos.notes import VARIABLE
from paceline.checkpoint import find_checkpoint, open_checkpoint
from paceline.checkpoint.manifest import Line
from paceline.checkpoint.storage import FileStore
from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object
from paceline.config import Config
from paceline.errors import CheckpointError, PreemptedError
from paceline.health.exit_codes import DONE, FAILED, PREEMPTED, REFUSED
from paceline.health.failure import Failure, describe_error, is_refusal
from paceline.plan.plan import Plan
from paceline.records.records import EndRecord, EventRecord, RunRecord
from paceline.records.sinks import Fanout, JsonlSink, Sink, SpaceSink, Strided, TensorBoardSink
from paceline.run.folder import adopt_config
from paceline.run.notes import StepNote, note_preemption, write_failure
from paceline.run.rank_process import leave_process, node_ranks, use_threads
from paceline.run.records import name_strategy, run_record, write_settings, write_trace
from paceline.run.watch import keep_ledger
from paceline.train.assemble import build_trainer
from paceline.train.survive.consensus import ConsensusHook, Listener, SpikeListener, StopWhenAsked
from paceline.train.survive.recovery import LossPolicy, StopRequest
from paceline.train.survive.saving import ForgivingSaver, Saver, save_policy
from paceline.train.trainer import EvaluateHook, Every, Hook, StepResult, Trainer, WayBack

if TYPE_CHECKING:
    from paceline.chaos.inject import Injector


class RankRunner:
    """Runs one rank through one attempt at a run, from its set-up to its last record or its failure."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        restart: dict[str, Any] | None = None,
        request: StopRequest | None = None,
    ) -> None:
        self.request = request or StopRequest()
        self._folder = folder
        self._rank = rank
        self._restart = restart
        self._trainer: Trainer | None = None
        self._is_built = False
        self._first_step = 0

    def of_rank(self, rank: int) -> RankRunner:
        """Returns the attempt of another rank in this process, which obeys the same signals."""
        return RankRunner(self._folder, rank, restart=self._restart, request=self.request)

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
        use_threads(config)
        comm = keep_ledger(comm, self._folder)
        started = time.time()
        try:
            faults = find_faults(config, self._folder, self._rank)
            hooks = make_hooks(config, self._folder, self.request, None if faults is None else faults.storage())
            trainer = self._trainer = build_trainer(config, comm, plan=plan, hooks=hooks, node_ranks=node_ranks(config))
            checkpoint = find_together(config, comm, self._folder, resume)
            if checkpoint is not None:
                load_checkpoint(trainer, checkpoint)
            prepare_recovery(config, trainer, self._folder)
            if faults is not None:
                faults.attach(trainer)
        except BaseException as error:
            if not self._is_refusal(error):
                self._write_start(run_record(config, comm, None))
            raise
        self._is_built, self._first_step = True, trainer.step
        if self._rank == 0:
            adopt_config(self._folder)
            (self._folder / "plan.json").write_text(trainer.parts.plan.to_text(), encoding="utf-8")
        trainer.sink = self._open_sinks(config, view)
        trainer.hooks.append(NoteStep(StepNote(self._folder, self._rank, trainer.step)))
        try:
            with contextlib.closing(trainer.sink):
                trainer.sink.write(run_record(config, comm, trainer))
                write_settings(config, trainer)
                self._train(config, trainer, checkpoint, started)
        except PreemptedError:
            comm.barrier()  # the first to leave ends the others, who may still be writing
            raise
        comm.ledger.finish()

    def describe(self, error: BaseException) -> Failure:
        """Describes how this rank failed."""
        return describe_error(self._rank, error, is_refusal=self._is_refusal(error))

    def leave(self, error: BaseException) -> NoReturn:
        """Writes the error for the launcher and into the log of this rank, and ends this process."""
        if isinstance(error, PreemptedError):
            # An agent that restarts by itself takes every other code for a failure.
            restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
            note_preemption(self._folder)
            leave_process(DONE if restarts else PREEMPTED)
        failure = self.describe(error)
        try:
            write_failure(self._folder, failure)
        finally:
            traceback.print_exception(error)
            leave_process(REFUSED if failure.is_refusal else FAILED)

    def _is_refusal(self, error: BaseException) -> bool:
        has_trained = self._is_built and self._trainer is not None and self._trainer.step > self._first_step
        return is_refusal(error, is_built=self._is_built, has_trained=has_trained)

    def _train(self, config: Config, trainer: Trainer, resume: Path | None, started: float) -> None:
        assert trainer.sink is not None
        try:
            if self._restart is not None:
                trainer.sink.write(
                    EventRecord(name="restart", step=trainer.step, detail=self._restart, time=time.time())
                )
            if resume is not None:
                detail = {"checkpoint": str(resume)}
                trainer.sink.write(EventRecord(name="resume", step=trainer.step, detail=detail, time=time.time()))
            trainer.run()
            write_trace(config, trainer, self._folder)
        except PreemptedError as error:
            trainer.flush(wait=True)
            now, text = time.time(), str(error)
            end = EndRecord(status="stopped", step=trainer.step, seconds=now - started, message=text, time=now)
            trainer.sink.write(end)
            raise
        except BaseException:
            for record in trainer.parts.meter.drain():  # steps that were finished before the one that failed
                trainer.sink.write(record)
            raise
        now = time.time()
        trainer.sink.write(EndRecord(status="done", step=trainer.step, seconds=now - started, message="", time=now))

    def _open_sinks(self, config: Config, view: Sink | None) -> Sink:
        goes_on = config.recovery.on_full_disk == "warn"
        sinks: list[Sink] = [JsonlSink(self._records, waits_for_space=goes_on)]
        if config.monitor.tensorboard and self._rank == 0:
            board = TensorBoardSink(self._folder / "tensorboard")
            sinks.append(Strided(SpaceSink(board) if goes_on else board, config.monitor.log_every))
        if view is not None:
            sinks.append(view)
        return Fanout(sinks)

    def _write_start(self, record: RunRecord) -> None:
        with contextlib.suppress(OSError), contextlib.closing(JsonlSink(self._records)) as sink:
            sink.write(record)

    @property
    def _records(self) -> Path:
        return self._folder / "records" / f"rank-{self._rank}.jsonl"


def make_hooks(config: Config, folder: Path, request: StopRequest, storage: FileStore | None = None) -> list[Hook]:
    """Returns what runs after each step: evaluation, saving, and the ranks' agreement about stopping and losses."""
    hooks: list[Hook] = [Every(config.train.eval_every, EvaluateHook())]
    policy = save_policy(config.checkpoint, ask_every=config.monitor.log_every)
    save = Saver(_checkpoint_folder(config, folder), policy, about=_about(config), storage=storage)
    forgiving = ForgivingSaver(save, config.recovery.on_full_disk)
    hooks.append(forgiving)
    # The last: a wish to stop is obeyed when everything else of the step is done, and is not saved twice.
    listeners: list[Listener] = [StopWhenAsked(request, forgiving.save_now)]
    watches = config.recovery.on_spike != "ignore"
    if watches:
        listeners.insert(0, SpikeListener(_loss_policy(config)))
    hooks.append(ConsensusHook(request, listeners, needs_losses=watches))
    return hooks


class NoteStep:
    """Notes each step for the launcher."""

    def __init__(self, note: StepNote) -> None:
        self._note = note

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        del trainer
        self._note.write(result.step)


def find_together(config: Config, comm: Communicator, folder: Path, resume: str | Path | None) -> Path | None:
    """Returns the checkpoint to start from, the same on all ranks; None with ``auto`` where there is none yet."""
    if resume is None or str(resume) != "auto":
        return None if resume is None else Path(resume)

    found: Path | None = None
    if comm.rank == 0:
        with contextlib.suppress(CheckpointError):
            found = _newest(config, folder)
    return broadcast_object(comm, found)


def load_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Loads a checkpoint into a trainer."""
    trainer.load_state(open_checkpoint(checkpoint))


def prepare_recovery(config: Config, trainer: Trainer, folder: Path) -> None:
    """Gives the trainer its policy for bad losses, and the way back to the last checkpoint."""
    trainer.losses = _loss_policy(config)
    trainer.way_back = WayBack(lambda: _newest(config, folder, trainer.line), load_checkpoint)


def find_faults(config: Config, folder: Path, rank: int) -> Injector | None:
    """Returns the faults that ``paceline chaos`` has for this rank; None in every other run."""
    where = os.environ.get(VARIABLE)
    if where is None:
        return None
    from paceline.chaos.inject import Injector

    return Injector(Path(where), rank, _checkpoint_folder(config, folder))


def _newest(config: Config, folder: Path, own: Line | None = None) -> Path:
    """Finds the newest checkpoint of a run's line that is whole; tells in the log of those that are not."""
    where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    return find_checkpoint("auto", where, config.checkpoint.verify, lambda passed: print(passed, file=sys.stderr), own)


def _checkpoint_folder(config: Config, folder: Path) -> Path:
    return folder / "checkpoints" if config.checkpoint.folder is None else Path(config.checkpoint.folder)


def _loss_policy(config: Config) -> LossPolicy:

    return LossPolicy(**{each.name: getattr(config.recovery, each.name) for each in fields(LossPolicy)})


def _about(config: Config) -> dict[str, Any]:
    """Returns what a checkpoint tells of the run that it belongs to."""
    parallel = config.parallel
    ranks = parallel.ranks if isinstance(parallel.ranks, int) else 0
    mesh = {name: getattr(parallel, name) for name in ("pipeline", "tensor")}
    strategy = name_strategy(config, ranks)
    return {"name": config.name, "strategy": strategy, "mesh": mesh, "config": config.model_dump(mode="json")}
