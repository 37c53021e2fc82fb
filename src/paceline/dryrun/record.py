"""``record``: one rank of a world runs a training step without values; what it did comes back as a ``Program``.

    model of the config, on meta --parallelize--> the real engine --train_step--> once to warm up, once written down

The first step differs from all later ones: engines learn the order of gradients, optimizers make their state. Nothing
is computed, so a model of any size is recorded on any machine; time and memory go with the number of its operators.
Blocks that a run would compile are recorded as they are: what a compiler makes of them is a matter of pricing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from paceline.comm.arguments import check_peer
from paceline.comm.dry import META, DryCommunicator, DryWorld
from paceline.config import Config, config_batch
from paceline.data.loader import StepBatch
from paceline.data.registry import DataSplits, build_data
from paceline.dryrun.functions import MetaFunctions
from paceline.dryrun.operators import dtype_name
from paceline.dryrun.recorder import Recorded, Recorder
from paceline.dryrun.turns import enough_microbatches, order_of, pipeline_of, with_marks
from paceline.errors import UsageError
from paceline.models.registry import build_model, model_blocks, model_context
from paceline.parallel.engine import Engine
from paceline.parallel.face import EngineFace
from paceline.parallel.fsdp import FullySharded
from paceline.planner.compose import repeat
from paceline.planner.program import Event, Program, Run, Turn
from paceline.planner.turns import is_playable, play
from paceline.precision import precision_named
from paceline.train.assemble import build_engine, build_policy
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
    with recorder, functions:
        parts = _build(config, model, data, comm, node_ranks)
        _claim(recorder, parts)
        recorder.memory.leave_out()  # stages of others, and what was tried to find where to cut the model
        count = len(parts.batch.microbatches)
        few = count if is_whole else _enough(parts)
        for _ in range(2 if config.parallel.strategy == "ddp" else 1):  # they teach; ddp makes buckets in both
            _run(recorder, functions, parts, 1)
        done = _run(recorder, functions, parts, few)
        events, order = _compose(parts, done, few, count)
        if order and not is_playable(events, order):
            events, order = _run(recorder, functions, parts, count).events, ()
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
        model_flops=_model_flops(play(events, order) if order else events),
        dtype=_compute_dtype(config),
        is_compiled=config.model.compile,
        stage=rank // each,
        stages=config.parallel.pipeline,
        order=order,
    )


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
    _claim(recorder, parts)
    return recorder.finish()


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
    if config.memory.offload:
        problems.append(
            f"memory.offload = {list(config.memory.offload)} in a dry run\n"
            "  copies between device and host have no price yet\n  leave it out"
        )
    if config.comm.compression.policy != "none":
        problems.append(
            f"comm.compression.policy = {config.comm.compression.policy} in a dry run\n"
            "  what it sends follows from values\n  set it to none"
        )
    if config.comm.algorithm != "native":
        problems.append(
            f"comm.algorithm = {config.comm.algorithm} in a dry run\n"
            "  collectives are priced as the backend's own\n  set it to native"
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
    with torch.device(META):
        model = build_model(config.model, data.shape)
    return model.to(device=META, dtype=getattr(torch, config.train.dtype))


def _build(config: Config, model: nn.Module, data: DataSplits, comm: DryCommunicator, node_ranks: int | None) -> _Parts:
    plain = config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})
    engine = build_engine(plain, model, comm, node_ranks)
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
        optimizer=_optimizer(config, engine),
        batch=step,
        loss=build_loss(config.train.loss, data.shape, may_ignore=config.data.kind == "factory"),
        policy=build_policy(config),
        scaler=make_scaler(engine.precision, META, config.train.loss_scale),
    )


def _batch(data: DataSplits, count: int) -> Any:
    return default_collate([data.train[0]] * count)


def _optimizer(config: Config, engine: Engine) -> torch.optim.Optimizer:
    """Makes the optimizer as a device has it: torch's own is fused there, and its state is made in the first step.

    On meta tensors torch refuses to fuse, and looks when it makes the state; so that is there before.
    """
    optimizer = build_optimizer(config.optim, engine.named_parameters())
    if config.optim.kind not in ("adamw", "sgd"):
        return optimizer
    vars(optimizer).update(_step_supports_amp_scaling=True, _need_device_dtype_check_for_fused=False)
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
            memory.claim([group.master], "parameters")
            if group.gradient is not None:
                memory.claim([group.gradient], "gradients")
    memory.claim(engine.parameters(), "parameters")
    memory.claim(engine.module.parameters(), "parameters")
    memory.claim(engine.module.buffers(), "buffers")
    states = (value for state in parts.optimizer.state.values() for value in state.values())
    memory.claim((value for value in states if isinstance(value, torch.Tensor)), "optimizer")


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
        if phase == "forward":
            self._functions.forget_copies()


# What is said of it.


def _model_flops(events: Any) -> float:
    """Three times what forward takes, attention in full."""
    kernels = [event.operation for event in events if isinstance(event, Run) and event.operation.phase == "forward"]
    return 3.0 * sum(k.flops * (2.0 if k.family == "attention" and k.is_causal else 1.0) for k in kernels)


def _compute_dtype(config: Config) -> str:
    precision = precision_named(config.train.precision)
    return dtype_name(precision.autocast_dtype or precision.param_dtype or torch.float32)
