"""One rank of a run: what the launcher starts on each process.

    python -m paceline.cli.worker RUN_FOLDER --launcher PID [--resume CHECKPOINT | --resume auto] [--restart JSON]

It reads the resolved config from the run's folder, joins the others, trains, and writes records. An error goes to
``logs/rank-<r>.error.json`` for the launcher, and to this rank's log. SIGTERM, SIGUSR1 and SIGUSR2 ask it to save and
leave, together with the others; ``auto`` stands for the run's newest checkpoint, and the beginning without one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.chaos.notes import VARIABLE
from paceline.errors import CheckpointError, PreemptedError
from paceline.launch.codes import DONE, FAILED, PREEMPTED, REFUSED
from paceline.launch.failure import Failure, describe_error, forget_failure, is_refusal, write_failure
from paceline.launch.folder import RunFolder, claim_folder, config_of, settle_config
from paceline.launch.orphans import end_children, end_with_parent, note_process
from paceline.launch.progress import StepNote
from paceline.launch.requests import hear_requests, note_preemption
from paceline.launch.warm_server import PARENT
from paceline.train.stop import StopRequest

if TYPE_CHECKING:
    from paceline.chaos.inject import Injector
    from paceline.checkpoint.storage import Storage
    from paceline.cli.train import Place
    from paceline.comm.base import Communicator
    from paceline.config import Config
    from paceline.monitor.records import RunRecord
    from paceline.monitor.sinks import Sink
    from paceline.train.recovery import LossPolicy
    from paceline.train.trainer import Hook, StepResult, Trainer


def main() -> None:
    """Runs one rank and leaves with its exit code."""
    parser = argparse.ArgumentParser(prog="paceline.cli.worker", description="One rank of a run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--restart", type=json.loads)
    arguments = parser.parse_args()
    folder, rank = arguments.folder.absolute(), int(os.environ["RANK"])  # absolute: the user's code may go elsewhere
    end_with_parent(int(os.environ.get(PARENT, arguments.launcher)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher decides; a rank may sit in a collective
    attempt = Attempt(folder, rank, restart=arguments.restart or _restarted_by_launcher())
    try:
        from paceline.config import load_config

        config = load_config(config_of(folder))
        hear_requests(attempt.request.ask, grace_s=config.recovery.grace_s, leave=_exit)
        note_process(folder, rank, arguments.launcher)
        forget_failure(folder, rank)
        _redirect_output(folder / "logs" / f"rank-{rank}.log")
        if config.comm.backend == "virtual":
            _run_virtual(config, attempt, arguments.resume)
            return
        from paceline.comm.torch_dist import connect, disconnect

        comm = connect(config.comm.backend, device=config.parallel.device, timeout_s=config.comm.timeout_s)
        config = _fit_to_world(config, comm)
        attempt.run(config, comm, resume=arguments.resume)
        disconnect()
    except BaseException as error:
        attempt.leave(error)


def _fit_to_world(config: Config, comm: Communicator) -> Config:
    """Returns the config for the ranks that are there, which may be fewer or more than before where nodes come and go.

    Raises ConfigError if they cannot train it.
    """
    from paceline.config import check_ranks
    from paceline.errors import ConfigError

    if comm.size == config.parallel.ranks:
        return config
    problems = check_ranks(config, comm.size, _node_ranks(config))
    if problems:
        raise ConfigError(problems, source=f"config, on {comm.size} ranks")
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"ranks": comm.size})})


def _run_virtual(config: Config, first: Attempt, resume: str | None) -> None:
    """Runs all ranks in this process, in turn. Where one fails, leaves with its error."""
    from paceline.comm.virtual import run_virtual
    from paceline.errors import RankFailedError

    assert isinstance(config.parallel.ranks, int)
    attempts = [first, *(first.of_rank(rank) for rank in range(1, config.parallel.ranks))]
    try:
        run_virtual(
            lambda comm: attempts[comm.rank].run(config, comm, resume=resume),
            config.parallel.ranks,
            device=config.parallel.device,
            timeout_s=config.comm.timeout_s,
        )
    except RankFailedError as error:
        attempts[error.rank].leave(error.__cause__ or error)


class Attempt:
    """One rank's part in one attempt at a run, from its set-up to its last record or its failure."""

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

    def of_rank(self, rank: int) -> Attempt:
        """Returns the part of another rank in this process, which hears the same signals."""
        return Attempt(self._folder, rank, restart=self._restart, request=self.request)

    def run(
        self, config: Config, comm: Communicator, *, resume: str | Path | None = None, view: Sink | None = None
    ) -> None:
        """Trains this rank's share and writes its records. Until set-up has worked, the folder stays as it is."""
        from paceline.launch.watch import keep_ledger
        from paceline.train.assemble import build_trainer

        _use_threads(config)
        comm = keep_ledger(comm, self._folder)
        started = time.time()
        try:
            faults = _faults(config, self._folder, self._rank)
            hooks = _hooks(config, self._folder, self.request, None if faults is None else faults.storage())
            trainer = self._trainer = build_trainer(config, comm, hooks=hooks, node_ranks=_node_ranks(config))
            checkpoint = _find_together(config, comm, self._folder, resume)
            if checkpoint is not None:
                _load(trainer, checkpoint)
            _prepare_recovery(config, trainer, self._folder)
            if faults is not None:
                faults.attach(trainer)
        except BaseException as error:
            if not self._is_refusal(error):
                self._write_start(_run_record(config, comm, None))
            raise
        self._is_built, self._first_step = True, trainer.step
        if self._rank == 0:
            settle_config(self._folder)
            text = json.dumps(trainer.parts.plan.to_json(), indent=2)
            (self._folder / "plan.json").write_text(text + "\n", encoding="utf-8")
        trainer.sink = self._open_sinks(config, view)
        trainer.hooks.append(_NoteStep(StepNote(self._folder, self._rank, trainer.step)))
        try:
            with contextlib.closing(trainer.sink):
                trainer.sink.write(_run_record(config, comm, trainer))
                _write_settings(config, trainer)
                self._train(config, trainer, checkpoint, started)
        except PreemptedError:
            comm.barrier()  # the first to leave ends the others, who may still be writing
            raise
        comm.ledger.finish()

    def describe(self, error: BaseException) -> Failure:
        """Tells how this rank failed."""
        return describe_error(self._rank, error, is_refusal=self._is_refusal(error))

    def leave(self, error: BaseException) -> NoReturn:
        """Ends this process with an error, which it leaves to the launcher and in its log."""
        if isinstance(error, PreemptedError):
            # An agent that restarts by itself takes every other code for a failure.
            restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
            note_preemption(self._folder)
            _exit(DONE if restarts else PREEMPTED)
        failure = self.describe(error)
        try:
            write_failure(self._folder, failure)
        finally:
            traceback.print_exception(error)
            _exit(REFUSED if failure.is_refusal else FAILED)

    def _is_refusal(self, error: BaseException) -> bool:
        has_trained = self._is_built and self._trainer is not None and self._trainer.step > self._first_step
        return is_refusal(error, is_built=self._is_built, has_trained=has_trained)

    def _train(self, config: Config, trainer: Trainer, resume: Path | None, started: float) -> None:
        from paceline.monitor.records import EndRecord, EventRecord

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
            _write_trace(config, trainer, self._folder)
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
        from paceline.monitor.sinks import Fanout, JsonlSink, Strided, TensorBoardSink

        sinks: list[Sink] = [JsonlSink(self._records)]
        if config.monitor.tensorboard and self._rank == 0:
            sinks.append(Strided(TensorBoardSink(self._folder / "tensorboard"), config.monitor.log_every))
        if view is not None:
            sinks.append(view)
        return Fanout(sinks)

    def _write_start(self, record: RunRecord) -> None:
        from paceline.monitor.sinks import JsonlSink

        with contextlib.suppress(OSError), contextlib.closing(JsonlSink(self._records)) as sink:
            sink.write(record)

    @property
    def _records(self) -> Path:
        return self._folder / "records" / f"rank-{self._rank}.jsonl"


