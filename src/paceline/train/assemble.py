"""From a config and a communicator to a trainer: the parts in the order in which they depend on one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.config import Config
from paceline.data.datasets import check_enough
from paceline.data.loader import EvalLoader, LoaderOptions, TrainLoader
from paceline.data.order import DataOrder
from paceline.data.registry import DataSplits, build_data
from paceline.models.registry import build_model, model_context
from paceline.monitor.meter import StepMeter
from paceline.monitor.sinks import Sink
from paceline.parallel.apply import parallelize
from paceline.parallel.ddp import DataParallel
from paceline.planning import Plan, make_plan
from paceline.train.loss import build_loss
from paceline.train.optim import build_optimizer
from paceline.train.randomness import make_deterministic, seed_everything
from paceline.train.schedule import Schedule
from paceline.train.step import StepPolicy
from paceline.train.trainer import Hook, Trainer, TrainerParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The data and the model of a config, before any rank is involved."""

    data: DataSplits
    model: nn.Module


def build_workload(config: Config) -> Workload:
    """Builds data and model; the weights depend on ``train.seed`` alone."""
    seed = config.train.seed
    data = build_data(config.data, model_context(config.model), seed if config.data.seed is None else config.data.seed)
    seed_everything(seed)
    model = build_model(config.model, data.shape).to(getattr(torch, config.train.dtype))
    return Workload(data=data, model=model)


def build_trainer(
    config: Config, comm: Communicator, *, hooks: Sequence[Hook] = (), sink: Sink | None = None
) -> Trainer:
    """Makes a trainer for this rank. All ranks call it with the same config."""
    if config.train.deterministic:
        make_deterministic()
    work = build_workload(config)
    num_eval = 0 if work.data.eval is None else len(work.data.eval)
    plan = make_plan(config, ranks=comm.size, train_samples=len(work.data.train), eval_samples=num_eval)
    check_enough(plan.train_samples, comm.size)
    trace = Trace(comm.device, keep=config.monitor.trace)
    engine = build_engine(config, work.model, TracedCommunicator(comm, trace))
    seed_everything(config.train.seed, comm.rank)  # from here on every rank draws numbers of its own
    options = LoaderOptions(
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        worker_start=config.data.worker_start,
        pin_memory=comm.device.type == "cuda",
    )
    parts = TrainerParts(
        plan=plan,
        engine=engine,
        optimizer=build_optimizer(config.optim, engine.named_parameters()),
        loader=_train_loader(config, plan, work.data, comm, options),
        eval_loader=_eval_loader(plan, work.data, comm, options),
        loss=build_loss(config.train.loss, work.data.shape, may_ignore=config.data.kind == "factory"),
        schedule=build_schedule(config, plan),
        policy=StepPolicy(clip_norm=config.optim.clip_norm, dtype=getattr(torch, config.train.dtype)),
        meter=StepMeter(comm.device, trace),
        seed=config.train.seed,
    )
    return Trainer(parts, hooks, sink)


def build_engine(config: Config, model: nn.Module, comm: Communicator) -> DataParallel:
    """Parallelizes a model as a config says."""
    return parallelize(
        model,
        comm,
        config.parallel.strategy,
        bucket_mb=config.comm.bucket_mb,
        first_bucket_mb=config.comm.first_bucket_mb,
        buffers=config.comm.buffers,
        overlap=config.comm.overlap,
        compile_blocks=config.model.compile,
    )


def build_schedule(config: Config, plan: Plan) -> Schedule:
    """Makes the learning-rate schedule; without a length of its own it spans the run."""
    asked = config.optim.schedule
    whole_run = plan.total_steps if asked.unit == "steps" else plan.total_samples
    return Schedule(
        kind=asked.kind,
        unit=asked.unit,
        warmup=asked.warmup,
        length=float(asked.length or whole_run),
        final_ratio=asked.final_ratio,
    )


def _train_loader(
    config: Config, plan: Plan, data: DataSplits, comm: Communicator, options: LoaderOptions
) -> TrainLoader:
    order = DataOrder(
        length=plan.train_samples,
        global_batch=plan.batch.global_batch,
        seed=config.train.seed if config.data.seed is None else config.data.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.last_batch == "drop",
    )
    return TrainLoader(
        data.train, order, rank=comm.rank, ranks=comm.size, accumulate=plan.batch.accumulate, options=options
    )


def _eval_loader(plan: Plan, data: DataSplits, comm: Communicator, options: LoaderOptions) -> EvalLoader | None:
    if data.eval is None:
        return None
    return EvalLoader(data.eval, plan.batch.global_batch, rank=comm.rank, ranks=comm.size, options=options)
