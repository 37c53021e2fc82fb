"""Checks of lesson 11: a router with a capacity, rows that travel to their experts and back, and one norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paceline_course.exercise import RIGHT, Said, says
from paceline_course.watched import WatchedCommunicator, compare, run_watched, run_with, shown_calls

_WIDTH = 3


def _numbers(*shape: int, step: float) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).add(1).mul(step).sin().view(shape)


# Exercise 11.2.


def check_dispatch(function: Any) -> Said:
    """Asks for one, two and three experts of six, with capacities that drop some tokens, and none."""
    scores = (2 * _numbers(10, 6, step=1.7)).softmax(-1)
    for active, most in ((2, 10), (1, 1), (2, 3), (3, 4)):
        expected, usual = _dispatch(scores, active, most), _usual_dispatches(scores, active, most)
        said = compare([function(scores.clone(), active, most)], expected, usual)
        if said is not None:
            return says("otherwise" if said.name == "differ" else said.name, active=active, most=most, **said.gaps)
    return RIGHT


def _weights(scores: torch.Tensor, active: int) -> torch.Tensor:
    best = scores.topk(active)
    return torch.zeros_like(scores).scatter(-1, best.indices, best.values)


def _divided(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


def _earlier(weights: torch.Tensor, most: int) -> torch.Tensor:
    return torch.where((weights > 0).cumsum(0) <= most, weights, 0.0)


def _dispatch(scores: torch.Tensor, active: int, most: int) -> torch.Tensor:
    return _earlier(_divided(_weights(scores, active)), most)


def _usual_dispatches(scores: torch.Tensor, active: int, most: int) -> dict[str, torch.Tensor]:
    chosen = _weights(scores, active)
    weights = _divided(chosen)
    ranked = weights.argsort(dim=0, descending=True).argsort(dim=0)
    return {
        "not_divided": _earlier(chosen, most),
        "divided_late": _divided(_earlier(chosen, most)),
        "no_capacity": weights,
        "later_first": _earlier(weights.flip(0), most).flip(0),
        "best_first": torch.where(ranked < most, weights, 0.0),
        "one_less": _earlier(weights, most - 1),
        "one_more": _earlier(weights, most + 1),
        "equal": (_dispatch(scores, active, most) > 0).double() / active,
        "all_experts": _earlier(scores, most),
        "worst": _earlier(_divided(torch.where(_weights(1 - scores, active) > 0, scores, 0.0)), most),
    }


# Exercise 11.3.


class _Travelled(NamedTuple):
    """What the reader's function gave on one rank: rows, gradients, and the operations of forward."""

    output: Any
    of_rows: torch.Tensor | None
    of_experts: torch.Tensor | None
    forward: dict[str, int]


def check_exchange(function: Any) -> Said:
    """Runs the reader's function on two and four ranks: rows, gradients, then the operations."""
    for ranks, local in ((2, 3), (4, 2)):
        experts = _numbers(ranks * local, _WIDTH, _WIDTH, step=1.3)
        counts = [torch.arange(ranks * local).mul(3 + 2 * rank).add(rank).remainder(4) for rank in range(ranks)]
        rows = [_numbers(int(each.sum()), _WIDTH, step=0.7 + 0.1 * rank) for rank, each in enumerate(counts)]

        def work(comm: WatchedCommunicator, own: Any = (rows, counts), whole: torch.Tensor = experts) -> _Travelled:
            mine = own[0][comm.rank].clone().requires_grad_()
            matrices = whole.chunk(comm.size)[comm.rank].clone().requires_grad_()
            output = function(comm, mine, own[1][comm.rank].clone(), matrices)
            forward = dict(comm.calls)
            if getattr(output, "requires_grad", False):
                output.square().sum().backward()
            return _Travelled(output, mine.grad, matrices.grad, forward)

        said = _trip_wrong(run_watched(work, ranks).results, rows, counts, experts)
        if said is not None:
            return says(said.name, **({"ranks": ranks} | dict(said.gaps)))
    return RIGHT


