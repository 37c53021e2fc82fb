"""From a config and a communicator to a trainer: the parts in the order in which they depend on one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from paceline.checkpoint.tools.pretrained import read_later
from paceline.cluster.detect import detect_machine, usable_cores
from paceline.comm.algorithms.communicator import AlgorithmCommunicator, TwoLevelCommunicator, join_hosts
from paceline.comm.algorithms.rounds import detect_topology, share_table
from paceline.comm.base import Communicator, clock_of
from paceline.comm.compress import Compressor
from paceline.comm.traced import LedgerCommunicator, Trace, TracedCommunicator
from paceline.config import Config, layout_of, with_precision
from paceline.config.data_sections import may_ignore
from paceline.config.layout import peak_learning_rate
from paceline.config.sections import HFModelConfig
from paceline.config.train_checks import shorter_warmup
from paceline.data.datasets import MapDataset, check_enough
from paceline.data.fetch import LoaderOptions, fetch_batch
from paceline.data.loader import EvalLoader, TrainLoader, WorkerChoice, choose_workers
from paceline.data.order import DataOrder
from paceline.data.packing import packing_details
from paceline.data.registry import DataSplits, data_of
from paceline.data.streams import StreamSamples
from paceline.engines.apply import parallelize
from paceline.engines.blocks import fix_sizes, load_compiler
from paceline.engines.engine import Engine, ignore_phase
from paceline.engines.precision import has_bf16, precision_named
from paceline.errors import TrainingError
from paceline.free_memory import MemoryGauge
from paceline.mesh import divisors
from paceline.models.registry import build_model
from paceline.plan.layout import Layout, groups_of, names_of
from paceline.plan.plan import Plan, RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts, largest_microbatch, optimizer_slots, with_memory
from paceline.records.meter import StepMeter
from paceline.records.sinks import Sink
from paceline.search.automatic import first_microbatch
from paceline.search.request import make_plan, with_length
from paceline.train.evaluate import load_metrics
from paceline.train.graphed_step import GraphedStep, graph_problem
from paceline.train.loss import Loss, OnNormalised, build_loss, fuses_loss
from paceline.train.optim import RateSchedule, build_optimizer, freeze_parameters
from paceline.train.randomness import capture_random_states, make_deterministic, restore_random_states, seed_everything
from paceline.train.resolve import cost_of_sample, has_own_code, resolve_together
from paceline.train.run_state import TrainerParts, WeightAverage, kept_files
from paceline.train.shown import ShownSamples
from paceline.train.step import StepPolicy
from paceline.train.survive.memory import Retry, TrialLimits, find_microbatch, optimizer_bytes
from paceline.train.trainer import Hook, NoteHook, Trainer, bucket_choice, note_compiled
from paceline.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAndModel:
    """The data and the model of a config, before any rank is involved."""

    data: DataSplits
    model: nn.Module


def build_workload(
    config: Config,
    layout: Layout | None = None,
    *,
    channels_last: bool = False,
    on_part: Callable[[str], None] = ignore_phase,
    reads_later: bool = False,
) -> DataAndModel:
    """Builds data and model, by ``train.seed`` alone; ``reads_later``: the engine reads what was pretrained."""
    data = data_of(config)
    on_part("data")
    seed_everything(config.train.seed)
    layout = layout_of(config) if layout is None else layout
    # What no rank holds whole is made without values, and gets them unit by unit: the same, drawn in the same order.
    is_late = layout.is_fully_sharded and config.model.kind not in ("factory", "hf")
    # What is cut into parts first, or lies otherwise in memory, would draw other numbers.
    is_late = is_late and not layout.is_split and not channels_last
    is_read = reads_later and isinstance(config.model, HFModelConfig) and config.model.pretrained
    with torch.device("meta") if is_late and config.train.dtype == "float32" else contextlib.nullcontext():
        model = build_model(config.model, data.shape, is_unfilled=is_read)
        model.to(getattr(torch, config.train.dtype))
    freeze_parameters(model, config.optim.groups)
    if is_read and isinstance(config.model, HFModelConfig):
        read_later(model, config.model)
    elif channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return DataAndModel(data=data, model=model)


def build_trainer(
    config: Config,
    comm: Communicator,
    *,
    plan: Plan | None = None,
    hooks: Sequence[Hook] = (),
    sink: Sink | None = None,
    node_ranks: int | None = None,
    on_part: Callable[[str], None] = ignore_phase,
) -> Trainer:
    """Makes a trainer for this rank, as all ranks do; without a plan, for the ranks there are."""
    if config.train.deterministic:
        make_deterministic()
    if plan is None:
        config, plan = _plan_here(config, comm, node_ranks)
    layout = plan.layout
    if layout.is_compiled and not has_own_code(config):
        load_compiler()
    channels_last = keeps_channels_last(config, layout, comm.device)
    work = build_workload(config, layout, channels_last=channels_last, on_part=on_part, reads_later=True)
    data, num_eval = work.data, 0 if work.data.eval is None else len(work.data.eval)
    plan = with_length(plan, config, train_samples=len(data.train), eval_samples=num_eval)
    check_enough(plan.train_samples, plan.layout.data)
    trace = Trace(comm.device, keep=config.monitor.trace, clock=clock_of(comm))
    policy, compressor = build_policy(config), build_compressor(layout)
    # The engine takes the model over: what reads the plain model comes before it.
    sample = cost_of_sample(config, data, work.model)
    files = kept_files(work.model, data)
    loss = _build_loss(config, layout, work, comm.device)
    seed_everything(config.train.seed)  # a model without values draws them now
    engine = parallelize(work.model, _build_comm(config, comm, trace, node_ranks), layout=layout, compressor=compressor)
    seed_everything(config.train.seed, engine.random_stream)  # from here on every rank draws numbers of its own
    notes: list[Hook] = []
    if plan.finds_microbatch:
        plan, found = _fit_microbatch(config, plan, engine, loss, data, node_ranks)
        notes.append(NoteHook("microbatch", {"note": found}))
    elif layout.is_compiled:
        _fix_sizes(config, plan, engine, loss, num_eval)
    plan = with_memory(plan, config, describe_model(config, comm.device.type), comm.device.type)
    optim = config.optim.model_copy(update={"lr": peak_learning_rate(config.optim, plan.batch.global_batch)})
    loader, eval_loader, choice = _build_loaders(config, plan, data, comm, engine, node_ranks)
    parts = TrainerParts(
        plan=plan,
        engine=engine,
        optimizer=build_optimizer(optim, engine.named_parameters(), engine, optim.lr / config.optim.lr),
        loader=loader,
        eval_loader=eval_loader,
        loss=loss,
        schedule=build_schedule(config, plan, lambda note: notes.append(NoteHook("warmup", {"note": note}))),
        policy=policy,
        meter=StepMeter(comm.device, trace, comm.ledger, names_of(groups_of(layout, comm.rank))),
        seed=config.train.seed,
        passes=Retry(plan.batch.microbatch, is_allowed=plan.finds_microbatch),
        compressor=compressor,
        average=None if config.train.ema_decay is None else WeightAverage(engine, config.train.ema_decay),
        evaluates_average=config.train.ema_eval,
        graphs=_choose_graphs(config, plan, loss, policy.dtype),
        sample=sample,
        files=files,
        metrics=load_metrics(config.train.metrics),
        has_perplexity=data.shape.kind == "tokens" and config.train.loss == "auto",
        early_stop=config.train.early_stop,
        shown=ShownSamples(data, config.monitor.samples),
    )
    on_part("model")
    notes += [NoteHook("packing", detail) for detail in packing_details(data.train)]
    return Trainer(parts, [*notes, *_notes(layout, engine, choice), *hooks], sink)


def _plan_here(config: Config, comm: Communicator, node_ranks: int | None) -> tuple[Config, Plan]:
    """Returns the plan for the ranks that are there, and the config with what was decided on the way."""
    config = with_precision(config, comm.device.type, has_bf16=has_bf16(comm.device))
    if config.is_open:
        config, _ = resolve_together(config, comm, node_ranks)
    return config, make_plan(config, RunMachine(device=comm.device.type, ranks=comm.size, node_ranks=node_ranks))


def _fix_sizes(config: Config, plan: Plan, engine: Engine, loss: Loss, num_eval: int) -> None:
    """Has graphs compiled for one batch size where all batches, of training or of evaluation, have the same."""
    batch, at_once = plan.batch.global_batch, plan.batch.microbatch * plan.layout.data
    is_even = (config.data.last_batch == "drop" or plan.train_samples % batch == 0) and batch % at_once == 0
    fix_sizes(engine.module, getattr(loss, "sum", None), training=is_even, evaluation=num_eval % at_once == 0)


def _notes(layout: Layout, engine: Engine, choice: WorkerChoice | None) -> list[Hook]:
    """Returns the hooks that record what was chosen for this run, and what its first steps compile and tune."""
    notes: list[Hook] = [] if choice is None else [NoteHook("loader", choice._asdict())]
    if engine.float8 is not None:
        notes.append(NoteHook("precision", {"layers": str(engine.float8)}))
    if (sequences := engine.groups.sequences) is not None:
        notes.append(NoteHook("context", sequences.detail()))
    if layout.is_compiled:
        notes.append(note_compiled)
    return [*notes, NoteHook("buckets", bucket_choice)] if layout.tunes_buckets else notes


def _build_loss(config: Config, layout: Layout, work: DataAndModel, device: torch.device) -> Loss:
    """Makes the loss, before an engine has the model; one that is compiled as a whole may normalise its images."""
    loss = build_loss(
        config.train.loss,
        work.data.shape,
        may_ignore=may_ignore(config.data),
        compiles=layout.is_compiled,
        is_fused=fuses_loss(config.train.loss, layout, work.model, device.type),
        dtype=getattr(torch, config.train.dtype),
    )
    if isinstance(loss, OnNormalised) and normalises_inside(config, layout):
        loss.leave_to(work.model, device, precision_named(layout.precision).param_dtype)
    return loss


def normalises_inside(config: Config, layout: Layout) -> bool:
    """Says whether a model normalises images of bytes: it is one graph, and the loss reads them nowhere else."""
    return layout.compile == "whole" and not layout.is_split and config.train.loss == "auto"


def _choose_graphs(config: Config, plan: Plan, loss: Loss, dtype: torch.dtype) -> GraphedStep | None:
    """Returns what runs steps from a CUDA graph, where that is possible and asked for."""
    asked = config.train.cuda_graphs
    problem = graph_problem(config, plan.layout, plan.device, loss)
    if asked is True and problem:
        raise TrainingError(f"train.cuda_graphs = true\n  {problem}\n  take train.cuda_graphs = auto, or false")
    return None if asked is False or problem else GraphedStep("on" if asked is True else "auto", dtype)


def keeps_channels_last(config: Config, layout: Layout, device: torch.device) -> bool:
    """Says whether images keep their channels next to one another: tensor cores read half precision in that order."""
    asked: bool | Literal["auto"] = getattr(config.model, "channels_last", False)
    return asked if asked != "auto" else device.type == "cuda" and layout.precision != "fp32"


def loader_options(
    config: Config, comm: Communicator, dataset: MapDataset, microbatch: int, node_ranks: int | None
) -> tuple[LoaderOptions, WorkerChoice | None]:
    """Decides how batches are read; a rank on a CPU, or one that takes turns with others, reads when it needs one."""
    data, feeds = config.data, comm.device.type == "cuda" and comm.takes_real_time
    choice = None
    if data.workers == "auto" and feeds:
        states = capture_random_states(comm.device)
        cores = max(1, len(usable_cores()) // (node_ranks or comm.size))
        choice = choose_workers(dataset, microbatch, cores=cores, worker_start=data.worker_start)
        restore_random_states(states, comm.device)
    workers = 0 if data.workers == "auto" else data.workers
    options = LoaderOptions(
        workers=workers if choice is None else choice.workers,
        prefetch=data.prefetch,
        worker_start=data.worker_start,
        pin_memory=comm.device.type == "cuda" and not feeds,
        device=comm.device if feeds else None,
    )
    return options, choice


def _build_comm(config: Config, comm: Communicator, trace: Trace, node_ranks: int | None) -> Communicator:
    """Returns what the engine talks through: traced, and by the algorithm that the config asks for.

    The trace is inside the algorithm, whose messages it counts; around it, it takes the time for which compute waits.
    """
    traced = TracedCommunicator(comm, trace)
    if config.comm.algorithm == "native" or comm.size == 1:
        return traced
    topology = detect_topology(comm, node_ranks)
    table = None if config.comm.algorithm_table is None else share_table(config.comm.algorithm_table, comm, topology)
    made = AlgorithmCommunicator(traced, config.comm.algorithm, topology, table=table)
    if config.comm.algorithm == "hierarchical" and config.comm.backend != "gloo":
        local = join_hosts(comm, topology, timeout_s=config.comm.timeout_s)
        if local is not None:
            kept = local if comm.ledger is None else LedgerCommunicator(local, comm.ledger)
            made = TwoLevelCommunicator(traced, topology, TracedCommunicator(kept, trace))
    return TracedCommunicator(made, trace, counts=False)


def build_compressor(layout: Layout) -> Compressor | None:
    """Makes what compresses this rank's gradients; None where they travel whole."""
    return Compressor(layout.compression) if layout.compression.is_any else None


