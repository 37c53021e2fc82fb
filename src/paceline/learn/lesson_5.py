"""The exercises of lesson 5: FSDP, the life of a unit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.cluster.costs import Placement, Wire, Wires, scatter_seconds
from paceline.learn.exercise import Exercise, Verdict, right, wrong
from paceline.learn.number_answers import Mistake, judge_number

if TYPE_CHECKING:
    import torch

    from paceline.comm.base import Communicator

# 5.1
_BLOCKS, _MICROBATCHES = 10, 3
# 5.2
_SHAPE, _ROWS = (6, 4), 5
# 5.3
_FLOPS, _BANDWIDTH, _RANKS, _ELEMENT_BYTES = 400e12, 50e9, 64, 2


@cache
def count_gathers(blocks: int, microbatches: int) -> int:
    """Returns how many all-gathers a rank takes part in during one step of the engine, on two virtual ranks."""
    import torch
    from torch import nn

    from paceline.comm.traced import Trace, TracedCommunicator
    from paceline.comm.virtual.communicator import run_virtual
    from paceline.engines.apply import parallelize

    def work(comm: Communicator) -> int:
        trace = Trace(comm.device)
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks)))
        model = nn.Sequential(nn.Linear(2, 4, bias=False), layers)  # the first layer is the root's
        units = tuple(f"1.{number}" for number in range(blocks))
        engine = parallelize(model, TracedCommunicator(comm, trace), "fsdp", units=units)
        for _ in range(2):  # the first step learns the order
            trace.num_operations.clear()
            for number in range(microbatches):
                is_last = number == microbatches - 1
                with contextlib.nullcontext() if is_last else engine.no_sync():
                    engine(torch.ones(1, 2)).sum().backward()
        return trace.num_operations["all_gather"]

    return run_virtual(work, ranks=2)[0]


def _check_gathers(answer: Any) -> Verdict:
    truth = count_gathers(_BLOCKS, _MICROBATCHES)
    units = _BLOCKS + 1
    mistakes = [
        Mistake(
            value=2 * units * _MICROBATCHES,
            words="You gather every unit twice: two of them are still whole when backward begins.",
        ),
        Mistake(
            value=(2 * units - 1) * _MICROBATCHES,
            words="One gather too many in each microbatch: when backward begins, the root and one more unit are whole.",
        ),
        Mistake(value=2 * _BLOCKS, words="That is one microbatch: every microbatch gathers again."),
        Mistake(
            value=units * _MICROBATCHES,
            words="That is forward alone: units that were freed are gathered again in backward.",
        ),
        Mistake(value=units, words="That is the forward of one microbatch."),
        Mistake(
            value=_BLOCKS + _BLOCKS * _MICROBATCHES,
            words="Parameters are freed after each microbatch, so that the next forward gathers them again.",
        ),
        Mistake(
            value=truth - (_MICROBATCHES - 1),
            words="You gather one unit once for the whole step: each microbatch ends with all units freed.",
        ),
        Mistake(value=truth - _MICROBATCHES, words="One gather too few in each microbatch: did you count the root?"),
    ]
    praise = "The root and the last block stay whole between forward and backward, in each microbatch."
    return judge_number(answer, truth, mistakes, praise=praise, tolerance=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Called:
    """What the reader's function gave on one rank: output, gradients, and operations in forward and in all."""

    output: Any
    of_x: torch.Tensor | None
    of_slice: torch.Tensor | None
    forward: dict[str, int]
    both: dict[str, int]


def _check_linear(function: Any) -> Verdict:
    for ranks in (2, 4):
        verdict = _check_linear_on(function, ranks)
        if not verdict.is_right:
            return verdict
    return right(
        "You gather before each use and free in between, and each rank has the mean gradient of its slice. FSDP "
        "does this for all parameters of a unit in one flat buffer."
    )


