"""Checks of lessons 4 to 6: ZeRO, FSDP, and tensor parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from paceline.cluster.costs import Placement, Wire, Wires, scatter_seconds, sent_bytes
from paceline.cluster.devices import load_cluster
from paceline.comm.base import ReduceOp, Work
from paceline.config.sections import GPT_SIZES
from paceline.engines.apply import parallelize
from paceline.learn.exercise import RIGHT, Said, judge_first, judge_number, says
from paceline.learn.lessons_1_to_3 import CountingCommunicator, all_close, compare, run_counted, shown_calls
from paceline.plan.layout import Layout, Strategy
from paceline.plan.workload import Running, Workload
from paceline.predict.formulas.block import BlockModel
from paceline.predict.formulas.constants import constants_for, fitted_constants
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory

# Lesson 4: where memory goes, and ZeRO.

_GB = 1e9
_STATE_RANKS = 8
_LADDER: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp")


def state_bytes(parameters: int, strategy: Strategy, ranks: int) -> int:
    """Returns the bytes of parameters, gradients and moments on one rank: AdamW in fp32."""
    model = ModelFacts(blocks=(), root=BlockFacts(parameters=parameters))
    need = estimate_memory(model, Layout(strategy=strategy).for_ranks(ranks), StateFacts())
    return int(need.parameters + need.gradients + need.optimizer)


def check_states(answer: float) -> Said:
    parameters = 3_000_000_000
    needs: dict[str, float] = {name: state_bytes(parameters, name, _STATE_RANKS) / _GB for name in _LADDER}
    truth, kind = needs.pop("zero1"), 4 * parameters / _GB
    mistakes = {**needs, "numbers": truth / 4, "one_kind": truth - kind, "no_slice": 2 * kind}
    mistakes |= {"one_moment": truth - kind / _STATE_RANKS, "gib": truth * _GB / 2**30, "bytes": truth * _GB}
    return judge_number(answer, truth, mistakes, tolerance=0.005)


def check_step(function: Any) -> Said:
    """Runs the reader's step on four and three ranks: the parameters, then the operations."""
    before = torch.arange(24, dtype=torch.float64).sin()
    for ranks in (4, 3):
        gradients = [torch.arange(24, dtype=torch.float64).add(7 * rank).cos() for rank in range(ranks)]

        def work(comm: Any, own: list[torch.Tensor] = gradients) -> Any:
            return function(comm, before.clone(), own[comm.rank].clone(), 0.1)

        found = run_counted(work, ranks)
        mean = sum(gradients[1:], gradients[0]) / ranks
        usual = {
            "sum": before - 0.1 * ranks * mean,
            "unchanged": before,
            "uphill": before + 0.1 * mean,
            "own": before - 0.1 * torch.cat([each.chunk(ranks)[rank] for rank, each in enumerate(gradients)]),
        }
        if said := compare(found.results, before - 0.1 * mean, usual):
            return said
        calls = found.comms[0].calls
        if calls.get("all_reduce"):
            return says("all_reduce")
        if calls != {"reduce_scatter": 1, "all_gather": 1}:
            return says("calls", called=shown_calls(calls))
    return RIGHT


def check_strategy(answer: str) -> Said:
    activations, device = 30, 80  # GB
    needs: dict[str, float] = {}
    for name in _LADDER:
        needs[name] = state_bytes(7_000_000_000, name, _STATE_RANKS) / _GB + activations
    return judge_first(answer, needs, device, device=device)


# Lesson 5: FSDP, the life of a unit.

_SHAPE, _ROWS = (6, 4), 5


@cache
def count_gathers(blocks: int, microbatches: int) -> int:
    """Returns how many all-gathers a rank takes part in during one step of the engine, on two virtual ranks."""

    def work(comm: CountingCommunicator) -> None:
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))
        model = nn.Sequential(nn.Linear(2, 4, bias=False), layers)  # the first layer is the root's
        engine = parallelize(model, comm, "fsdp", units=tuple(f"1.{number}" for number in range(blocks)))
        for _ in range(2):  # the first step learns the order
            comm.trace.num_operations.clear()
            for number in range(microbatches):
                is_last = number == microbatches - 1
                with contextlib.nullcontext() if is_last else engine.no_sync():
                    engine(torch.ones(1, 2)).sum().backward()

    return run_counted(work, ranks=2).comms[0].calls["all_gather"]