def _trip_wrong(
    found: Sequence[_Travelled], rows: Sequence[torch.Tensor], counts: Sequence[torch.Tensor], experts: torch.Tensor
) -> Said | None:
    """Compares with one process. The loss is the sum of squares of all ranks' outputs."""
    ranks = len(found)
    kinds = [torch.arange(len(experts)).repeat_interleave(each) for each in counts]
    right = [_multiply(each, experts[kind]) for each, kind in zip(rows, kinds, strict=True)]
    local = len(experts) // ranks
    usual = {
        "unchanged": rows,
        "own_experts": [
            _multiply(each, experts[kind % local + rank * local])
            for rank, (each, kind) in enumerate(zip(rows, kinds, strict=True))
        ],
        "transposed": [_multiply(each, experts[kind].mT) for each, kind in zip(rows, kinds, strict=True)],
        "wrong_order": _unsorted(right, counts),
    }
    if said := compare([each.output for each in found], right, usual):
        return says("lost" if said.name == "shape" else said.name, **said.gaps)
    of_rows = [2 * _multiply(y, experts[kind].mT) for y, kind in zip(right, kinds, strict=True)]
    of_each = torch.zeros_like(experts)
    for x, y, kind in zip(rows, right, kinds, strict=True):
        of_each.index_add_(0, kind, 2 * y[:, :, None] * x[:, None])
    for name, given, expected in (
        ("rows", [each.of_rows for each in found], of_rows),
        ("experts", [each.of_experts for each in found], list(of_each.chunk(ranks))),
    ):
        if any(each is None for each in given):
            return says("no_gradient", name=name)
        if said := compare(given, expected, {}):
            return says("gradient", name=name)
    called = next((each.forward for each in found if each.forward != {"all_to_all": 3}), None)
    return None if called is None else says("calls", called=shown_calls(called))


def _multiply(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    return (matrices @ rows[:, :, None])[:, :, 0]


def _unsorted(right: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what comes back where what was sorted by expert travels home as it lies, cut into each rank's number."""
    ranks, local = len(right), len(counts[0]) // len(right)
    pieces = [each.split(own.tolist()) for each, own in zip(right, counts, strict=True)]
    home: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for holder in range(ranks):
        mine = range(holder * local, holder * local + local)
        by_expert = torch.cat([pieces[source][expert] for expert in mine for source in range(ranks)])
        sizes = [int(counts[source][mine.start : mine.stop].sum()) for source in range(ranks)]
        for source, piece in enumerate(by_expert.split(sizes)):
            home[source].append(piece)
    return [torch.cat(each) for each in home]


# Exercise 11.4.


def check_norm(function: Any) -> Said:
    """Takes the norm on four ranks with experts over two, and on six with experts over three and over all."""
    for ranks, over in ((4, 2), (6, 3), (6, 6)):
        shared, experts = _numbers(4, step=0.9), _numbers(over, 5, step=2.3) * torch.arange(1, over + 1).view(-1, 1)
        own = experts.square().sum(1).repeat(ranks // over)  # squares, by rank
        common = shared.square().sum()
        usual = {
            "averaged": (common + own).sqrt().mean(),
            "summed": (common + own).sqrt().sum(),
            "every_square": (common + own).sum().sqrt(),
            "mean_square": (common + own).mean().sqrt(),
            "experts_twice": (common + own.sum()).sqrt(),
            "shared_often": (ranks * common + own.sum() * over / ranks).sqrt(),
            "shared_alone": common.sqrt(),
            "experts_alone": (own.sum() * over / ranks).sqrt(),
            "squared": common + own[:over].sum(),
            "largest": (common + own).sqrt().max(),
        }
        brings = [[shared, experts[rank % over], over] for rank in range(ranks)]
        if said := compare(run_with(function, brings).results, (common + own[:over].sum()).sqrt(), dict(usual)):
            return says(said.name, over=over, **said.gaps)
    return RIGHT


CHECKS: dict[str, Callable[[Any], Said]] = {"11.2": check_dispatch, "11.3": check_exchange, "11.4": check_norm}
