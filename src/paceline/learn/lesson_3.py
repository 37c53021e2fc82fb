"""The exercises of lesson 3: gradients averaged in one all-reduce, their bytes, and the tokens that hide them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.cluster.costs import Placement, Wire, sent_bytes
from paceline.learn.counted import run_counted
from paceline.learn.exercise import Exercise, Verdict, right, wrong

_RANKS = 4
_PARAMETERS, _REPLICAS = 1_000_000_000, 16
_FLOPS, _RING_RATE, _GPUS = 400e12, 50e9, 64
_CLOSE = 0.005  # a rounded answer is right


def check_average(function: Callable[[nn.Module, Any], Any]) -> Verdict:
    """Runs the reader's function on four ranks: with all gradients there, and with one missing on two of them."""
    for some_missing in (False, True):

        def work(comm: Any, is_missing: bool = some_missing) -> list[torch.Tensor | None]:
            model = _model_with_gradients(comm.rank, is_missing)
            function(model, comm)
            return [parameter.grad for parameter in model.parameters()]

        found = run_counted(work, _RANKS)
        words = _averages_wrong(found.results, some_missing)
        if words:
            return wrong(words)
        others = found.operations - {"all_reduce"}
        if others or max(found.calls("all_reduce")) > 1:
            called = ", ".join(sorted(others)) or f"all_reduce {max(found.calls('all_reduce'))} times"
            return wrong(f"The means are right, but your function calls {called}. One all_reduce for all is asked for.")
    return right("One large message pays the latency once. That is what a bucket of the engine is.")


