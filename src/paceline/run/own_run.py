"""A run of a loop of one's own: records, and with them the page, the report, trackers and checkpoints of any run.

    run = paceline.Run(comm, "cnn", engine, optimizer, loader)
    for x, y in loader:
        with run.step(len(y)):
            loss = F.cross_entropy(engine(x), y)
            ...                                        # backward, update: as ever
            run.log(loss=loss)                         # the mean over this rank's samples; kept unread on the device
    run.log(loss=valid_loss, accuracy=accuracy)        # outside of a step: an evaluation
    run.save(best=best)                                # engine, optimizer, loader, step, and values of one's own
    best = run.resume().get("best", math.inf)          # before the first step: of the newest run of this name

A run has no folder before its first step, or until it is resumed. The engine tells when its module runs and the
optimizer when it updates; what passes between the steps counts as waiting for data, but for evaluations and saves. The
first step is counted, and what such steps should take is written down (``own_prediction.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Never

import torch

from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.writer import load, save
from paceline.cluster.detect import usable_cores
from paceline.comm.base import Communicator, Trace, clock_of
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.objects import ask_first_rank, gather_objects
from paceline.comm.traced import LedgerCommunicator, TracedCommunicator
from paceline.config import config_from_dict
from paceline.config.yaml_text import dump_values
from paceline.data.own_loader import OwnLoader
from paceline.data.own_stream import OwnStream
from paceline.engines.engine import Engine
from paceline.errors import CheckpointError, UsageError
from paceline.health.ledger_view import DATA, EVALUATION, OPTIMIZER, STEP_PHASES
from paceline.records.meter import StepMeter
from paceline.records.records import EndStatus, EvalRecord, EventRecord, StepRecord
from paceline.records.samples import samples_of
from paceline.records.sinks import Fanout, JsonlSink, Sink
from paceline.records.thin import lines_kept
from paceline.run import records
from paceline.run.folder import adopt_config, claim_folder
from paceline.run.location import next_folder, runs_named
from paceline.run.logs import say
from paceline.run.observe import observing_from_a_rank
from paceline.run.own_checks import OwnChecks, check_arguments
from paceline.run.own_prediction import FirstPass, LoopPrediction, SharedCores
from paceline.train.loads import LoadsHook
from paceline.train.randomness import capture_random_states, restore_random_states
from paceline.train.step import StepOutcome

_NORM = "grad_norm"


class Run(contextlib.AbstractContextManager["Run"]):
    """Writes down what a loop of one's own does. All ranks make one, and call ``save`` and ``resume`` together."""

    def __init__(
        self,
        comm: Communicator,
        name: str,
        engine: Engine | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loader: OwnLoader | OwnStream | None = None,
        *,
        steps: int = 0,
        config: Mapping[str, Any] | None = None,
        monitor: Mapping[str, Any] | None = None,
        **unknown: Never,
    ) -> None:
        """``loader`` says how far the data is. ``steps``: how many are planned, where that is known.

        ``config`` is shown and compared as settings of the run. ``monitor`` has keys of that section of a config:
        ``folder``, ``trackers``, ``tensorboard``, ``sample_s``, ``keep_steps``.
        """
        check_arguments(comm, name, unknown)
        self._checks = OwnChecks(comm, loader)
        self.name, self.num_steps, self.folder = name, 0, Path()
        self._comm, self._engine, self._optimizer, self._loader = comm, engine, optimizer, loader
        self._planned, self._config = steps, dict(config or {})
        anything = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 1}}
        settings = {"tensorboard": False, **(monitor or {})}
        self._monitor = config_from_dict({**anything, "monitor": settings}).monitor
        self._position, self._began, self._is_first = 0, time.monotonic(), True
        self._values: dict[str, Any] = {}
        self._waiting: deque[_OwnStep] = deque()
        self._sink: Sink | None = None
        self._problem = ""
        self._shared = SharedCores()
        self._prediction: LoopPrediction | None = None
        self._around = contextlib.ExitStack()
        self._meter = StepMeter(comm.device, self._trace(), groups={comm.ranks: "world"})
        self._phases = _Phases(self._meter)
        self._loads: LoadsHook | None = None
        if engine is not None and engine.routers:
            write = lambda record: self._open().write(record)  # noqa: E731
            self._loads = LoadsHook(engine, self._monitor.log_every, self._meter.take, write)
        self._listen()

    def step(self, samples: int = 0) -> contextlib.AbstractContextManager[None]:
        """Stands around one step, with an update at its end. ``samples``: those of this rank."""
        return self._step(samples)

    @contextlib.contextmanager
    def _step(self, samples: int) -> Iterator[None]:
        self._open()
        phases = self._phases
        if phases.is_in_step:
            raise UsageError("run.step() inside run.step()\n  a step has one update\n  end the first one before")
        if phases.evaluates_since is not None:
            self._meter.start()
        phases.is_in_step, phases.evaluates_since, phases.now = True, None, DATA
        self._values = {}
        first = FirstPass(self._engine) if self._engine is not None and self._is_first else None
        try:
            with contextlib.nullcontext() if first is None else first.counting():
                yield
            self._finish(samples)
        finally:
            phases.is_in_step = False
        if first is not None:
            self._is_first = False
            if self._comm.rank == 0:
                self._prediction = LoopPrediction(first, self._optimizer, samples, self._shared, self.folder)

    def log(self, **values: float | torch.Tensor) -> None:
        """Tells numbers of the step, or outside of one those of an evaluation, which are the same on all ranks.

        ``loss`` is the mean over the rank's samples, ``loss_sum`` their sum; ``grad_norm`` that of all ranks. Any other
        name is a curve of its own. Nobody waits for a tensor: it is read when the device has come so far.
        """
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                what = f"run.log({name}=...) got a tensor of shape {list(value.shape)}"
                raise UsageError(f"{what}\n  a curve has one number a step\n  log its mean, or its items by name")
        if self._phases.is_in_step:
            told = values.items()
            self._values |= {name: x.detach() if isinstance(x, torch.Tensor) else float(x) for name, x in told}
            return
        sink = self._open()
        found, now = {name: float(value) for name, value in values.items()}, time.time()
        self._checks.evaluated = dict(found)
        if "loss" not in found:
            sink.write(EventRecord(name="scalars", step=self.num_steps, detail=found, time=now))
        else:
            since, self._phases.evaluates_since = self._phases.evaluates_since or now, None
            about: dict[str, Any] = {"samples": 0, "seconds": max(0.0, now - since), "time": now, "metrics": found}
            loss, accuracy = found.pop("loss"), found.pop("accuracy", None)
            sink.write(EvalRecord(step=self.num_steps, loss=loss, accuracy=accuracy, **about))
        self._meter.start()

    def log_samples(self, texts: Sequence[str] = (), images: Any = ()) -> None:
        """Keeps texts and images of an evaluation, for the page to show; those of rank 0. ``records/samples.py``."""
        self._note("samples", samples_of(texts, images))

    def save(self, *, keep: int | None = None, **values: Any) -> Path:
        """Saves engine, optimizer, loader and each rank's random states, and plain values of rank 0.

        Of older ones the newest ``keep`` are left. Called by all ranks. Raises CheckpointError on all of them if one
        cannot write.
        """
        self._open()
        self._checks.compare(values, self._optimizer)
        extra = {"values": values, "position": self._position}
        if self._loader is not None:
            extra["loader"] = self._loader.state_dict()
        engine, started = self._needed_engine("save"), time.monotonic()
        own = {"random": capture_random_states(self._comm.device)}
        place, step = self.folder / "checkpoints", self.num_steps
        path = save(place, engine, self._optimizer, step=step, extra=extra, own=own, keep=keep)
        seconds, num_bytes = time.monotonic() - started, open_checkpoint(path).manifest.num_bytes
        self._note("checkpoint", {"folder": str(path), "bytes": num_bytes, "seconds": seconds, "background": False})
        self._meter.start()
        return path

    def resume(self) -> dict[str, Any]:
        """Goes on from the newest checkpoint of the newest run of this name; returns the values saved with it.

        Without one the run begins anew, and there are no values. On as many ranks as before, random numbers go on as
        well; on others each rank goes on with its own. Called by all ranks, before the first step.
        """
        if self._sink is not None:
            rule = "a run is resumed before it has begun"
            raise UsageError(f"run.resume() after step {self.num_steps}\n  {rule}\n  call it before the first step")
        engine = self._needed_engine("resume")
        found = ask_first_rank(self._comm, self._find)
        if found is None:
            return {}
        loaded = load(found, engine, self._optimizer)
        self.num_steps, extra = loaded.step, loaded.extra
        self._position = extra["position"]
        if self._loader is not None and "loader" in extra:
            self._loader.load_state_dict(extra["loader"])
        self._open(found.parent.parent)
        if self._comm.rank == 0:
            say(f"{self.name} goes on after step {self.num_steps}, from {found}")
        detail = {"checkpoint": str(found)}
        if loaded.own is None:
            size = open_checkpoint(found).manifest.world
            detail["random"] = f"random states are those of {size} ranks, and not used on {self._comm.size}"
        elif "random" in loaded.own:
            restore_random_states(loaded.own["random"], self._comm.device)
        self._note("resume", detail)
        return dict(extra["values"])

    def close(self, status: EndStatus = "done", message: str = "") -> None:
        """Ends the records of this rank; safe to call twice. The end of the process does so by itself."""
        atexit.unregister(self.close)
        if self._sink is None:
            self._around.close()
            return
        try:
            self._flush(wait=not self._problem)
            if self._prediction is not None and (reason := self._prediction.finish()):
                self._note("prediction", {"note": f"a step is not predicted: {reason}"})
            seconds = time.monotonic() - self._began
            status = "failed" if self._problem else status
            self._sink.write(records.end_record(status, self.num_steps, seconds, message or self._problem))
        finally:
            self._sink.close()
            self._sink = None
            self._around.close()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._problem = self._problem or _words(error)
        self.close()

    def _finish(self, samples: int) -> None:
        self._phases.enter(DATA)
        self.num_steps += 1
        reads = self._comm if self._engine is None else self._engine.batch_comm  # others read the same samples
        self._position = self._position + samples * reads.size if self._loader is None else self._loader.position
        values, device = self._values, self._comm.device
        total = values.pop("loss_sum", None)
        mean = values.pop("loss", None)
        if total is not None and self._engine is not None:  # of a part of its samples' tokens
            total = total * self._engine.groups.context.size
        elif mean is not None:
            total = mean * max(samples, 1)
        norm = values.pop(_NORM, None)
        numbers = [torch.as_tensor(value, dtype=torch.float64, device=device).reshape(()) for value in values.values()]
        told = torch.stack(numbers) if numbers else torch.empty(0, dtype=torch.float64)
        facts = _OwnStep(
            step=self.num_steps,
            position=self._position,
            lr=float(self._optimizer.param_groups[0]["lr"]) if self._optimizer is not None else 0.0,
            epoch=0.0 if self._loader is None else self._loader.num_epochs,
            samples=samples if self._engine is None or self._engine.reports_samples else 0,
            outcome=StepOutcome(
                loss_sum=torch.as_tensor(0.0 if total is None else total, device=device).float().reshape(()),
                count=0.0 if total is None else float(max(samples, 1)),
                grad_norm=torch.as_tensor(0.0 if norm is None else norm, device=device).float().reshape(()),
            ),
            has_norm=norm is not None,
            names=list(values),
            values=told.to("cpu", non_blocking=True),  # there once the step's mark is past
        )
        self._waiting.append(facts)
        if self._loads is not None:
            self._loads.after(self.num_steps, is_last=self.num_steps == self._planned)
        if self._meter.finish(facts):
            self._flush()

    def _flush(self, *, wait: bool = False) -> None:
        done: list[StepRecord | EventRecord] = []
        for record in self._meter.drain(wait=wait):
            facts = self._waiting.popleft()
            self._checks.see_loss(record.step, record.loss)
            record.grad_norm = record.grad_norm if facts.has_norm else None
            done += [record, *([facts.event(record.time)] if facts.names else [])]
        if done:
            self._open().write(*done, *self._meter.drain_comm(self.num_steps, wait=wait))

    def _open(self, continued: Path | None = None) -> Sink:
        """Claims the folder and opens what is written into, once; ``continued`` is a run to go on with."""
        if self._sink is not None:
            return self._sink
        comm = self._comm
        self.folder = ask_first_rank(comm, lambda: self._claim(continued))
        most = lines_kept(self._monitor.keep_steps, comm.size)
        self._sink = Fanout([JsonlSink(records.records_path(self.folder, comm.rank), most=most)])
        loop = getattr(comm, "loop", None)
        if loop is not None:
            loop.tell_in(self.folder)
        batch = 0 if self._loader is None else self._loader.global_batch
        about = {"strategy": _strategy(self._engine), "global_batch": batch, "total_steps": self._planned}
        self._sink.write(records.engine_record(comm, self._engine, microbatch=0, accumulate=1, **about))
        places = gather_objects(comm, (socket.gethostname(), comm.rank, os.getpid(), usable_cores()))
        same = [each for each in places if each[0] == socket.gethostname()]
        here = {rank: pid for _, rank, pid, _ in same}
        cores = {core for *_, own in same for core in own}
        self._shared = SharedCores(hosts=len({host for host, *_ in places}), cores=len(cores))
        find = (lambda: here) if comm.rank == min(here) else None
        self._around.enter_context(observing_from_a_rank(self.folder, self._monitor, self._settings(), comm, find))
        atexit.register(self.close)
        self._hear_of_errors()
        self._meter.start()
        return self._sink

    def _claim(self, continued: Path | None) -> Path:
        text = dump_values(self._settings())
        if continued is not None:
            claimed = claim_folder(continued, text, resume=True)
            adopt_config(continued)
        else:
            claimed = claim_folder(next_folder(Path(self._monitor.folder) / self.name), text, name=self.name)
        return self._around.enter_context(claimed).path.absolute()

    def _find(self) -> Path | None:
        from paceline.checkpoint.find import find_checkpoint

        for folder in runs_named(Path(self._monitor.folder) / self.name):
            with contextlib.suppress(CheckpointError):
                return find_checkpoint("auto", folder, "full")
        return None

    def _settings(self) -> dict[str, Any]:
        known: dict[str, Any] = {"name": self.name, "ranks": self._comm.size, "strategy": _strategy(self._engine)}
        if (layout := getattr(self._engine, "layout", None)) is not None:
            known |= {"train": {"precision": layout.precision}, "model": {"compile": layout.compile}}  # as a config has
            known["memory"] = {"checkpoint_activations": layout.checkpoint_activations}
            known["comm"] = {"compression": {"policy": layout.compression.policy}}
        if self._optimizer is not None:
            first = self._optimizer.param_groups[0]
            known["optimizer"] = {"kind": type(self._optimizer).__name__, "lr": float(first["lr"])}
        if self._loader is not None:
            known["global_batch"] = self._loader.global_batch
        return known | {str(name): _setting(value) for name, value in self._config.items()}

    def _note(self, name: str, detail: dict[str, Any]) -> None:
        self._open().write(EventRecord(name=name, step=self.num_steps, detail=detail, time=time.time()))

    def _needed_engine(self, what: str) -> Engine:
        if self._engine is None:
            fix = f'make it with the engine: paceline.Run(comm, "{self.name}", engine, optimizer, loader)'
            raise UsageError(f"run.{what}() of a run without an engine\n  the engine holds what is saved\n  {fix}")
        return self._engine

    def _listen(self) -> None:
        comm = self._comm if self._engine is None else self._engine.gradient_comm
        if comm.ledger is None:  # one rank, or ranks that nobody watches
            comm.ledger = Ledger(rank=comm.rank, world=comm.size, is_own_loop=True)
        comm.ledger.listeners.append(self._phases.enter)
        self._around.callback(comm.ledger.listeners.remove, self._phases.enter)
        if self._optimizer is not None:
            before = self._optimizer.register_step_pre_hook(lambda *_: self._phases.enter(OPTIMIZER))
            after = self._optimizer.register_step_post_hook(lambda *_: self._phases.enter(DATA))
            self._around.callback(before.remove)
            self._around.callback(after.remove)

    def _hear_of_errors(self) -> None:
        before = sys.excepthook

        def note(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self._problem = self._problem or _words(error)
            before(kind, error, traceback)

        def restore() -> None:
            if sys.excepthook is note:
                sys.excepthook = before

        sys.excepthook = note
        self._around.callback(restore)

    def _trace(self) -> Trace:
        """Returns the trace of the communicator; one that is watched gets one below its ledger, while the run lasts."""
        comm = self._comm
        trace = comm.trace or Trace(comm.device, clock=clock_of(comm))
        if comm.trace is None and isinstance(comm, LedgerCommunicator):
            inner, comm.trace, comm.inner = comm.inner, trace, TracedCommunicator(comm.inner, trace)

            def remove() -> None:
                comm.trace, comm.inner = None, inner

            self._around.callback(remove)
        return trace


@dataclass(slots=True, kw_only=True)
class _OwnStep:
    """A step that is over on the host, and may still run on the device; a loss that was not told has a count of 0."""

    step: int
    position: int
    lr: float
    epoch: float
    samples: int
    outcome: StepOutcome
    has_norm: bool
    names: list[str]
    values: torch.Tensor  # of the names, on the host once the step is over

    def event(self, now: float) -> EventRecord:
        detail = dict(zip(self.names, self.values.tolist(), strict=True))
        return EventRecord(name="scalars", step=self.step, detail=detail, time=now)


@dataclass(slots=True)
class _Phases:
    """Ends laps of the meter as the engine and the optimizer begin something else."""

    meter: StepMeter
    now: str = DATA
    is_in_step: bool = False
    evaluates_since: float | None = None

    def enter(self, phase: str) -> None:
        if not self.is_in_step:
            if phase == EVALUATION and self.evaluates_since is None:
                self.evaluates_since = time.time()
        elif phase != self.now and phase in STEP_PHASES:
            self.meter.lap(self.now)
            self.now = phase


def _strategy(engine: Engine | None) -> str:
    """Names the strategy of an engine, and the mesh where the model is spread: ``pipeline 2 x zero1``."""
    if engine is None:
        return ""
    sizes = {"pipeline": engine.groups.pipeline.size, "tensor": engine.groups.tensor.size}
    degrees = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    layout = getattr(engine, "layout", None)
    return " x ".join([*degrees, *([] if layout is None else [layout.strategy])])


def _words(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


def _setting(value: Any) -> Any:
    """Returns a value as a config can have it: what is no plain value by its words."""
    if isinstance(value, Mapping):
        return {str(name): _setting(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_setting(each) for each in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)
