"""Checks of lesson 3: gradients averaged in one all-reduce, their bytes, and the tokens that hide them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.cluster.costs import Placement, Wire, sent_bytes
from paceline.learn.counted import run_counted
from paceline.learn.exercise import RIGHT, Said, judge_number, says

_RANKS = 4
_PARAMETERS, _REPLICAS = 1_000_000_000, 16
_FLOPS, _RING_RATE, _GPUS = 400e12, 50e9, 64


def check_average(function: Callable[[nn.Module, Any], Any]) -> Said:
    """Runs the reader's function on four ranks: with all gradients there, and with one missing on two of them."""
    for some_missing in (False, True):

        def work(comm: Any, is_missing: bool = some_missing) -> list[torch.Tensor | None]:
            model = _model_with_gradients(comm.rank, is_missing)
            function(model, comm)
            return [parameter.grad for parameter in model.parameters()]

        found = run_counted(work, _RANKS)
        if said := _averages_wrong(found.results, some_missing):
            return said
        times = max(comm.calls.get("all_reduce", 0) for comm in found.comms)
        if called := found.calls_besides("all_reduce") or (f"all_reduce {times} times" if times > 1 else ""):
            return says("calls", called=called)
    return RIGHT


def _model_with_gradients(rank: int, is_missing: bool) -> nn.Module:
    """Returns a model whose gradients are known; with ``is_missing``, ranks 1 and 3 have none for the bias."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    model.weight.grad = torch.arange(6.0, dtype=torch.float64).view(2, 3) + 10 * rank
    model.bias.grad = None if is_missing and rank % 2 else torch.full((2,), 1.0 + rank, dtype=torch.float64)
    return model


def _averages_wrong(results: list[list[torch.Tensor | None]], is_missing: bool) -> Said | None:
    """Says what is wrong with the gradients that the function left; None if nothing is."""
    models = [_model_with_gradients(rank, is_missing) for rank in range(_RANKS)]
    names = [name for name, _ in models[0].named_parameters()]
    gradients = [
        [torch.zeros_like(each.detach()) if each.grad is None else each.grad for each in model.parameters()]
        for model in models
    ]
    sums = [torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)]
    for rank, found in enumerate(results):
        for name, gradient, total, own in zip(names, found, sums, gradients[rank], strict=True):
            if said := _gradient_wrong(gradient, total, own):
                return says(said.name, rank=rank, ranks=_RANKS, name=name, **said.gaps)
    return None


def _gradient_wrong(gradient: torch.Tensor | None, total: torch.Tensor, own: torch.Tensor) -> Said | None:
    if gradient is None:
        return says("none")
    if gradient.shape != total.shape:
        return says("shape", shape=tuple(gradient.shape), expected=tuple(total.shape))
    if torch.allclose(gradient, total / _RANKS):
        return None
    usual = {"sum": total, "unchanged": own, "divided_twice": total / _RANKS**2}
    return says(next((name for name, value in usual.items() if torch.allclose(gradient, value)), "otherwise"))


def check_gradient_bytes(answer: float) -> Said:
    """Compares with the bytes of a ring over gradients of 2 bytes."""
    num_bytes = 2 * _PARAMETERS
    truth = sent_bytes("ring", num_bytes, Placement(ranks=_REPLICAS), 0)
    mistakes: dict[str, float | tuple[float, ...]] = {
        "half": truth / 2,
        "twice": truth * 2,
        "own_slice": 2 * num_bytes,
        "all_ranks": truth * _REPLICAS,
        "size": num_bytes,
        "unit": (truth / 1e9, truth / 1e6),
    }
    return judge_number(answer, truth, mistakes)


def check_tokens(answer: float) -> Said:
    """Compares with the tokens whose backward takes as long as a ring over gradients in bf16."""
    sent = sent_bytes("ring", 2 * _PARAMETERS, Placement(ranks=_GPUS), 0)
    truth = Wire(alpha_s=0.0, bandwidth=_RING_RATE).seconds(sent) * _FLOPS / (4 * _PARAMETERS)
    mistakes: dict[str, float | tuple[float, ...]] = {
        "own_slice": _FLOPS / _RING_RATE,
        "twice": truth * 2,
        "half": truth / 2,
        "forward": truth * 4 / 6,
        "all_ranks": truth * _GPUS,
        "unit": tuple(truth * 1000.0**power for power in (-2, -1, 1, 2)),
    }
    return judge_number(answer, truth, mistakes, tolerance=0.005)  # a rounded answer is right


CHECKS = {"3.1": check_average, "3.2": check_gradient_bytes, "3.3": check_tokens}
