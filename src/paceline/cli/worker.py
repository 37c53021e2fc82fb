"""One rank of a run: what the launcher starts on each process.

    python -m paceline.cli.worker RUN_FOLDER [--resume CHECKPOINT]

It reads the resolved config from the run's folder, joins the others, trains, and writes records. An error goes to
``logs/rank-<r>.error.json`` for the launcher, and to this rank's log.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.comm.base import Communicator
    from paceline.config import Config
    from paceline.monitor.records import RunRecord
    from paceline.monitor.sinks import Sink
    from paceline.train.trainer import Hook, Trainer


def main() -> None:
    """Runs one rank and leaves with its exit code."""
    parser = argparse.ArgumentParser(prog="paceline.cli.worker", description="One rank of a run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher decides; a rank may sit in a collective
    _redirect_output(arguments.folder / "logs" / f"rank-{rank}.log")
    from paceline.launch.failure import write_failure

    try:
        from paceline.comm.torch_dist import connect, disconnect
        from paceline.config import load_config

        config = load_config(arguments.folder / "config.yaml")
        comm = connect(config.comm.backend, device=config.parallel.device, timeout_s=config.comm.timeout_s)
        run_rank(config, comm, arguments.folder, resume=arguments.resume)
        disconnect()
    except BaseException as error:
        write_failure(arguments.folder, rank, error)
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of the backend may wait for ranks that are gone


def run_under_launcher(asked: Config, *, force: bool, resume: str | None) -> None:
    """Runs this process as one rank of a launcher that somebody else started, such as torchrun."""
    from paceline.checkpoint import find_checkpoint
    from paceline.cli.train import run_folder, show_result
    from paceline.comm.objects import broadcast_object
    from paceline.comm.torch_dist import connect, disconnect
    from paceline.config import check_ranks, dump_yaml
    from paceline.errors import ConfigError, PacelineError
    from paceline.launch.failure import write_failure
    from paceline.launch.folder import prepare_folder
    from paceline.monitor.console import ProgressView

    device = None if asked.parallel.device == "auto" else asked.parallel.device
    comm = connect(asked.comm.backend, device=device, timeout_s=asked.comm.timeout_s)
    problems = check_ranks(asked, comm.size)
    if problems:
        raise ConfigError(problems, source="config")
    parallel = asked.parallel.model_copy(update={"ranks": comm.size, "device": comm.device.type})
    config = asked.model_copy(update={"parallel": parallel})
    folder = run_folder(config)
    checkpoint = None if resume is None else find_checkpoint(resume, folder)
    problem: PacelineError | None = None
    if comm.rank == 0:
        try:
            prepare_folder(folder, dump_yaml(config), force=force, resume=resume is not None)
        except PacelineError as error:
            problem = error
    problem = broadcast_object(comm, problem)
    if problem is not None:
        raise problem
    view = ProgressView() if comm.rank == 0 and config.monitor.console else None
    try:
        run_rank(config, comm, folder, resume=checkpoint, view=view)
    except BaseException as error:
        write_failure(folder, comm.rank, error)
        raise
    finally:
        if view is not None:
            view.close()
    comm.barrier()  # every rank's records are complete
    if comm.rank == 0:
        from rich.console import Console

        show_result(folder, Console(), as_json=False)
    disconnect()


def run_rank(
    config: Config, comm: Communicator, folder: Path, *, resume: Path | None = None, view: Sink | None = None
) -> None:
    """Trains this rank's share of a run and writes its records into ``folder``."""
    from paceline.monitor.records import EndRecord
    from paceline.monitor.sinks import Fanout, JsonlSink, TensorBoardSink
    from paceline.train.assemble import build_trainer

    started = time.time()
    _use_threads(config)
    sinks: list[Sink] = [JsonlSink(folder / "records" / f"rank-{comm.rank}.jsonl")]
    if config.monitor.tensorboard and comm.rank == 0:
        sinks.append(TensorBoardSink(folder / "tensorboard"))
    if view is not None:
        sinks.append(view)
    sink = Fanout(sinks)
    trainer: Trainer | None = None
    status, message = "failed", ""
    try:
        trainer = build_trainer(config, comm, hooks=_hooks(config, folder), sink=sink)
        if comm.rank == 0:
            text = json.dumps(trainer.parts.plan.to_json(), indent=2)
            (folder / "plan.json").write_text(text + "\n", encoding="utf-8")
        sink.write(_run_record(comm, trainer))
        if resume is not None:
            _load(trainer, resume)
        trainer.run()
        _write_trace(config, trainer, folder)
        status = "done"
    except BaseException as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise
    finally:
        step = trainer.step if trainer is not None else 0
        seconds = time.time() - started
        sink.write(EndRecord(status=status, step=step, seconds=seconds, message=message, time=time.time()))  # type: ignore[arg-type]
        sink.close()


def _hooks(config: Config, folder: Path) -> list[Hook]:
    from paceline.train.hooks import CheckpointHook, EvaluateHook
    from paceline.train.trainer import Every, EverySeconds

    hooks: list[Hook] = [Every(config.train.eval_every, EvaluateHook())]
    save = CheckpointHook(folder / "checkpoints", config.checkpoint.keep)
    hooks.append(Every(config.checkpoint.every_steps, save, at_end=config.checkpoint.at_end))
    if config.checkpoint.every_minutes is not None:
        hooks.append(EverySeconds(config.checkpoint.every_minutes * 60.0, save, ask_every=config.monitor.log_every))
    return hooks


def _load(trainer: Trainer, resume: Path) -> None:
    from paceline.checkpoint import load_checkpoint
    from paceline.monitor.records import EventRecord

    trainer.load_state(load_checkpoint(resume))
    if trainer.sink is not None:
        detail = {"checkpoint": str(resume)}
        trainer.sink.write(EventRecord(name="resume", step=trainer.step, detail=detail, time=time.time()))


def _run_record(comm: Communicator, trainer: Trainer) -> RunRecord:
    import platform

    import torch

    from paceline import __version__
    from paceline.models.registry import num_parameters
    from paceline.monitor.records import RunRecord

    plan = trainer.parts.plan
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
        num_parameters=num_parameters(trainer.parts.engine.module),
        strategy=plan.strategy,
        backend="none" if comm.size == 1 else ("nccl" if comm.device.type == "cuda" else "gloo"),
        global_batch=plan.batch.global_batch,
        microbatch=plan.batch.microbatch,
        accumulate=plan.batch.accumulate,
        total_steps=plan.total_steps,
        time=time.time(),
    )


def _write_trace(config: Config, trainer: Trainer, folder: Path) -> None:
    """Writes every operation of this rank, one JSON object a line, if the config asks for it."""
    if not config.monitor.trace:
        return
    from dataclasses import asdict

    from paceline.comm.traced import TracedCommunicator

    comm = trainer.parts.engine.comm
    assert isinstance(comm, TracedCommunicator)
    path = folder / "trace" / f"rank-{comm.rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for operation in comm.trace.operations:
            file.write(json.dumps(asdict(operation)) + "\n")


def _use_threads(config: Config) -> None:
    if config.parallel.threads is not None:
        import torch

        torch.set_num_threads(config.parallel.threads)


def _redirect_output(path: Path) -> None:
    """Sends this process's output, that of its libraries too, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _die_with_parent() -> None:
    """Asks Linux to end this process when the launcher is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            sys.exit(1)


if __name__ == "__main__":
    main()
