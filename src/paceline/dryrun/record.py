"""``record``: one rank of a world runs a training step without values; what it did comes back as a ``Program``.

    model of the config, on meta --parallelize--> the real engine --train_step--> once to warm up, once written down

The first step differs from all later ones: engines learn the order of gradients, optimizers make their state. Nothing
is computed, so a model of any size is recorded on any machine; time and memory go with the number of its operators.
Blocks that a run would compile are recorded as they are: what a compiler makes of them is a matter of pricing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from paceline.cluster.measured import read_table
from paceline.comm.algorithms import placement
from paceline.comm.arguments import check_peer
from paceline.comm.base import Communicator
from paceline.comm.compress import Compressor
from paceline.comm.dry import META, DryCommunicator, DryWorld
from paceline.comm.dry_algorithms import DryAlgorithmCommunicator
from paceline.comm.topology import from_names
from paceline.config import Config, config_batch
from paceline.data.loader import StepBatch
from paceline.data.registry import DataSplits, build_data
from paceline.dryrun.functions import MetaFunctions, NoValues
from paceline.dryrun.held import HOST, HeldMemory
from paceline.dryrun.hosted import told_apart
from paceline.dryrun.operators import dtype_name
from paceline.dryrun.recorder import Recorded, Recorder
from paceline.dryrun.turns import enough_microbatches, order_of, pipeline_of, with_marks
from paceline.errors import UsageError
from paceline.models.registry import build_model, model_blocks, model_context
from paceline.parallel.engine import Engine
from paceline.parallel.face import EngineFace
from paceline.parallel.flat import FlatGroup
from paceline.parallel.fsdp import FullySharded
from paceline.planner.compose import repeat
from paceline.planner.program import Event, Program, Run, Turn
from paceline.planner.turns import counted, is_playable
from paceline.precision import precision_named
from paceline.train.assemble import build_compressor, build_engine, build_policy
from paceline.train.ema import WeightAverage
from paceline.train.loss import Loss, build_loss
from paceline.train.optim import build_optimizer
from paceline.train.scaler import LossScaler, make_scaler
from paceline.train.step import StepPolicy, train_step

_KEPT = 3  # microbatches of a step that are run
_FEW = 16  # samples of data whose values nobody looks at


def record(
    config: Config, *, ranks: int, rank: int = 0, node_ranks: int | None = None, is_whole: bool = False
) -> Program:
    """Runs one rank of ``ranks`` on meta tensors and returns its step.

    ``node_ranks`` is how many ranks share a host; None: all. Of many microbatches without a pipeline three are run, and
    the second stands for all but the first and the last; with ``is_whole`` each of them is. A stage of a pipeline
    learns its inputs from the stages before, which are run too. Raises UsageError for a model that cannot be traced,
    and for what has no price yet.
    """
    _check(config)
    world, width = _world(config, ranks), ranks // config.parallel.pipeline  # ranks of a stage
    chain = range(rank % width, rank, width)
    first = () if rank % width == 0 or config.parallel.pipeline == 1 else (0,)  # tells all where the model is cut
    for earlier in (*first, *chain):
        _record(config, world, earlier, node_ranks)
    return _record(config, world, rank, node_ranks, is_whole=is_whole)


def record_stages(
    config: Config, *, ranks: int, rank: int = 0, node_ranks: int | None = None, is_whole: bool = False
) -> tuple[Program, ...]:
    """Returns the steps of the ranks that pass their results to one another, one a stage: those of ``rank``.

    Of a model that is not cut, that is the rank alone. With ``is_whole`` every microbatch is run.
    """
    _check(config)
    check_peer("a dry run of", rank, ranks)
    world, each = _world(config, ranks), ranks // config.parallel.pipeline
    first = rank % each
    if first and config.parallel.pipeline > 1:  # rank 0 tells all where the model is cut
        _record(config, world, 0, node_ranks)
    chain = range(first, ranks, each)
    return tuple(_record(config, world, number, node_ranks, is_whole=is_whole) for number in chain)


def _world(config: Config, ranks: int) -> DryWorld:
    return DryWorld(ranks, "cpu" if config.parallel.device == "cpu" else "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a step is made of."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    batch: StepBatch
    loss: Loss
    policy: StepPolicy
    scaler: LossScaler | None
    compressor: Compressor | None
    average: WeightAverage | None


def _record(config: Config, world: DryWorld, rank: int, node_ranks: int | None, *, is_whole: bool = False) -> Program:
    recorder = Recorder()
    autocast = precision_named(config.train.precision).autocast_dtype
    functions = MetaFunctions(recorder, autocast, fuses_norms=config.parallel.device != "cpu")
    comm = world.rank(rank, recorder)
    data = _data(config)
    model = _model(config, data)
    recorder.watch(model_blocks(model), functions)
    if config.parallel.strategy in ("ddp", "zero1"):  # else whole gradients are there for a moment only
        _watch_gradients(recorder, model)
    with _without_collections(), recorder, functions:
        parts = _build(config, model, data, comm, recorder, node_ranks)
        _claim(recorder, parts)
        recorder.memory.leave_out()  # stages of others, and what was tried to find where to cut the model
        count = len(parts.batch.microbatches)
        few = count if is_whole else _enough(parts)
        with recorder.at_rest():  # these steps teach; ddp makes buckets in both
            for _ in range(2 if config.parallel.strategy == "ddp" else 1):
                _run(recorder, functions, parts, 1)
        done = _told_apart(_run(recorder, functions, parts, few), recorder, rank)
        events, order = _compose(parts, done, few, count)
        if order and not is_playable(events, order):
            events, order = _run(recorder, functions, parts, count).events, ()  # pipelines offload nothing
    plan = config_batch(config, world.size)
    per_sample = parts.loss.elements_per_sample or 1.0
    each = world.size // config.parallel.pipeline
    return Program(
        name=config.name,
        rank=rank,
        ranks=world.size,
        strategy=config.parallel.strategy,
        events=events,
        resident=done.resident,
        samples=plan.global_batch,
        elements=plan.global_batch * per_sample,
        element="tokens" if data.shape.kind == "tokens" else "samples",
        model_flops=_model_flops(counted(events, order)),
        dtype=_compute_dtype(config),
        is_compiled=config.model.compile,
        stage=rank // each,
        stages=config.parallel.pipeline,
        order=order,
    )


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps Python from looking for garbage: a graph has a great many objects, and when it looks is by chance."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(recorder: Recorder, functions: MetaFunctions, parts: _Parts, microbatches: int) -> Recorded:
    """Runs a step with so many microbatches."""
    batch = replace(parts.batch, microbatches=parts.batch.microbatches[:microbatches])
    pipeline = pipeline_of(parts.engine)
    if pipeline is not None:
        pipeline.journal = []
        recorder.memory.act = lambda: len(pipeline.journal)
    recorder.start()
    laps = _Laps(recorder, functions)
    with _claiming_gradients(recorder, parts):
        train_step(parts.engine, parts.optimizer, batch, parts.loss, parts.policy, laps, parts.scaler)
        if parts.average is not None:
            parts.average.update()
    _claim(recorder, parts)
    return recorder.finish()


def _told_apart(done: Recorded, recorder: Recorder, rank: int) -> Recorded:
    """Returns a step with what the host does itself, where an engine offloads."""
    host = recorder.memory.host_storages
    if not host:
        return done
    events, starts = told_apart(done.events, host, recorder.places(), rank)
    return replace(done, events=events, laps=tuple(starts[lap] for lap in done.laps))


def _enough(parts: _Parts) -> int:
    """Returns how many microbatches must be run to tell of all."""
    count, pipeline = len(parts.batch.microbatches), pipeline_of(parts.engine)
    return min(count, _KEPT) if pipeline is None else enough_microbatches(pipeline, count)


def _compose(parts: _Parts, done: Recorded, few: int, count: int) -> tuple[tuple[Event, ...], tuple[Turn, ...]]:
    """Returns the events of a step of ``count`` microbatches, or of few and the order in which they come again."""
    pipeline = pipeline_of(parts.engine)
    if few == count:
        return done.events, ()
    if pipeline is None:  # forward and backward of the second microbatch are between the second and the fourth lap
        return repeat(done.events, done.laps[1], done.laps[3], 1 + count - few), ()
    marked = with_marks(done.events, done.acts, pipeline.program(few).actions)
    return marked, order_of(pipeline.program(count), few)


def _check(config: Config) -> None:
    problems = []
    if config.parallel.strategy == "auto":
        problems.append(
            "parallel.strategy = auto in a dry run\n  it runs one strategy\n"
            "  name it, or let paceline plan find the fastest"
        )
    if config.comm.compression.policy == "threshold":
        problems.append(
            "comm.compression.policy = threshold in a dry run\n"
            "  how much it sends follows from values, and a dry run has none\n"
            "  take topk with the ratio that you expect, or paceline simulate, which has values"
        )
    if problems:
        raise UsageError("\n".join(problems))


# What a step is made of.


def _data(config: Config) -> DataSplits:
    """Makes the data; of random data only a few samples, since their shape is all that counts."""
    data = config.data
    if hasattr(data, "samples"):
        data = data.model_copy(update={"samples": min(data.samples, _FEW), "eval_fraction": 0.0})
    seed = config.train.seed if config.data.seed is None else config.data.seed
    return build_data(data, model_context(config.model), seed)


def _model(config: Config, data: DataSplits) -> nn.Module:
    with torch.device(META), NoValues():
        model = build_model(config.model, data.shape)
    return model.to(device=META, dtype=getattr(torch, config.train.dtype))


def _build(
    config: Config,
    model: nn.Module,
    data: DataSplits,
    comm: DryCommunicator,
    recorder: Recorder,
    node_ranks: int | None,
) -> _Parts:
    plain = config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})
    if comm.stands_for == "cpu":  # which is the host: engines offload nothing there
        plain = plain.model_copy(update={"memory": plain.memory.model_copy(update={"offload": ()})})
    compressor = build_compressor(_past_plain_steps(config))
    engine = build_engine(plain, model, _through(config, comm, node_ranks), node_ranks, compressor)
    batch = config_batch(config, comm.size)
    microbatch = tree_map(lambda value: value.to(META) if isinstance(value, torch.Tensor) else value, _batch(data, 1))
    microbatch = tree_map(
        lambda value: value.new_empty((batch.microbatch, *value.shape[1:])) if value.ndim else value, microbatch
    )
    step = StepBatch(
        position=0,
        next_position=batch.global_batch,
        epoch=0,
        global_samples=batch.global_batch,
        microbatches=[microbatch] * batch.accumulate,
        local_samples=[batch.microbatch] * batch.accumulate,
    )
    return _Parts(
        engine=engine,
        optimizer=_optimizer(config, engine, recorder),
        batch=step,
        loss=build_loss(config.train.loss, data.shape, may_ignore=config.data.kind == "factory"),
        policy=build_policy(config),
        scaler=make_scaler(engine.precision, META, config.train.loss_scale),
        compressor=compressor,
        average=None if config.train.ema_decay is None else WeightAverage(engine, config.train.ema_decay),
    )


def _past_plain_steps(config: Config) -> Config:
    """Returns the config without the first steps, in which gradients travel whole: a step later on is told of."""
    compression = config.comm.compression.model_copy(update={"plain_steps": 0})
    return config.model_copy(update={"comm": config.comm.model_copy(update={"compression": compression})})


def _through(config: Config, comm: DryCommunicator, node_ranks: int | None) -> Communicator:
    """Returns what the engine talks through: by the algorithm that the config asks for."""
    asked = config.comm.algorithm
    if asked == "native" or comm.size == 1:
        return comm
    hosts = config.parallel.node_ranks or node_ranks or comm.size
    topology = from_names([rank // hosts for rank in range(comm.size)])
    path = config.comm.algorithm_table
    table = None if path is None else read_table(Path(path), placement(topology))
    return DryAlgorithmCommunicator(comm, asked, topology, table=table)


def _batch(data: DataSplits, count: int) -> Any:
    return default_collate([data.train[0]] * count)


def _optimizer(config: Config, engine: Engine, recorder: Recorder) -> torch.optim.Optimizer:
    """Makes the optimizer as a device has it: torch's own is fused there, and its state is made in the first step.

    On meta tensors torch refuses to fuse, and looks when it makes the state; so that is there before. One that updates
    parameters on the host leaves it to the host whether to step at all.
    """
    optimizer = build_optimizer(config.optim, engine.named_parameters())
    if config.optim.kind not in ("adamw", "sgd"):
        return optimizer
    is_hosted = any(recorder.memory.is_on_host(each) for each in engine.parameters())
    vars(optimizer).update(_step_supports_amp_scaling=not is_hosted, _need_device_dtype_check_for_fused=False)
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"] if config.optim.kind == "adamw" else ():
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=META),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


# What memory is for.


def _claim(recorder: Recorder, parts: _Parts) -> None:
    """Says what the engine and the optimizer hold."""
    memory, engine = recorder.memory, parts.engine
    for each in _faces(engine):
        for group in each.flat_groups:
            if isinstance(each, FullySharded) and group.has_copy:
                memory.follow(group.full, "temporary")
                _look_after(group, memory)
            memory.claim([group.master] if group.resident is None else [group.master, group.resident], "parameters")
            if group.gradient is not None:
                memory.claim([group.gradient], "gradients")
    memory.claim(engine.parameters(), "parameters")
    memory.claim(engine.module.parameters(), "parameters")
    memory.claim(engine.module.buffers(), "buffers")
    for parameter, average in () if parts.average is None else parts.average.pairs():
        memory.claim([average], HOST if memory.is_on_host(parameter) else "optimizer")
    if parts.compressor is not None:
        memory.claim(parts.compressor.held(), "buffers")
    for parameter, state in parts.optimizer.state.items():
        states = (value for value in state.values() if isinstance(value, torch.Tensor))
        memory.claim(states, HOST if memory.is_on_host(parameter) else "optimizer")


def _look_after(group: FlatGroup, memory: HeldMemory) -> None:
    """Looks at followed storages when a group's memory comes or goes: after every kernel would take long."""
    for name in ("allocate", "free"):
        if name not in vars(group):
            vars(group)[name] = functools.partial(_then_look, group, getattr(group, name), memory)