def check_gathers(answer: float) -> Said:
    blocks, count = 10, 3
    truth, units = count_gathers(blocks, count), blocks + 1
    mistakes = {"twice": 2 * units * count, "one_more": (2 * units - 1) * count, "one_microbatch": 2 * blocks}
    mistakes |= {"forward": units * count, "one_forward": units, "kept": blocks + blocks * count}
    mistakes |= {"one_unit_once": truth - (count - 1), "one_less": truth - count}
    return judge_number(answer, truth, mistakes, tolerance=1e-6)


class _Called(NamedTuple):
    """What the reader's function gave on one rank: output, gradients, and operations in forward and in all."""

    output: Any
    of_x: torch.Tensor | None
    of_slice: torch.Tensor | None
    forward: dict[str, int]
    both: dict[str, int]


def check_linear(function: Any) -> Said:
    """Runs the reader's layer on two and four ranks: output, gradients, then the operations."""
    weight = torch.arange(24, dtype=torch.float64).sin().view(_SHAPE)
    for ranks in (2, 4):
        inputs = [torch.arange(20, dtype=torch.float64).add(3 * rank).cos().view(_ROWS, 4) for rank in range(ranks)]

        def work(comm: CountingCommunicator, own: Sequence[torch.Tensor] = inputs) -> _Called:
            mine = weight.flatten().chunk(comm.size)[comm.rank].clone().requires_grad_()
            x = own[comm.rank].clone().requires_grad_()
            output, forward = function(comm, x, mine, _SHAPE), comm.calls
            if getattr(output, "requires_grad", False):
                output.square().sum().backward()
            return _Called(output, x.grad, mine.grad, forward, comm.calls)

        called = run_counted(work, ranks).results
        passes = (_pass_wrong(each, weight, inputs[rank], rank) for rank, each in enumerate(called))
        own = [2 * (x @ weight.T).T @ x for x in inputs]
        if said := next(filter(None, passes), None) or _slices_wrong(called, own) or _calls_wrong(called[0]):
            return said
    return RIGHT


def _pass_wrong(called: _Called, weight: torch.Tensor, inputs: torch.Tensor, rank: int) -> Said | None:
    """Says what is wrong with the output of a rank, and with the gradient of x; None if nothing is."""
    x, output = inputs.clone().requires_grad_(), called.output
    expected = x @ weight.T
    is_tensor = isinstance(output, torch.Tensor)
    if not is_tensor or output.shape != expected.shape:
        shape = tuple(output.shape) if is_tensor else type(output).__name__
        return says("shape", rank=rank, shape=shape, given=(_ROWS, 4), expected=tuple(expected.shape))
    if not torch.allclose(output, expected.detach()):
        return says("output")
    if called.of_x is None:
        return says("no_gradient_of_x")
    (of_x,) = torch.autograd.grad(expected.square().sum(), x)
    return None if torch.allclose(called.of_x, of_x) else says("gradient_of_x")


def _slices_wrong(called: Sequence[_Called], own: Sequence[torch.Tensor]) -> Said | None:
    """Says what is wrong with the gradients of the slices; ``own`` are those of each rank's samples, whole."""
    ranks, total = len(called), sum(own[1:], own[0])
    given = [each.of_slice for each in called if each.of_slice is not None]
    if len(given) < ranks:
        return says("no_gradient")

    def is_given(wholes: Sequence[torch.Tensor]) -> bool:
        slices = [whole.flatten().chunk(ranks)[rank] for rank, whole in enumerate(wholes)]
        return all(map(torch.allclose, given, slices))

    if is_given([total / ranks] * ranks):
        return None
    if is_given([total] * ranks):
        return says("sum", ranks=ranks)
    return says("own" if is_given(own) else "gradient")


def _calls_wrong(called: _Called) -> Said | None:
    if called.both.get("all_gather") == 1:
        return says("kept")
    if called.forward != {"all_gather": 1} or called.both != {"all_gather": 2, "reduce_scatter": 1}:
        return says("calls", called=shown_calls(called.both))
    return None


def tokens_to_hide(element_bytes: float, flops: float, bandwidth: float, ranks: int) -> float:
    """Returns the tokens from which forward takes as long as the gather of the next unit: a ring without latency."""
    unit = 1e6  # parameters; it cancels
    wires = Wires(inside=Wire(alpha_s=0.0, bandwidth=bandwidth))
    gather = scatter_seconds("ring", element_bytes * unit, Placement(ranks=ranks), wires)
    return gather * flops / (2 * unit)


def check_tokens(answer: float) -> Said:
    ranks = 64
    truth = tokens_to_hide(2, 400e12, 50e9, ranks)
    mistakes = {"own_slice": truth * ranks / (ranks - 1), "twice": 2 * truth, "half": truth / 2, "backward": truth / 3}
    mistakes |= {"one_nth": truth / ranks, "all_ranks": truth * ranks, "bits": 8 * truth}
    return judge_number(answer, truth, mistakes, tolerance=0.002)