def _check_linear_on(function: Any, ranks: int) -> Verdict:
    import torch

    from paceline.comm.virtual.communicator import run_virtual

    weight = torch.arange(24, dtype=torch.float64).sin().view(_SHAPE)
    inputs = [torch.arange(20, dtype=torch.float64).add(3 * rank).cos().view(_ROWS, 4) for rank in range(ranks)]
    called = run_virtual(lambda comm: _call(function, comm, weight, inputs[comm.rank]), ranks)
    for rank, each in enumerate(called):
        x = inputs[rank].clone().requires_grad_()
        expected = x @ weight.T
        (of_x,) = torch.autograd.grad(expected.square().sum(), x)
        verdict = _judge_output(each, expected, rank) or _judge_input(each, of_x)
        if verdict is not None:
            return verdict
    own = [2 * (x @ weight.T).T @ x for x in inputs]
    return _judge_slices(called, own) or _judge_gathers(called[0])


def _call(function: Any, comm: Communicator, weight: torch.Tensor, x: torch.Tensor) -> _Called:
    from paceline.comm.traced import Trace, TracedCommunicator

    trace = Trace(comm.device)
    mine = weight.flatten().chunk(comm.size)[comm.rank].clone().requires_grad_()
    x = x.clone().requires_grad_()
    output = function(TracedCommunicator(comm, trace), x, mine, _SHAPE)
    forward = dict(trace.num_operations)
    if getattr(output, "requires_grad", False):
        output.square().sum().backward()
    return _Called(output=output, of_x=x.grad, of_slice=mine.grad, forward=forward, both=dict(trace.num_operations))


def _judge_output(called: _Called, expected: torch.Tensor, rank: int) -> Verdict | None:
    import torch

    output = called.output
    if not isinstance(output, torch.Tensor) or output.shape != expected.shape:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        return wrong(f"Rank {rank} returned {shape} for x of {(_ROWS, 4)}: x @ weight.T is {tuple(expected.shape)}.")
    if not torch.allclose(output, expected.detach()):
        return wrong("The output is not x @ weight.T: gather all slices, then give the weight its shape.")
    return None


def _judge_input(called: _Called, expected: torch.Tensor) -> Verdict | None:
    import torch

    if called.of_x is None:
        return wrong("After backward x has no gradient: your function's backward must return one for x.")
    if not torch.allclose(called.of_x, expected):
        return wrong("The gradient of x is wrong: for y = x W^T it is the gradient of y times W, from this rank alone.")
    return None


def _judge_slices(called: list[_Called], own: list[torch.Tensor]) -> Verdict | None:
    ranks = len(called)
    total = sum(own[1:], own[0])
    if any(each.of_slice is None for each in called):
        return wrong(
            "After backward the slice has no gradient. Autograd does not see through an all-gather: write a "
            "torch.autograd.Function with a backward of your own."
        )
    if _all_have(called, [total / ranks] * ranks):
        return None
    if _all_have(called, [total] * ranks):
        return wrong(f"On {ranks} ranks the slice's gradient is {ranks} times too large: take the mean, not the sum.")
    if _all_have(called, own):
        return wrong("The slice's gradient is that of this rank's samples alone: reduce-scatter the whole gradients.")
    return wrong("The slice's gradient is wrong: for y = x W^T, the weight's is the transposed gradient of y times x.")


def _all_have(called: list[_Called], wholes: list[torch.Tensor]) -> bool:
    """Whether each rank's slice has its part of the whole gradient that stands for the rank in ``wholes``."""
    import torch

    return all(
        each.of_slice is not None and torch.allclose(each.of_slice, wholes[rank].flatten().chunk(len(called))[rank])
        for rank, each in enumerate(called)
    )


def _judge_gathers(called: _Called) -> Verdict:
    if called.both.get("all_gather") == 1:
        return wrong(
            "The numbers are right, but the weight was gathered once: it stays whole from forward to backward. Save "
            "the slice, and gather again in backward."
        )
    if called.forward != {"all_gather": 1} or called.both != {"all_gather": 2, "reduce_scatter": 1}:
        operations = ", ".join(f"{count} x {kind}" for kind, count in sorted(called.both.items()))
        return wrong(f"The numbers are right, but a rank called {operations}: two gathers and one reduce-scatter do.")
    return right("")