def _then_look(group: FlatGroup, change: Callable[[], None], memory: HeldMemory) -> None:
    change()
    memory.look()
    if group.resident is not None:  # another one after each update
        memory.claim([group.resident], "parameters")


def _watch_gradients(recorder: Recorder, model: nn.Module) -> None:
    """Says of gradients what they are as they arrive."""

    def claim(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            recorder.memory.claim([parameter.grad], "gradients")

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(claim)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _claiming_gradients(recorder: Recorder, parts: _Parts) -> Iterator[None]:
    """Says before the update what gradients are."""

    def claim(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        held = (*parts.engine.parameters(), *parts.engine.module.parameters())
        recorder.memory.claim((p.grad for p in held if p.grad is not None), "gradients")

    handle = parts.optimizer.register_step_pre_hook(claim)
    try:
        yield
    finally:
        handle.remove()


def _faces(engine: Engine) -> Iterator[EngineFace]:
    if isinstance(engine, EngineFace):
        yield engine
        return
    for each in getattr(engine, "stages", {}).values():
        yield from _faces(each)


class _Laps:
    """Tells the recorder of the phases of a step."""

    def __init__(self, recorder: Recorder, functions: MetaFunctions) -> None:
        self._recorder = recorder
        self._functions = functions

    def lap(self, phase: str) -> None:
        """Ends a phase."""
        self._recorder.lap(phase)
        self._functions.forget_copies()


# What is said of it.


def _model_flops(events: Iterable[tuple[Event, int]]) -> float:
    """Three times what forward takes, attention in full; of events, and how often each of them is done."""
    found = 0.0
    for event, times in events:
        if isinstance(event, Run) and event.operation.phase == "forward":
            kernel = event.operation
            found += times * kernel.flops * (2.0 if kernel.family == "attention" and kernel.is_causal else 1.0)
    return 3.0 * found


def _compute_dtype(config: Config) -> str:
    precision = precision_named(config.train.precision)
    return dtype_name(precision.autocast_dtype or precision.param_dtype or torch.float32)