def run_under_launcher(asked: Config, *, force: bool, resume: str | None, as_json: bool) -> None:
    """Runs this process as one rank of a launcher that somebody else started, such as torchrun."""
    from paceline.cli.train import find_place, show_decisions, show_result
    from paceline.comm.torch_dist import connect, disconnect
    from paceline.config import check_ranks
    from paceline.errors import ConfigError, UsageError
    from paceline.launch.beside import watch_beside
    from paceline.launch.settings import set_variables
    from paceline.launch.watch import watch_policy
    from paceline.monitor.console import ProgressView
    from paceline.train.resolve import resolve_together

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: a rank may sit in a collective
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is an agent, and not a shell that may go
        end_with_parent(os.getppid())
    place = find_place(asked, force=force, resume=resume)
    set_variables(asked, uses_nccl=_uses_nccl(asked))
    device = None if asked.parallel.device == "auto" else asked.parallel.device
    if asked.comm.backend == "virtual":
        raise UsageError(
            "comm.backend = virtual under a launcher of processes\n  virtual ranks take turns in one process\n"
            "  start it with paceline train alone, or set comm.backend = auto"
        )
    comm = connect(asked.comm.backend, device=device, timeout_s=asked.comm.timeout_s)
    problems = check_ranks(asked, comm.size, _node_ranks(asked))
    if problems:
        raise ConfigError(problems, source="config")
    parallel = asked.parallel.model_copy(update={"ranks": comm.size, "device": comm.device.type})
    config, choice = asked.model_copy(update={"parallel": parallel}), None
    if parallel.strategy == "auto":
        config, choice = resolve_together(config, comm, _node_ranks(config))
    claimed = _claim_together(comm, place, config, force=force)
    view = ProgressView() if comm.rank == 0 and config.monitor.console and not as_json else None
    if view is not None:
        show_decisions(config, choice)
    attempt, started = Attempt(place.folder.absolute(), comm.rank, restart=_restarted_by_launcher()), time.time()
    hear_requests(attempt.request.ask, grace_s=config.recovery.grace_s, leave=_exit)
    comm = watch_beside(comm, place.folder.absolute(), watch_policy(config))
    try:
        attempt.run(config, comm, resume=place.checkpoint, view=view)
    except BaseException as error:
        if view is not None:
            view.flush()
            view.close()
        if isinstance(error, PreemptedError):
            if comm.rank == 0:
                sys.stderr.write(f"paceline: {error}\n")
            _exit(PREEMPTED)
        _leave_launcher(attempt.describe(error), place.folder, claimed, started)
    comm.barrier()  # every rank's records are complete
    if comm.rank == 0:
        show_result(place.folder, config, as_json=as_json, choice=choice)
    disconnect()


