"""``record_stages``: a rank of each stage runs a training step without values; what it did comes back as a ``Program``.

    model of the config, on meta --parallelize--> the real engine --train_step--> once to warm up, once written down

The first step differs from all later ones: engines learn the order of gradients, optimizers make their state. Nothing
is computed, so a model of any size is recorded on any machine; time and memory go with the number of its operators.
Blocks that a run would compile are recorded as they are: what a compiler makes of them is a matter of pricing.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from paceline.cluster.devices import Cluster
from paceline.comm.base import check_peer
from paceline.comm.dry.communicator import DryWorld
from paceline.config import Config, layout_of
from paceline.engines.flat.flat import FlatGroup
from paceline.engines.pipeline import Pipeline
from paceline.engines.precision import precision_named
from paceline.errors import PacelineError, UsageError
from paceline.mesh import divisors
from paceline.models.registry import model_blocks
from paceline.plan.layout import Layout
from paceline.predict.replay.program import (
    END,
    LOSS,
    Event,
    EventMark,
    Program,
    Run,
    Turn,
    counted,
    is_playable,
    repeat,
)
from paceline.predict.replay.replay import replay
from paceline.rehearse.dryrun.held import HOST, HeldMemory, mark_host_work
from paceline.rehearse.dryrun.operators import KnownCalls, dtype_name
from paceline.rehearse.dryrun.parts import StepPieces, build_parts, empty_model, few_data, tell_inputs
from paceline.rehearse.dryrun.recorder import MetaFunctions, Recorded, Recorder, no_answer
from paceline.schedule.grid import Action, RankProgram
from paceline.search.search import budget_of
from paceline.train.graphed_step import FIRST_REPLAY, graph_problem
from paceline.train.loss import CrossEntropy
from paceline.train.resolve import first_line, is_users, made_at, misfit, needs_values, raised_at
from paceline.train.step import StepCallbacks, train_step


def claim_states(memory: HeldMemory, parts: StepPieces) -> None:
    engine = parts.engine
    for group in engine.flat_groups:
        if group.comes_and_goes:
            memory.follow(group.full, "temporary")
            _look_after(group, memory)
        memory.claim([group.master], "parameters")
        _claim_resident(group, memory)
        if group.gradients.slice is not None:
            memory.claim([group.gradients.slice], "gradients")
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

    def then_look(change: Callable[[], None]) -> None:
        change()
        memory.look()
        _claim_resident(group, memory)

    for name in ("allocate", "free"):
        if name not in vars(group):
            vars(group)[name] = functools.partial(then_look, getattr(group, name))


def _claim_resident(group: FlatGroup, memory: HeldMemory) -> None:
    if group.host is not None and group.host.resident is not None:
        memory.claim([group.host.resident], "parameters")


def _claim_gradients(memory: HeldMemory, *parameters: torch.Tensor) -> None:
    memory.claim((each.grad for each in parameters if each.grad is not None), "gradients")


_RECEIVES = {"F": "RF", "B": "RB", "I": "RB"}
_FEW = 3  # microbatches that are run: the first, one that stands for all between, and the last


def record_stages(
    config: Config,
    *,
    ranks: int,
    rank: int = 0,
    node_ranks: int | None = None,
    is_whole: bool = False,
    calls: KnownCalls | None = None,
) -> tuple[Program, ...]:
    """Runs the ranks that ``rank`` exchanges activations with, one of each stage, on meta tensors; returns their steps.

    ``node_ranks`` ranks share a host; None: all. Of many microbatches three are run, or with ``is_whole`` each of them.
    ``calls`` are what is known of operators from other recordings. Raises UsageError for a model that cannot be traced
    or does not fit its data, and for what has no price.
    """
    return _Recording(config, _layout_of(config, ranks, node_ranks), calls).stages(rank, is_whole=is_whole)


class _Recording:
    def __init__(self, config: Config, layout: Layout, calls: KnownCalls | None) -> None:
        self._config, self._layout = config, layout
        self._world = DryWorld(layout.ranks, "cpu" if config.parallel.device == "cpu" else "cuda")
        self._calls = KnownCalls() if calls is None else calls
        self._data = few_data(config)

    def stages(self, rank: int, *, is_whole: bool = False) -> tuple[Program, ...]:
        """Runs the ranks that pass their results to one another, one a stage: those of ``rank``."""
        ranks, width = self._layout.ranks, self._layout.ranks // self._layout.pipeline
        check_peer("a dry run of", rank, ranks)
        first = rank % width
        if first and width < ranks:  # rank 0 tells all where the model is cut
            self.program(0)
        return tuple(self.program(number, is_whole=is_whole) for number in range(first, ranks, width))

    def program(self, rank: int, *, is_whole: bool = False) -> Program:
        config, layout, world = self._config, self._layout, self._world
        recorder, is_device = Recorder(self._calls), config.parallel.device != "cpu"
        recorder.functions = MetaFunctions(
            recorder.attention,
            precision_named(layout.precision).autocast_dtype,
            on_gpu=is_device,
            pools_in_bytes=is_device and layout.is_compiled,
        )
        comm = world.rank(rank, recorder)
        model = empty_model(config, self._data)
        recorder.watch(model_blocks(model))
        if not layout.sharing.gradients:  # else whole gradients are there for a moment only
            claim = functools.partial(_claim_gradients, recorder.memory)
            for parameter in [each for each in model.parameters() if each.requires_grad]:
                parameter.register_post_accumulate_grad_hook(claim)  # type: ignore[no-untyped-call]
        with self._telling(model), _without_collections(), recorder, recorder.functions:
            parts = build_parts(config, layout, model, self._data, comm, recorder.memory)
            if layout.is_compiled and isinstance(parts.loss, CrossEntropy):
                parts.loss.sum = recorder.watched(LOSS, parts.loss.sum)
            tell_inputs(recorder.values, parts, self._data)
            claim_states(recorder.memory, parts)
            held = (*parts.engine.parameters(), *parts.engine.module.parameters())
            parts.optimizer.register_step_pre_hook(lambda *_: _claim_gradients(recorder.memory, *held))
            recorder.memory.leave_out()  # stages of others, and what was tried to find where to cut the model
            recorder.rests = True  # these steps teach; ddp makes buckets in both
            for _ in range(2 if layout.strategy == "ddp" else 1):
                _run(recorder, parts, 1)
            recorder.rests = False
            done, order = _recorded(recorder, parts, rank, is_whole=is_whole)
        return self._described(rank, parts, done, order)

    @contextlib.contextmanager
    def _telling(self, model: nn.Module) -> Iterator[None]:
        try:
            yield
        except PacelineError:
            raise
        except Exception as error:
            place = raised_at(error, model) if is_users(self._config) else None
            if place is None:
                raise
            if needs_values(error) or self._config.model.kind == "hf":  # whose code the user does not mend
                raise no_answer(f"{type(error).__name__}: {first_line(error)}", place) from error
            made = made_at(self._config)
            raise misfit(error, "the model cannot be traced", self._data, place, made=made) from error

    def _described(self, rank: int, parts: StepPieces, done: Recorded, order: tuple[Turn, ...]) -> Program:
        config, layout = self._config, self._layout
        precision = precision_named(layout.precision)
        samples = layout.microbatch * layout.accumulate * layout.data
        graphs: Literal["off", "auto", "on"] = "on" if config.train.cuda_graphs is True else "auto"
        is_short = graphs == "auto" and (config.train.steps or FIRST_REPLAY) < FIRST_REPLAY
        problem = graph_problem(config, layout, self._world.device_kind, parts.loss)
        if config.train.cuda_graphs is False or is_short or problem:
            graphs = "off"
        # Three times what forward takes.
        forward = sum(
            times * event.operation.flops
            for event, times in counted(done.events, order)
            if isinstance(event, Run) and event.operation.phase == "forward"
        )
        return Program(
            name=config.name,
            rank=rank,
            ranks=layout.ranks,
            strategy=layout.strategy,
            events=done.events,
            resident=done.resident,
            samples=samples,
            elements=samples * (parts.loss.elements_per_sample or 1.0),
            element="tokens" if self._data.shape.kind == "tokens" else "samples",
            model_flops=3.0 * forward,
            dtype=dtype_name(precision.autocast_dtype or precision.param_dtype or torch.float32),
            is_compiled=layout.is_compiled,
            graphs=graphs,
            stage=rank * layout.pipeline // layout.ranks,
            stages=layout.pipeline,
            order=order,
        )


def _recorded(recorder: Recorder, parts: StepPieces, rank: int, *, is_whole: bool) -> tuple[Recorded, tuple[Turn, ...]]:
    """Runs a step; returns its events, or those of one with few microbatches and the order in which they come again."""
    pipeline, count = parts.engine.pipeline, len(parts.batch.microbatches)
    few = count if is_whole else _enough_microbatches(pipeline, count)
    done = _run(recorder, parts, few)
    if host := recorder.memory.host_storages:  # an engine that offloads: what the host does itself
        events, starts = mark_host_work(done.events, host, recorder.places(), rank)
        done = replace(done, events=events, laps=tuple(starts[lap] for lap in done.laps))
    if few == count:
        return done, ()
    if pipeline is None:  # forward and backward of the second microbatch are between the second and the fourth lap
        return replace(done, events=repeat(done.events, done.laps[1], done.laps[3], 1 + count - few)), ()
    marked: list[Event] = []  # a mark before the events of each action
    actions = pipeline.program(few).actions
    for number, (begin, end) in enumerate(pairwise((*done.acts, len(done.events)))):
        action = actions[number] if number < len(actions) else None
        mark = EventMark(END, 0, 0) if action is None else EventMark(action.kind, action.stage, action.microbatch)
        marked += (mark, *done.events[begin:end])
    order = _order_of(pipeline.program(count), few)
    if order and not is_playable(marked, order):
        return replace(done, events=_run(recorder, parts, count).events), ()  # pipelines offload nothing
    return replace(done, events=tuple(marked)), order


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


def _run(recorder: Recorder, parts: StepPieces, microbatches: int) -> Recorded:
    batch = replace(parts.batch, microbatches=parts.batch.microbatches[:microbatches])
    pipeline = parts.engine.pipeline
    if pipeline is not None:
        pipeline.journal = []
        recorder.memory.act = lambda: len(pipeline.journal)
    recorder.start()

    callbacks = StepCallbacks(recorder.lap)
    train_step(parts.engine, parts.optimizer, batch, parts.loss, parts.policy, callbacks, parts.scaler)
    if parts.average is not None:
        parts.average.update()
    claim_states(recorder.memory, parts)
    return recorder.finish()


def _layout_of(config: Config, ranks: int, node_ranks: int | None) -> Layout:
    problem = ""
    if config.parallel.strategy == "auto":
        problem += "parallel.strategy = auto in a dry run\n  it runs one strategy\n"
        problem += "  name it, or let paceline plan find the fastest\n"
    if config.comm.compression.policy == "threshold":
        problem += "comm.compression.policy = threshold in a dry run\n"
        problem += "  how much it sends follows from values, and a dry run has none\n"
        problem += "  take topk with the ratio that you expect, or paceline simulate, which has values\n"
    if problem:
        raise UsageError(problem.rstrip())
    return layout_of(config, ranks, node_ranks)


def _enough_microbatches(pipeline: Pipeline | None, wanted: int) -> int:
    """Returns how many microbatches are run where so many are wanted: all, if few do not tell of the others."""
    if pipeline is None:
        return min(wanted, _FEW)
    ranks = pipeline.pipe.size
    if pipeline.splits_backward and len(pipeline.placement) > ranks:  # what zb-v gathers differs by microbatch
        return wanted
    for few in (_FEW, -(-_FEW // ranks) * ranks):  # interleaved schedules take whole rounds
        if few < wanted and _is_plain(pipeline, few) and _is_plain(pipeline, wanted):
            return few
    return wanted


def _order_of(program: RankProgram, few: int) -> tuple[Turn, ...]:
    most = max(action.microbatch for action in program.actions)
    arrived: Mapping[Action, Sequence[Action]] = program.released
    found = []
    for action in program.actions:
        number = action.microbatch
        if action.kind == "R":  # the engine reduced with the backward before it
            continue
        like = 0 if number == 0 else few - 1 if number == most else 1
        receive = _RECEIVES.get(action.kind)
        sends = () if receive is None else arrived.get(Action(receive, action.stage, number), ())  # type: ignore[arg-type]
        messages = tuple((send.kind, send.stage, send.microbatch) for send in sends)
        found.append(Turn(action.kind, action.stage, number, like, messages))
    return tuple(found)


def _is_plain(pipeline: Pipeline, microbatches: int) -> bool:
    """Whether the first microbatch is the first in every pass of a schedule, and the last one the last to go back."""
    try:
        program = pipeline.program(microbatches)
    except UsageError:  # a schedule of the user's own is for one number of them
        return False
    first: dict[tuple[str, int], int] = {}
    for action in program.actions:
        if action.kind != "R":
            first.setdefault((action.kind, action.stage), action.microbatch)
    return not any(first.values()) and all(each == microbatches - 1 for each in program.reducing.values())


def with_fitting_microbatch(config: Config, cluster: Cluster, *, ranks: int, rank: int = 0) -> Config:
    """Returns a config with the largest microbatch that leaves some memory free, as a run's own search does."""
    if config.train.microbatch != "auto":
        return config
    calls = KnownCalls()
    layout = _layout_of(config, ranks, min(ranks, cluster.node.devices))
    samples = layout.microbatch * layout.accumulate

    def is_too_large(size: int) -> bool:
        smaller = replace(layout, microbatch=size, accumulate=samples // size)
        return replay(_Recording(config, smaller, calls).stages(rank), cluster).total_memory > budget_of(cluster)

    sizes = divisors(samples)
    found = sizes[max(0, bisect.bisect_left(sizes, True, key=is_too_large) - 1)]
    return config.with_values("train", microbatch=found)
