"""What goes into a rank's records besides its steps: who it is, which settings it obeys, its trace, its end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from paceline import __version__
from paceline.cluster.devices import Peaks, find_peaks
from paceline.comm.base import Communicator
from paceline.config import Config, why_not_sharded
from paceline.config.settings import variables_of
from paceline.records.records import EndRecord, EndStatus, EventRecord, HostRecord, RunRecord, parse_line, to_line
from paceline.records.sinks import JsonlSink
from paceline.run.notes import read_progress
from paceline.run.processes import machine_entry

if TYPE_CHECKING:
    from paceline.engines.engine import Engine
    from paceline.engines.precision import Precision
    from paceline.train.trainer import Trainer

_RUN = b'{"type":"run"'

Mark: TypeAlias = tuple[int, int]  # of a file, before an attempt: which one it is, and its size; no clock is asked


def mark_records(folder: Path, ranks: Iterable[int]) -> dict[int, Mark]:
    """Returns where the records of an attempt will begin."""
    found = dict.fromkeys(ranks, (0, 0))
    for rank in found:
        with contextlib.suppress(OSError):
            status = records_path(folder, rank).stat()
            found[rank] = status.st_ino, status.st_size
    return found


def open_attempts(folder: Path, marks: Mapping[int, Mark]) -> list[int]:
    """Returns the ranks that began an attempt behind their marks and wrote no end. One pass over their files."""
    return [rank for rank, mark in marks.items() if _open_attempt(records_path(folder, rank), mark) is not None]


def end_records(folder: Path, marks: Mapping[int, Mark], status: EndStatus, message: str) -> None:
    """Ends the records of attempts that began behind these marks and have no end; a full disk is left alone."""
    for rank, mark in marks.items():
        path = records_path(folder, rank)
        attempt = _open_attempt(path, mark)
        if attempt is not None:
            run, step = attempt
            end = end_record(status, step, max(0.0, time.time() - run.time), message)
            with contextlib.suppress(OSError), contextlib.closing(JsonlSink(path)) as sink:
                sink.write(end)


def end_record(status: EndStatus, step: int, seconds: float, message: str = "") -> EndRecord:
    return EndRecord(status=status, step=step, seconds=seconds, message=message, time=time.time())


def append_event(folder: Path, rank: int, name: str, detail: dict[str, Any]) -> bool:
    """Adds an event to the records of a rank that still writes them, in one write; says whether there were any."""
    progress = read_progress(folder).get(rank)
    step = 0 if progress is None else progress.last_step
    event = EventRecord(name=name, step=step, detail=detail, time=time.time())
    path = records_path(folder, rank)
    with contextlib.suppress(OSError):
        while path.is_file():
            with path.open("ab", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the rank may be replacing its file by a shorter one
                if os.fstat(file.fileno()).st_nlink:
                    file.write(to_line(event).encode())
                    return True
    return False


def run_record(config: Config, comm: Communicator, trainer: Trainer | None) -> RunRecord:
    """Makes the first record of an attempt; without a trainer, that of one that failed before it had any."""
    plan, engine = (None, None) if trainer is None else (trainer.parts.plan, trainer.parts.engine)
    return engine_record(
        comm,
        engine,
        strategy=name_strategy(config, comm.size),
        global_batch=config.train.global_batch or 0 if plan is None else plan.batch.global_batch,
        microbatch=0 if plan is None else plan.batch.microbatch,
        accumulate=0 if plan is None else plan.batch.accumulate,
        total_steps=0 if plan is None else plan.total_steps,
        **({} if trainer is None else _speed_of(trainer, comm.device)),
    )


def engine_record(comm: Communicator, engine: Engine | None, **about: Any) -> RunRecord:
    about["num_parameters"] = 0 if engine is None else engine.num_parameters
    about["num_trained"] = None if engine is None else engine.num_trained
    return first_record(comm.rank, comm.size, comm.device, backend=comm.backend, **about)


def first_record(rank: int, ranks: int, device: torch.device, **about: Any) -> RunRecord:
    """Makes the first record of a rank: who it is, and what else is known ``about`` its run."""
    return RunRecord(
        rank=rank,
        world_size=ranks,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        device=device_name(device),
        host=socket.gethostname(),
        pid=os.getpid(),
        python=platform.python_version(),
        torch=torch.__version__,
        paceline=__version__,
        time=time.time(),
        **about,
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _speed_of(trainer: Trainer, device: torch.device) -> dict[str, Any]:
    """Returns what the speed of a run is measured by: what a sample takes, and what its device could do."""
    sample, entry, name = trainer.parts.sample, machine_entry(), device_name(device)
    compute = compute_dtype(trainer.parts.engine.precision, device)
    peaks = find_peaks(name, compute, entry) if device.type == "cuda" or entry is not None else Peaks()
    counts = {"unit": sample.unit, "units_per_sample": sample.units, "flops_per_sample": sample.flops}
    return counts | {"compute": compute, "peak_flops": peaks.sheet, "measured_peak_flops": peaks.measured}


def compute_dtype(precision: Precision, device: torch.device) -> str:
    """Names the dtype that matrix products run in, as the catalog of devices does."""
    if "fp8" in precision.name:
        return "fp8"
    dtype = precision.autocast_dtype or precision.param_dtype
    if dtype in (torch.bfloat16, torch.float16):
        return "bf16" if dtype is torch.bfloat16 else "fp16"
    return "tf32" if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest" else "fp32"


def name_strategy(config: Config, ranks: int) -> str:
    """Names the strategy that runs, and the mesh where the model is spread: ``pipeline 2 x tensor 2 x zero1``."""
    parallel = config.parallel
    if why_not_sharded(config, ranks):
        return "ddp"
    axes = ("pipeline", "context", "tensor", "expert")
    degrees = [f"{name} {size}" for name in axes if (size := getattr(parallel, name)) > 1]
    has_data = ranks > parallel.pipeline * parallel.tensor
    return " x ".join([*degrees, parallel.strategy]) if has_data or not degrees else " x ".join(degrees)


def write_start(config: Config, comm: Communicator, trainer: Trainer) -> None:
    """Writes who this rank is, what its NCCL or Gloo obeys, why no memory is shared. Steps have FLOP/s from then on."""
    parts, first = trainer.parts, run_record(config, comm, trainer)
    layout, flops = parts.plan.layout, first.flops_per_sample
    parts.meter.rate_against(None if flops is None else flops / layout.degree, first.peak_flops)
    if trainer.sink is not None:
        trainer.sink.write(first)
    uses_nccl = parts.engine.device.type == "cuda" and config.comm.backend in ("auto", "nccl")
    settings = variables_in_effect(config, uses_nccl=uses_nccl)
    if settings:
        trainer.note("settings", settings)
    world: Any = parts.engine.world
    while hasattr(world, "inner"):
        world = world.inner
    if why := getattr(world, "why_gloo", ""):
        trainer.note("fallback", {"backend": world.backend, "instead_of": "shared_memory", "reason": why})


def variables_in_effect(config: Config, *, uses_nccl: bool) -> dict[str, str]:
    """Returns what this process's environment says: the config's variables, and all others of NCCL."""
    asked = variables_of(config.comm, uses_nccl=uses_nccl)
    told = {name for name in os.environ if uses_nccl and name.startswith("NCCL_")}
    return {name: os.environ[name] for name in sorted(asked.keys() | told) if name in os.environ}


def write_trace(config: Config, trainer: Trainer, folder: Path) -> None:
    """Writes every operation of this rank, one JSON object a line, if the config asks for it."""
    if not config.monitor.trace:
        return
    comm = trainer.parts.engine.world
    assert comm.trace is not None
    path = folder / "trace" / f"rank-{comm.rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    ahead_s = time.time() - time.perf_counter()  # of the clock that operations are timed by
    with path.open("w", encoding="utf-8") as file:
        for operation in comm.trace.operations:
            file.write(json.dumps(asdict(operation) | {"time": ahead_s + operation.start_s}) + "\n")


def records_path(folder: Path, rank: int) -> Path:
    return folder / "records" / f"rank-{rank}.jsonl"


def _open_attempt(path: Path, mark: Mark) -> tuple[RunRecord, int] | None:
    """Returns the start of the last attempt and the step it came to; None without one, or if its end is written.

    A rank that thins its records puts another file in the place of the first: then it has begun.
    """
    kept: dict[bytes, bytes] = {}
    number, size = mark
    place = began = 0
    if path.is_file():
        with path.open("rb") as file:
            size = size if os.fstat(file.fileno()).st_ino == number else 0
            for line in file:
                if line.startswith(_RUN):
                    kept.clear()
                    began = place
                place += len(line)
                if line.endswith(b"\n"):
                    kept[line[: line.index(b",")]] = line  # the last of each type
    found = [parse_line(line) for line in kept.values()]
    run = next((record for record in found if isinstance(record, RunRecord)), None)
    if run is None or began < size or any(isinstance(record, EndRecord) for record in found):
        return None
    return run, max((record.step for record in found if not isinstance(record, RunRecord | HostRecord)), default=0)