def _model_with_gradients(rank: int, is_missing: bool) -> nn.Module:
    """Returns a model whose gradients are known; with ``is_missing``, ranks 1 and 3 have none for the bias."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    model.weight.grad = torch.arange(6.0, dtype=torch.float64).view(2, 3) + 10 * rank
    model.bias.grad = None if is_missing and rank % 2 else torch.full((2,), 1.0 + rank, dtype=torch.float64)
    return model


def _averages_wrong(results: list[list[torch.Tensor | None]], is_missing: bool) -> str:
    """Says what is wrong with the gradients that the function left; "" if nothing is."""
    models = [_model_with_gradients(rank, is_missing) for rank in range(_RANKS)]
    names = [name for name, _ in models[0].named_parameters()]
    gradients = [[_or_zeros(parameter) for parameter in model.parameters()] for model in models]
    sums = [torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)]
    for rank, found in enumerate(results):
        for name, gradient, total, own in zip(names, found, sums, gradients[rank], strict=True):
            if words := _gradient_wrong(gradient, total, own):
                return f"On rank {rank} of {_RANKS}, {name}.grad {words}"
    return ""


def _gradient_wrong(gradient: torch.Tensor | None, total: torch.Tensor, own: torch.Tensor) -> str:
    if gradient is None:
        return "is None, and other ranks have a gradient for it: it counts as zeros there, and the mean belongs to all."
    if gradient.shape != total.shape:
        return f"has shape {tuple(gradient.shape)}, and the parameter has {tuple(total.shape)}: reshape what goes back."
    if torch.allclose(gradient, total / _RANKS):
        return ""
    if torch.allclose(gradient, total):
        return "is the sum over the ranks: it is N times too large. The mean is asked for."
    if torch.allclose(gradient, own):
        return "is what it was before: copy the mean back into the gradient, and wait for the all-reduce first."
    if torch.allclose(gradient, total / _RANKS**2):
        return 'is the mean divided by N once more: the operation "avg" divides already.'
    return "is not the mean over the ranks. Does each part go back to the parameter that it came from?"


def _or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter.detach()) if parameter.grad is None else parameter.grad


def check_gradient_bytes(answer: float) -> Verdict:
    """Compares with the bytes of a ring over gradients of 2 bytes."""
    num_bytes = 2 * _PARAMETERS
    truth = sent_bytes("ring", num_bytes, Placement(ranks=_REPLICAS), 0)
    if answer == truth:
        return right("The number of tokens does not matter: a larger batch sends no more bytes.")
    if answer == truth / 2:
        return wrong(
            "That is off by a factor of 2. Is it the number of elements? A bf16 has 2 bytes. "
            "Or half of an all-reduce? It adds first, and then spreads the sums."
        )
    if answer == truth * 2:
        return wrong("That is off by a factor of 2: it fits gradients in float32.")
    if answer == 2 * num_bytes:
        return wrong("That is 2 M. A rank keeps one slice of N, which it does not send: use N-1.")
    if answer == truth * _REPLICAS:
        return wrong("That is what all ranks send together.")
    if answer == num_bytes:
        return wrong("That is M, the size of the gradients. How much of it does a rank send, and how often?")
    if answer in (truth / 1e9, truth / 1e6):
        return wrong("That looks like gigabytes or megabytes. Give bytes.")
    return wrong("Take M = 2 P bytes, and the bytes that a rank of a ring sends for M.")


def check_tokens(answer: float) -> Verdict:
    """Compares with the tokens whose backward takes as long as a ring over gradients in bf16."""
    sent = sent_bytes("ring", 2 * _PARAMETERS, Placement(ranks=_GPUS), 0)
    seconds = Wire(alpha_s=0.0, bandwidth=_RING_RATE).seconds(sent)
    truth = seconds * _FLOPS / (4 * _PARAMETERS)

    def is_near(value: float) -> bool:
        return abs(answer - value) <= _CLOSE * value

    if is_near(truth):
        return right("With fewer tokens a rank, every step waits for the network, whatever the size of the model.")
    if is_near(_FLOPS / _RING_RATE):
        return wrong("You are close: a rank of a ring sends 2 M (N-1)/N bytes, and not 2 M.")
    if is_near(truth * 2):
        return wrong("That is twice too much. Gradients in bf16 have g = 2, and backward takes 4 P FLOPs a token.")
    if is_near(truth / 2):
        return wrong("That is half of it. An all-reduce sends 2 M (N-1)/N bytes: it goes round twice.")
    if is_near(truth * 4 / 6):
        return wrong("You counted forward and backward, 6 P FLOPs a token. Gradients exist only in backward, 4 P.")
    if is_near(truth * _GPUS):
        return wrong("That is the number of tokens of all ranks together. How many does each have?")
    if any(is_near(truth * 1000.0**power) for power in (-2, -1, 1, 2)):
        return wrong("Look at the units: a TFLOP/s is 1e12 FLOP a second, and a GB/s is 1e9 bytes a second.")
    return wrong("Put the times equal: 2 g P (N-1) / (N W) for the all-reduce, and 4 P (T / N) / F_r for backward.")


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="3.1",
        title="All gradients in one all-reduce",
        asks=(
            "Write average_gradients(model, comm) with one all-reduce for all parameters. Afterwards every "
            "parameter.grad holds the mean over the ranks. A gradient that is None on some ranks counts as zeros there."
        ),
        answer="function",
        function="average_gradients",
        hints=(
            "torch.cat joins flattened gradients into one tensor; where a gradient is None, put zeros_like(parameter).",
            'comm.all_reduce(flat, "avg").wait() leaves the mean in the flat tensor.',
            "flat.split([p.numel() for p in model.parameters()]) gives the parts: p.grad = part.view_as(p).clone().",
        ),
        check=check_average,
    ),
    Exercise(
        number="3.2",
        title="The bytes of a step",
        asks=(
            "A model has 1,000,000,000 parameters, and its gradients are in bf16. 16 ranks all-reduce them in a ring. "
            "How many bytes does each rank send in a step?"
        ),
        answer="number",
        hints=("M is 2 P bytes in bf16.", "A rank of a ring sends 2 M (N-1)/N bytes for an all-reduce of M bytes."),
        check=check_gradient_bytes,
    ),
    Exercise(
        number="3.3",
        title="Enough tokens",
        asks=(
            "On a cluster of 64 GPUs, matrix products reach F_r = 400 TFLOP/s, and a ring moves W = 50 GB/s. "
            "Gradients are in bf16. How many tokens must each rank have in a step, so that the all-reduce takes no "
            "longer than backward?"
        ),
        answer="number",
        hints=(
            "Use the inequality of 'When it stops paying' with g = 2.",
            "T / N >= g F_r (N-1) / (2 N W), with F_r = 400e12 and W = 50e9.",
        ),
        check=check_tokens,
    ),
)
