"""The check of lesson 5's capstone: a module that the reader shards trains as one process trains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline_course.exercise import RIGHT, Said, says
from paceline_course.watched import Storages, WatchedCommunicator, compare, run_watched, shown_calls

_STEPS, _SAMPLES = 3, 4  # samples of each rank
_CALLS = {"all_gather": 4, "reduce_scatter": 2}  # of a step with two units


def _make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()
    for place, parameter in enumerate(model.parameters()):
        numbers = torch.arange(parameter.numel(), dtype=torch.float64).add(100 * place).mul(1.3).sin()
        parameter.data = numbers.view(parameter.shape)
    return model


def _inputs(step: int, rank: int) -> torch.Tensor:
    return torch.arange(5.0 * _SAMPLES, dtype=torch.float64).add(7 * step + 31 * rank).cos().view(_SAMPLES, 5)


def _plain_outputs(ranks: int, times: float = 1.0) -> list[torch.Tensor]:
    """Returns the outputs of one process on the samples of all ranks, by step; ``times``: of the right rate."""
    model, outputs = _make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * times)
    for step in range(_STEPS):
        output = model(torch.cat([_inputs(step, rank) for rank in range(ranks)]))
        outputs.append(output.detach())
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
    return outputs


def check_sharded(function: Any) -> Said:
    """Trains on two and three ranks: what is held, then the outputs of each step, then the operations."""
    for ranks in (2, 3):
        trained = run_watched(lambda comm: _train(function, comm), ranks).results
        if said := _trained_wrong(trained, ranks):
            return says(said.name, **({"ranks": ranks} | dict(said.gaps)))
    return RIGHT


class _Trained(NamedTuple):
    """What a rank has had: numbers in memory, whether a weight was kept for backward, outputs, a step's operations."""

    held: int
    is_kept: bool
    outputs: Sequence[Any]
    calls: Mapping[str, int]


def _train(function: Any, comm: WatchedCommunicator) -> _Trained:
    model, outputs, is_kept = _make_model(), [], False
    weights = [each.detach().clone() for each in model.parameters() if each.dim() > 1]
    sharded = function(model, comm)
    parameters = (*sharded.parameters(), *model.parameters())
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() // 8 for each in parameters}
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for step in range(_STEPS):
        comm.calls.clear()
        with Storages() as storages:
            output = sharded(_inputs(step, comm.rank))
        comm.inner.barrier()  # so that no operation of another rank holds what this one gathered
        alive = storages.alive()
        is_kept |= step == 0 and any(bool(torch.isin(each, alive).all()) for each in weights)
        outputs.append(output.detach())
        if output.requires_grad:
            output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _Trained(sum(memory.values()), is_kept, outputs, dict(comm.calls))


def _trained_wrong(trained: Sequence[_Trained], ranks: int) -> Said | None:
    most = sum(-(-sum(each.numel() for each in unit.parameters()) // ranks) for unit in _make_model())
    held = [each.held for each in trained]
    if max(held) > most:
        return says("too_much", rank=held.index(max(held)), held=max(held), most=most)
    expected, summed, fixed = (_plain_outputs(ranks, times) for times in (1.0, ranks, 0.0))
    for step in range(_STEPS):
        usual = {"sum": summed[step].chunk(ranks), "unchanged": fixed[step].chunk(ranks)}
        if said := compare([each.outputs[step] for each in trained], expected[step].chunk(ranks), usual):
            return says(said.name, step=step, **said.gaps)
    if any(each.is_kept for each in trained):
        return says("kept")
    called = next((each.calls for each in trained if each.calls != _CALLS), None)
    return None if called is None else says("calls", called=shown_calls(called))


CHECKS = {"5.4": check_sharded}
