"""Checks of lesson 4: where memory goes, and ZeRO."""

from __future__ import annotations

from typing import Any

import torch

from paceline.learn.counted import compare, run_counted, shown_calls
from paceline.learn.exercise import RIGHT, Said, judge_first, judge_number, says
from paceline.plan.layout import Layout, Strategy
from paceline.predict.memory.facts import BlockFacts, ModelFacts
from paceline.predict.memory.memory import StateFacts, estimate_memory

_GB = 1e9
_PARAMETERS, _RANKS = 3_000_000_000, 8  # 4.1
_LARGE, _DEVICE_GB, _ACTIVATIONS_GB = 7_000_000_000, 80, 30  # 4.3
_LADDER: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp")


def state_bytes(parameters: int, strategy: Strategy, ranks: int) -> int:
    """Returns the bytes of parameters, gradients and moments on one rank: AdamW in fp32."""
    model = ModelFacts(blocks=(), root=BlockFacts(parameters=parameters))
    need = estimate_memory(model, Layout(strategy=strategy).for_ranks(ranks), StateFacts())
    return int(need.parameters + need.gradients + need.optimizer)


def check_states(answer: float) -> Said:
    needs: dict[str, float] = {name: state_bytes(_PARAMETERS, name, _RANKS) / _GB for name in _LADDER}
    truth, kind = needs.pop("zero1"), 4 * _PARAMETERS / _GB
    mistakes = {
        **needs,
        "numbers": truth / 4,
        "one_kind": truth - kind,
        "no_slice": 2 * kind,
        "one_moment": truth - kind / _RANKS,
        "gib": truth * _GB / 2**30,
        "bytes": truth * _GB,
    }
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
    needs: dict[str, float] = {name: state_bytes(_LARGE, name, _RANKS) / _GB + _ACTIVATIONS_GB for name in _LADDER}
    return judge_first(answer, needs, _DEVICE_GB, device=_DEVICE_GB)


CHECKS = {"4.1": check_states, "4.2": check_step, "4.3": check_strategy}