# Lesson 6: tensor and sequence parallelism.

_DEGREES = (1, 2, 4, 8)


def block_bytes(ranks: int, stream_bytes: int) -> float:
    """Returns what one rank sends for a block in forward and backward: four all-reduces of the stream."""
    return 4 * sent_bytes("ring", stream_bytes, Placement(ranks=ranks), rank=0)


def check_bytes(answer: float) -> Said:
    ranks, stream = 4, 2 * 2048 * 4096 * 2  # samples, tokens, width, bytes of an element
    truth = block_bytes(ranks, stream)
    mistakes = {"half": truth / 2, "one": truth / 4, "stream": stream, "own_part": 8 * stream, "once_each": 4 * stream}
    mistakes |= {"twice": 2 * truth, "all_ranks": truth * ranks, "mib": truth / 2**20, "mb": truth / 1e6}
    return judge_number(answer, truth, mistakes, tolerance=0.002)


def check_mlp(function: Any) -> Said:
    """Runs the reader's MLP on two and four ranks: the output, then what was summed."""
    parts = [torch.arange(count, dtype=torch.float64).mul(step).sin() for count, step in ((12, 1), (32, 2), (32, 3))]
    x, up, down = parts[0].view(3, 4), parts[1].view(8, 4), parts[2].view(4, 8)
    bias = torch.arange(4, dtype=torch.float64).add(1)
    product = F.gelu(x @ up.T) @ down.T
    summands: dict[int, torch.Tensor] = {}

    class Keeping(CountingCommunicator):
        """Keeps what its rank brings to the first all-reduce."""

        def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
            summands.setdefault(self.rank, tensor.detach().clone())
            return super().all_reduce(tensor, op)

    def work(comm: Any) -> Any:
        return function(comm, x.clone(), up.clone(), down.clone(), bias.clone())

    for ranks in (2, 4):
        summands.clear()
        found = run_counted(work, ranks, Keeping)
        usual = {
            "biases": product + ranks * bias,
            "no_bias": product,
            "averaged": product / ranks + bias,
            "whole_and_summed": ranks * product + bias,
        }
        said = compare(found.results, product + bias, usual) or _sums_wrong(found.comms[0], product.nbytes)
        if said is not None:
            return said
        if all_close(list(summands.values()), summands[0]):
            return says("whole")
    return RIGHT


def _sums_wrong(first: CountingCommunicator, expected: int) -> Said | None:
    """Says what is wrong with what the first rank sent: one sum of ``expected`` bytes is enough."""
    if not first.calls:
        return says("nothing_sent")
    if first.calls != {"all_reduce": 1}:
        return says("calls", called=shown_calls(first.calls))
    if (sent := first.trace.num_bytes["all_reduce"]) != expected:
        return says("bytes", sent=sent, expected=expected)
    return None


@cache
def block_seconds(cluster_name: str, size: str, tensor: int, tokens: int) -> tuple[float, float]:
    """Returns what one block computes and waits in a step, in seconds: one of ``tensor`` ranks, one sequence."""
    cluster = load_cluster(cluster_name)
    workload = Workload(
        model=replace(GPT_SIZES[size], vocab_size=32000),
        layout=Layout(tensor=tensor).for_ranks(tensor),
        run=Running(seq_len=tokens, compute="bf16"),
    )
    constants, _ = constants_for(fitted_constants(), cluster.device.generation, "eager")
    costs = BlockModel(workload, cluster, constants).costs()
    both = costs.forward + costs.backward
    return both.device, both.wait


def check_degree(answer: float) -> Said:
    """Compares with what the formulas say of each number of ranks."""
    if answer not in _DEGREES:
        return says("unknown", answer=answer, known=", ".join(map(str, _DEGREES)))
    times = {each: block_seconds("1x dgx-a100", "gpt-1.1b", each, 1024) for each in _DEGREES}
    paying = [each for each, (device, wait) in times.items() if wait < device]
    degree = int(answer)
    device, wait = times[degree]
    name = "too_many" if degree not in paying else "right" if degree == paying[-1] else "too_few"
    return says(name, degree=degree, device=device * 1e3, wait=wait * 1e3)


CHECKS = {
    "4.1": check_states,
    "4.2": check_step,
    "4.3": check_strategy,
    "5.1": check_gathers,
    "5.2": check_linear,
    "5.3": check_tokens,
    "6.1": check_bytes,
    "6.2": check_mlp,
    "6.3": check_degree,
}