def build_policy(config: Config) -> StepPolicy:
    return StepPolicy(
        clip_norm=config.optim.clip_norm,
        dtype=getattr(torch, config.train.dtype),
        loss_scale=config.train.loss_scale,
        max_bad_steps=config.train.max_bad_steps,
        histogram_every=config.monitor.histograms or None,
        loads_every=config.monitor.log_every,
    )


def build_schedule(config: Config, plan: Plan, tell: Callable[[str], None] = ignore_phase) -> RateSchedule:
    """Makes the schedule of rates. ``tell`` hears of a warmup that is cut to a run whose length the data alone tell."""
    asked = config.optim.schedule
    whole_run = plan.total_steps if asked.unit == "steps" else plan.total_samples
    warmup, note = asked.warmup, ""
    if asked.length is None and config.train.steps is None:
        warmup, note = shorter_warmup(asked, whole_run, f"train.epochs = {config.train.epochs_to_run:g}")
    if note:
        tell(note)
    return RateSchedule(**{**asked.model_dump(), "warmup": warmup, "length": float(asked.length or whole_run)})


def _fit_microbatch(
    config: Config, plan: Plan, engine: Engine, loss: Loss, data: DataSplits, node_ranks: int | None
) -> tuple[Plan, str]:
    """Finds the largest microbatch that all ranks can hold, and says why it is that; the global batch stays."""
    device = engine.device
    hosts = node_ranks or engine.batch_comm.size
    slots = optimizer_slots(config.optim) + (config.train.ema_decay is not None)
    known, first = describe_model(config, device.type), 1
    if known is not None:
        # Half of what there is: an estimate may be off, and the trials go up from there. They begin with the size that
        # is predicted to be fastest, or the largest. Ranks may differ here: the search takes the smallest.
        budget = MemoryGauge(device).limit_bytes(hosts) // 2
        most = largest_microbatch(known, plan.layout, StateFacts.of(config, device.type), budget)
        sizes = [size for size in divisors(plan.batch.samples_per_rank) if size <= most]
        settled = config.with_values("parallel", device=device.type)
        machine = detect_machine(with_gpus=device.type == "cuda")
        first = first_microbatch(settled, known, machine, sizes, ranks=plan.batch.ranks, node_ranks=hosts) or most
    reserve, whole = optimizer_bytes(engine, slots), plan.batch.samples_per_rank
    limits = TrialLimits(samples_per_rank=whole, reserve_bytes=reserve, first=first, node_ranks=hosts)
    found = find_microbatch(engine, loss, data.train, getattr(torch, config.train.dtype), limits)
    assert found.samples is not None
    took = ("out of memory" if each.peak_bytes is None else format_bytes(each.peak_bytes) for each in found.trials)
    sized = zip(found.trials, took, strict=True)
    tried = "; ".join(f"{each.samples}: {size}{'' if each.fits else ', too much'}" for each, size in sized)
    reason = "all samples of a rank's step" if found.samples == whole else f"the largest part of {whole} that fits"
    why = f"train.microbatch = auto takes {found.samples}, {reason}; tried {tried}"
    return plan.with_microbatch(found.samples), why


def _build_loaders(
    config: Config, plan: Plan, data: DataSplits, comm: Communicator, engine: Engine, node_ranks: int | None
) -> tuple[TrainLoader, EvalLoader | None, WorkerChoice | None]:
    options, choice = loader_options(config, comm, data.train, plan.batch.microbatch, node_ranks)
    seed = config.train.seed if config.data.seed is None else config.data.seed
    how = {"shuffle": config.data.shuffle, "drop_last": config.data.last_batch == "drop"}
    order = DataOrder(length=plan.train_samples, global_batch=plan.batch.global_batch, seed=seed, **how)
    rank, ranks, batch = engine.batch_comm.rank, engine.batch_comm.size, plan.batch
    if not isinstance(data.train, StreamSamples):  # which is read once
        engine.show_batch(lambda: fetch_batch(data.train, np.zeros(1, dtype=np.int64)))
    loader = TrainLoader(data.train, order, rank=rank, ranks=ranks, accumulate=batch.accumulate, options=options)
    if data.eval is None:
        return loader, None, choice
    # As many samples at once as in training: a batch that is cut to fit into memory would not fit whole here either.
    return loader, EvalLoader(data.eval, batch.microbatch * ranks, rank=rank, ranks=ranks, options=options), choice
