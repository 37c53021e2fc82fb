"""Checks of lesson 5: FSDP, the life of a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.cluster.costs import Placement, Wire, Wires, scatter_seconds
from paceline.engines.apply import parallelize
from paceline.learn.counted import CountingCommunicator, run_counted, shown_calls
from paceline.learn.exercise import RIGHT, Said, judge_number, says

_BLOCKS, _MICROBATCHES = 10, 3  # 5.1
_SHAPE, _ROWS = (6, 4), 5  # 5.2
_FLOPS, _BANDWIDTH, _RANKS, _ELEMENT_BYTES = 400e12, 50e9, 64, 2  # 5.3


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
    truth, units = count_gathers(_BLOCKS, _MICROBATCHES), _BLOCKS + 1
    mistakes = {
        "twice": 2 * units * _MICROBATCHES,
        "one_more": (2 * units - 1) * _MICROBATCHES,
        "one_microbatch": 2 * _BLOCKS,
        "forward": units * _MICROBATCHES,
        "one_forward": units,
        "kept": _BLOCKS + _BLOCKS * _MICROBATCHES,
        "one_unit_once": truth - (_MICROBATCHES - 1),
        "one_less": truth - _MICROBATCHES,
    }
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
    truth = tokens_to_hide(_ELEMENT_BYTES, _FLOPS, _BANDWIDTH, _RANKS)
    mistakes = {
        "own_slice": truth * _RANKS / (_RANKS - 1),
        "twice": 2 * truth,
        "half": truth / 2,
        "backward": truth / 3,
        "one_nth": truth / _RANKS,
        "all_ranks": truth * _RANKS,
        "bits": 8 * truth,
    }
    return judge_number(answer, truth, mistakes, tolerance=0.002)


CHECKS = {"5.1": check_gathers, "5.2": check_linear, "5.3": check_tokens}