def _claim_together(comm: Communicator, place: Place, config: Config, *, force: bool) -> RunFolder | None:
    """Claims the run's folder on rank 0; all ranks learn whether it worked."""
    from paceline.comm.objects import broadcast_object
    from paceline.config import dump_yaml
    from paceline.errors import PacelineError

    claimed: RunFolder | None = None
    problem: PacelineError | None = None
    if comm.rank == 0:
        try:
            claimed = claim_folder(place.folder, dump_yaml(config), force=force, resume=place.is_continued)
            _write_expected(config, claimed)
        except PacelineError as error:
            problem = error
    problem = broadcast_object(comm, problem)
    if problem is not None:
        raise problem
    return claimed


def _write_expected(config: Config, claimed: RunFolder) -> None:
    """Writes down what is expected of a run whose threads are its launcher's, where the config does not say."""
    import torch

    from paceline.cli.train import predict_run

    expected = predict_run(config, threads=torch.get_num_threads(), node_ranks=_node_ranks(config))
    if expected is not None:
        claimed.expect(expected.to_text())


def _leave_launcher(failure: Failure, folder: Path, claimed: RunFolder | None, started: float) -> NoReturn:
    """Ends this process with a failure that nobody but this rank will tell."""
    from paceline.launch.records import end_records

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
    _exit(REFUSED if failure.is_refusal else FAILED)


