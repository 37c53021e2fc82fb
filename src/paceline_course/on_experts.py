"""Checks of lesson 11: a router with a capacity, rows that travel to their experts and back, and one norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import normalize

from paceline_course.exercise import RIGHT, Said, says
from paceline_course.watched import WatchedCommunicator, compare, run_watched, run_with, shown_calls


def _numbers(*shape: int, step: float) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).add(1).mul(step).sin().view(shape)


def check_dispatch(function: Any) -> Said:
    """Asks for one, two and three experts of six, with capacities that drop some tokens, and none."""
    scores = (2 * _numbers(10, 6, step=1.7) + torch.arange(6) / 3).softmax(-1)  # some experts are wanted more
    for active, most in ((2, 10), (1, 1), (2, 3), (3, 4)):
        chosen = torch.where(scores >= scores.topk(active).values[:, -1:], scores, 0.0)
        weights = normalize(chosen, p=1)
        usual = {
            "not_divided": _earlier(chosen, most),
            "divided_late": normalize(_earlier(chosen, most), p=1),
            "no_capacity": weights,
            "later_first": _earlier(weights.flip(0), most).flip(0),
            "best_first": torch.where(weights.argsort(0, descending=True).argsort(0) < most, weights, 0.0),
            "one_more": _earlier(weights, most + 1),
            "equal": _earlier(normalize((chosen > 0).double(), p=1), most),
        }
        if said := compare([function(scores.clone(), active, most)], _earlier(weights, most), dict(usual)):
            return says("otherwise" if said.name == "differ" else said.name, active=active, most=most, **said.gaps)
    return RIGHT


def _earlier(weights: torch.Tensor, most: int) -> torch.Tensor:
    return torch.where((weights > 0).cumsum(0) <= most, weights, 0.0)


def check_exchange(function: Any) -> Said:
    """Runs the reader's function on two and four ranks: rows, gradients (of the sum of squares), then operations."""
    for ranks, local in ((2, 3), (4, 2)):
        experts = _numbers(ranks * local, 3, 3, step=1.3)
        counts = [torch.arange(ranks * local).mul(3 + 2 * rank).add(rank).remainder(4) for rank in range(ranks)]
        kinds = [torch.arange(len(experts)).repeat_interleave(each) for each in counts]
        rows = [_numbers(len(each), 3, step=0.7 + 0.1 * rank) for rank, each in enumerate(kinds)]

        def work(comm: WatchedCommunicator, own: Any = (rows, counts, experts)) -> list[Any]:
            mine, matrices = own[0][comm.rank].clone(), own[2].chunk(comm.size)[comm.rank].clone()
            output = function(comm, mine.requires_grad_(), own[1][comm.rank].clone(), matrices.requires_grad_())
            forward = dict(comm.calls)
            if getattr(output, "requires_grad", False):
                output.square().sum().backward()
            return [output, mine.grad, matrices.grad, forward]

        if said := _trip_wrong(run_watched(work, ranks).results, rows, kinds, experts):
            return said
    return RIGHT


def _trip_wrong(found: list[Any], rows: list[Any], kinds: list[Any], experts: torch.Tensor) -> Said | None:
    leaves = [each.clone().requires_grad_() for each in (*rows, experts)]

    def multiply(matrices: torch.Tensor, numbers: list[torch.Tensor]) -> list[torch.Tensor]:
        return [(matrices[kind] @ x[:, :, None])[:, :, 0] for x, kind in zip(leaves, numbers, strict=False)]

    right = multiply(leaves[-1], kinds)
    local = len(experts) // len(rows)
    own = multiply(experts, [kind % local + rank * local for rank, kind in enumerate(kinds)])
    usual = {"unchanged": rows, "own_experts": own, "transposed": multiply(experts.mT, kinds)}
    outputs, of_rows, of_experts, called = map(list, zip(*found, strict=True))
    if said := compare(outputs, right, dict(usual)):
        if said.name != "otherwise":
            return said
        mixed, whole = (torch.cat(each).flatten().sort().values for each in (outputs, right))
        return says("wrong_order" if torch.allclose(mixed, whole) else "otherwise", **said.gaps)
    *for_rows, for_experts = torch.autograd.grad(torch.cat(right).square().sum(), leaves)
    for name, given, wanted in (("rows", of_rows, for_rows), ("experts", of_experts, for_experts.chunk(len(rows)))):
        if any(each is None for each in given):
            return says("no_gradient", name=name)
        if compare(given, wanted, {}):
            return says("gradient", name=name)
    return next((says("calls", called=shown_calls(each)) for each in called if each != {"all_to_all": 3}), None)


def check_norm(function: Any) -> Said:
    """Takes the norm on four ranks with experts over two, and on six with experts over three and over all."""
    for ranks, over in ((4, 2), (6, 3), (6, 6)):
        shared, experts = _numbers(4, step=0.9), _numbers(over, 5, step=2.3) * torch.arange(1, over + 1).view(-1, 1)
        own, common = experts.square().sum(1).repeat(ranks // over), shared.square().sum()  # own: by rank
        usual = {
            "averaged": (common + own).sqrt().mean(),
            "every_square": (common + own).sum().sqrt(),
            "experts_twice": (common + own.sum()).sqrt(),
            "shared_often": (ranks * common + own[:over].sum()).sqrt(),
            "squared": common + own[:over].sum(),
        }
        found = run_with(function, [[shared, experts[rank % over], over] for rank in range(ranks)])
        if said := compare(found.results, (common + own[:over].sum()).sqrt(), dict(usual)):
            return says(said.name, over=over, **said.gaps)
    return RIGHT


CHECKS = {"11.2": check_dispatch, "11.3": check_exchange, "11.4": check_norm}
