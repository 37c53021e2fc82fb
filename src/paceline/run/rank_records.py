"""What a rank writes down besides its steps: who it is, which settings it obeys, its trace."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.comm.base import Communicator
    from paceline.config import Config
    from paceline.records.records import RunRecord
    from paceline.train.trainer import Trainer


def run_record(config: Config, comm: Communicator, trainer: Trainer | None) -> RunRecord:
    """Makes the first record of an attempt; without a trainer, that of one that failed before it had any."""
    import platform

    import torch

    from paceline import __version__
    from paceline.records.records import RunRecord

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
        strategy=name_strategy(config, comm.size),
        backend=comm.backend,
        global_batch=config.train.global_batch or 0 if plan is None else plan.batch.global_batch,
        microbatch=0 if plan is None else plan.batch.microbatch,
        accumulate=0 if plan is None else plan.batch.accumulate,
        total_steps=0 if plan is None else plan.total_steps,
        time=time.time(),
    )


def name_strategy(config: Config, ranks: int) -> str:
    """Names the strategy, and the mesh where the model is spread: ``pipeline 2 x tensor 2 x zero1``."""
    parallel = config.parallel
    degrees = [f"{name} {size}" for name in ("pipeline", "tensor") if (size := getattr(parallel, name)) > 1]
    has_data = ranks > parallel.pipeline * parallel.tensor
    return " x ".join([*degrees, parallel.strategy]) if has_data or not degrees else " x ".join(degrees)


def write_settings(config: Config, trainer: Trainer) -> None:
    """Writes which variables this rank's NCCL or Gloo obeys, where somebody asked for any."""
    from paceline.records.records import EventRecord
    from paceline.run.settings import variables_in_effect

    uses_nccl = trainer.parts.engine.comm.device.type == "cuda" and config.comm.backend in ("auto", "nccl")
    settings = variables_in_effect(config, uses_nccl=uses_nccl)
    if settings and trainer.sink is not None:
        trainer.sink.write(EventRecord(name="settings", step=trainer.step, detail=settings, time=time.time()))


def write_trace(config: Config, trainer: Trainer, folder: Path) -> None:
    """Writes every operation of this rank, one JSON object a line, if the config asks for it."""
    if not config.monitor.trace:
        return
    from dataclasses import asdict

    comm = trainer.parts.engine.world
    assert comm.trace is not None
    path = folder / "trace" / f"rank-{comm.rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for operation in comm.trace.operations:
            file.write(json.dumps(asdict(operation)) + "\n")