def _restarted_by_launcher() -> dict[str, Any] | None:
    """Returns what is known of a restart by torch's agent."""
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    of = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return {"number": number, "of": of, "reason": "restarted by the agent"} if number else None


def _find_together(config: Config, comm: Communicator, folder: Path, resume: str | Path | None) -> Path | None:
    """Returns the checkpoint to start from, the same on all ranks; None with ``auto`` where there is none yet."""
    if resume is None or str(resume) != "auto":
        return None if resume is None else Path(resume)
    from paceline.comm.objects import broadcast_object

    found: Path | None = None
    if comm.rank == 0:
        with contextlib.suppress(CheckpointError):
            found = _newest(config, folder)
    return broadcast_object(comm, found)


def _newest(config: Config, folder: Path) -> Path:
    """Finds the run's newest checkpoint that is whole; tells in the log of those that are not."""
    from paceline.checkpoint import find_checkpoint

    where = folder if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    return find_checkpoint("auto", where, config.checkpoint.verify, lambda passed: print(passed, file=sys.stderr))


def _load(trainer: Trainer, checkpoint: Path) -> None:
    from paceline.checkpoint import open_checkpoint

    trainer.load_state(open_checkpoint(checkpoint))


def _prepare_recovery(config: Config, trainer: Trainer, folder: Path) -> None:
    """Tells the trainer what to do about losses, and the way back to the last checkpoint."""
    from paceline.train.go_back import CheckpointReturn

    trainer.losses = _loss_policy(config)
    trainer.way_back = CheckpointReturn(lambda: _newest(config, folder), _load)


def _loss_policy(config: Config) -> LossPolicy:
    from dataclasses import fields

    from paceline.train.recovery import LossPolicy

    return LossPolicy(**{each.name: getattr(config.recovery, each.name) for each in fields(LossPolicy)})


def _about(config: Config) -> dict[str, Any]:
    """Returns what a checkpoint tells of the run that it belongs to."""
    parallel = config.parallel
    ranks = parallel.ranks if isinstance(parallel.ranks, int) else 0
    mesh = {name: getattr(parallel, name) for name in ("pipeline", "tensor")}
    strategy = _strategy(config, ranks)
    return {"name": config.name, "strategy": strategy, "mesh": mesh, "config": config.model_dump(mode="json")}


class _NoteStep:
    """Notes each step for the launcher."""

    def __init__(self, note: StepNote) -> None:
        self._note = note

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        del trainer
        self._note.write(result.step)


def _checkpoint_folder(config: Config, folder: Path) -> Path:
    return folder / "checkpoints" if config.checkpoint.folder is None else Path(config.checkpoint.folder)


def _faults(config: Config, folder: Path, rank: int) -> Injector | None:
    """Returns the faults that ``paceline chaos`` has for this rank; None in every other run."""
    where = os.environ.get(VARIABLE)
    if where is None:
        return None
    from paceline.chaos.inject import Injector

    return Injector(Path(where), rank, _checkpoint_folder(config, folder))


def _hooks(config: Config, folder: Path, request: StopRequest, storage: Storage | None = None) -> list[Hook]:
    from paceline.train.full_disk import ForgivingSaver
    from paceline.train.go_back import SpikeListener
    from paceline.train.hooks import EvaluateHook
    from paceline.train.preemption import ConsensusHook, Listener, StopWhenAsked
    from paceline.train.saving import Saver, save_policy
    from paceline.train.trainer import Every

    hooks: list[Hook] = [Every(config.train.eval_every, EvaluateHook())]
    policy = save_policy(config.checkpoint, ask_every=config.monitor.log_every)
    save = Saver(_checkpoint_folder(config, folder), policy, about=_about(config), storage=storage)
    hooks.append(ForgivingSaver(save, config.recovery.on_full_disk))
    # The last: a wish to stop is obeyed when everything else of the step is done, and is not saved twice.
    listeners: list[Listener] = [StopWhenAsked(request, save.save_now)]
    watches = config.recovery.on_spike != "ignore"
    if watches:
        listeners.insert(0, SpikeListener(_loss_policy(config)))
    hooks.append(ConsensusHook(request, listeners, needs_losses=watches))
    return hooks