def tokens_to_hide(element_bytes: float, flops: float, bandwidth: float, ranks: int) -> float:
    """Returns the tokens from which forward takes as long as the gather of the next unit: a ring without latency."""
    unit = 1e6  # parameters; it cancels
    wires = Wires(inside=Wire(alpha_s=0.0, bandwidth=bandwidth))
    gather = scatter_seconds("ring", element_bytes * unit, Placement(ranks=ranks), wires)
    return gather * flops / (2 * unit)


def _check_tokens(answer: Any) -> Verdict:
    truth = tokens_to_hide(_ELEMENT_BYTES, _FLOPS, _BANDWIDTH, _RANKS)
    mistakes = [
        Mistake(
            value=truth * _RANKS / (_RANKS - 1),
            words="Close: a rank has its own slice already. How many others must come?",
        ),
        Mistake(
            value=2 * truth,
            words="Twice too many: either you count 4 bytes for a parameter, or 1 FLOP for a multiply-add.",
        ),
        Mistake(value=truth / 2, words="Half of it: each parameter has 2 bytes on its way."),
        Mistake(
            value=truth / 3,
            words="You count 6 FLOPs for a parameter and token, which is forward and backward: it is forward alone.",
        ),
        Mistake(
            value=truth / _RANKS, words="You divide by N: each rank receives nearly the whole unit, not one N-th of it."
        ),
        Mistake(
            value=truth * _RANKS, words="That is for all ranks together: the exercise asks for one rank's microbatch."
        ),
        Mistake(value=8 * truth, words="Eight times too many: W is in bytes here, not in bits."),
    ]
    praise = "Neither the size of the unit nor that of the model plays a part."
    return judge_number(answer, truth, mistakes, praise=praise, tolerance=0.002)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="5.1",
        title="Count the gathers",
        asks=(
            "A model has L = 10 blocks and a root. FSDP trains it with k = 3 microbatches in a step, prefetch=1 and "
            "reshard_after_forward=True, the defaults. Each microbatch runs as the diary of the lesson shows. How many "
            "all-gathers does a rank take part in during one step (not the first)?"
        ),
        answer="number",
        hints=(
            "Count the lines of the lesson's diary for L = 3 first, forward and backward apart.",
            "Which two units are still whole when backward begins? And what happens again in the next microbatch?",
        ),
        check=_check_gathers,
    ),
    Exercise(
        number="5.2",
        title="A linear layer that is gathered",
        asks=(
            "Write sharded_linear(comm, x, mine, shape). x is a matrix (samples, inputs), each rank's own. mine is "
            "this rank's flat slice of a weight of shape (outputs, inputs). Both have requires_grad=True. Return "
            "x @ weight.T. After backward, mine.grad must be this rank's "
            "slice of the mean of the ranks' gradients, and x.grad must be right too. The whole weight must not stay "
            "in memory from forward to backward: gather it twice."
        ),
        answer="function",
        function="sharded_linear",
        hints=(
            "An all-gather is no operation of autograd. Write a torch.autograd.Function with a forward and a backward.",
            "In forward, ctx.save_for_backward(x, mine), and keep comm and shape on ctx. In backward, gather again.",
            "For y = x W^T with the gradient g of y: that of x is g W, that of W is g^T x, to reduce-scatter.",
        ),
        check=_check_linear,
    ),
    Exercise(
        number="5.3",
        title="Enough tokens",
        asks=(
            "A rank computes at F_r = 400 TFLOP/s (400 x 10**12), the link moves W = 50 GB/s (50 x 10**9 bytes/s), and "
            "N = 64 ranks gather parameters in bf16, 2 bytes each. How many tokens must a rank's microbatch have at "
            "least, so that the gathers hide behind forward? Leave latency out."
        ),
        answer="number",
        hints=(
            "Write down both times for a unit of P_u parameters: the gather moves e P_u (N-1)/N bytes for a rank.",
            "Forward multiplies and adds once for each parameter and token, which is 2 P_u b S FLOPs.",
        ),
        check=_check_tokens,
    ),
)