def _run_record(config: Config, comm: Communicator, trainer: Trainer | None) -> RunRecord:
    """Makes the first record of an attempt; without a trainer, that of one that failed before it had any."""
    import platform

    import torch

    from paceline import __version__
    from paceline.comm.torch_dist import backend_of
    from paceline.monitor.records import RunRecord

    plan = None if trainer is None else trainer.parts.plan
    device = torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "cpu"
    return RunRecord(
        rank=comm.rank,
        world_size=comm.size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        device=device,
        host=socket.gethostname(),
        pid=os.getpid(),
        python=platform.python_version(),
        torch=torch.__version__,
        paceline=__version__,
        num_parameters=0 if trainer is None else trainer.parts.engine.num_parameters,
        strategy=_strategy(config, comm.size),
        backend=backend_of(comm),
        global_batch=config.train.global_batch or 0 if plan is None else plan.batch.global_batch,
        microbatch=0 if plan is None else plan.batch.microbatch,
        accumulate=0 if plan is None else plan.batch.accumulate,
        total_steps=0 if plan is None else plan.total_steps,
        time=time.time(),
    )


def _strategy(config: Config, ranks: int) -> str:
    """Names the strategy, and the mesh where the model is spread: ``pipeline 2 x tensor 2 x zero1``."""
    parallel = config.parallel
    degrees = [f"{name} {size}" for name in ("pipeline", "tensor") if (size := getattr(parallel, name)) > 1]
    has_data = ranks > parallel.pipeline * parallel.tensor
    return " x ".join([*degrees, parallel.strategy]) if has_data or not degrees else " x ".join(degrees)


def _write_settings(config: Config, trainer: Trainer) -> None:
    """Writes which variables this rank's NCCL or Gloo obeys, where somebody asked for any."""
    from paceline.launch.settings import variables_in_effect
    from paceline.monitor.records import EventRecord

    uses_nccl = trainer.parts.engine.comm.device.type == "cuda" and config.comm.backend in ("auto", "nccl")
    settings = variables_in_effect(config, uses_nccl=uses_nccl)
    if settings and trainer.sink is not None:
        trainer.sink.write(EventRecord(name="settings", step=trainer.step, detail=settings, time=time.time()))


def _write_trace(config: Config, trainer: Trainer, folder: Path) -> None:
    """Writes every operation of this rank, one JSON object a line, if the config asks for it."""
    if not config.monitor.trace:
        return
    from dataclasses import asdict

    from paceline.comm.traced import TracedCommunicator

    comm = trainer.parts.engine.world
    assert isinstance(comm, TracedCommunicator)
    path = folder / "trace" / f"rank-{comm.rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for operation in comm.trace.operations:
            file.write(json.dumps(asdict(operation)) + "\n")


def _node_ranks(config: Config) -> int | None:
    """Returns how many ranks share this host: as the config says, or the launcher; None: all of them."""
    detected = os.environ.get("LOCAL_WORLD_SIZE")
    return config.parallel.node_ranks or (None if detected is None else int(detected))


def _uses_nccl(config: Config) -> bool:
    """Says whether the ranks of a config will talk through NCCL, before they do."""
    import torch

    return config.comm.backend in ("auto", "nccl") and config.parallel.device != "cpu" and torch.cuda.is_available()


def _use_threads(config: Config) -> None:
    if config.parallel.threads is not None:
        import torch

        torch.set_num_threads(config.parallel.threads)


def _redirect_output(path: Path) -> None:
    """Sends this process's output, that of its libraries too, to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _exit(code: int) -> NoReturn:
    """Leaves at once, with loader workers: threads of the backend may wait for ranks that are gone."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    end_children()
    os._exit(code)


if __name__ == "__main__":
    main()
