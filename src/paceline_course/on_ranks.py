"""Checks of functions that run on virtual ranks: those of lessons 1 to 6, and of functions to mend.

What is called ``_..._wrong`` says what is wrong with what it is given; None where nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from paceline_course.exercise import RIGHT, Said, says
from paceline_course.watched import (
    Expected,
    Storages,
    Watched,
    WatchedCommunicator,
    all_close,
    compare,
    run_watched,
    run_with,
    shown_calls,
)


def _tensor_of(rank: int, elements: int) -> torch.Tensor:
    """Returns the tensor that a rank brings to a check: no two elements of all ranks are equal."""
    return torch.arange(elements, dtype=torch.float64) + 100.0 * (rank + 1)


# Lesson 1: ranks and collectives.

_ELEMENTS = 3


def check_all_gather(function: Any) -> Said:
    """Runs the reader's all-gather on one, two and four ranks, and compares with the tensors that the ranks brought."""
    for size in (1, 2, 4):
        found = run_with(function, [[_tensor_of(rank, _ELEMENTS)] for rank in range(size)])
        if called := found.calls_besides("send", "recv"):
            return says("calls", called=called)
        for rank, result in enumerate(found.results):
            if said := _gathered_wrong(result, size):
                return says(said.name, size=size, rank=rank, **said.gaps)
    own = 8 * _ELEMENTS
    return says("right", most=max(found.sent_bytes) / own, total=sum(found.sent_bytes) / own)


def _gathered_wrong(result: Any, size: int) -> Said | None:
    if not isinstance(result, list | tuple) or not all(isinstance(each, torch.Tensor) for each in result):
        return says("no_list", kind=type(result).__name__)
    if len(result) != size:
        return says("count", count=len(result))
    expected = [_tensor_of(each, _ELEMENTS) for each in range(size)]
    if any(each.shape != expected[0].shape for each in result):
        return says("shape", shape=tuple(result[0].shape))
    if all(map(torch.equal, result, expected)):
        return None
    if sorted(each.tolist() for each in result) == [each.tolist() for each in expected]:
        return says("order")
    return says("same" if size > 1 and all(torch.equal(each, result[0]) for each in result) else "otherwise")


# Lesson 2: a ring.


def check_reduce_scatter(function: Any) -> Said:
    """Runs the reader's reduce-scatter on two, three and four ranks: the values, then the bytes, then the ring."""
    for size in (2, 3, 4):
        found = run_with(function, [[_tensor_of(rank, 2 * size)] for rank in range(size)])
        if called := found.calls_besides("send", "recv"):
            return says("calls", called=called)
        if said := _slices_wrong(found.results, size) or _messages_wrong(found, size):
            return says(said.name, size=size, **said.gaps)
    return RIGHT


def _slices_wrong(results: list[Any], size: int) -> Said | None:
    tensors = [_tensor_of(rank, 2 * size) for rank in range(size)]
    expected = torch.stack(tensors).sum(0).chunk(size)
    usual = {
        "shifted": [*expected[1:], expected[0]],
        "own": [each.chunk(size)[rank] for rank, each in enumerate(tensors)],
        "mean": [each / size for each in expected],
    }
    return compare(results, expected, usual)


def _messages_wrong(found: Watched, size: int) -> Said | None:
    """Says what is wrong with what the ranks sent, and to whom. A slice has two float64 elements."""
    sent = max(found.sent_bytes)
    rank = found.sent_bytes.index(sent)
    if sent > 16 * (size - 1):
        sends = found.comms[rank].calls["send"]
        name = "whole_tensors" if sends <= size - 1 else "messages"
        return says(name, rank=rank, sent=sent, sends=sends, enough=size - 1)
    for rank, comm in enumerate(found.comms):
        if len(comm.receivers) > 1:
            return says("no_ring", rank=rank, named=" and ".join(map(str, sorted(comm.receivers))))
    return None


# Lesson 3: data parallelism.

_RANKS = 4


def check_average(function: Any) -> Said:
    """Runs the reader's function on four ranks: with all gradients there, and with one missing on two of them."""
    for some_missing in (False, True):

        def work(comm: Any, is_missing: bool = some_missing) -> list[torch.Tensor | None]:
            model = _model_with_gradients(comm.rank, is_missing)
            function(model, comm)
            return [parameter.grad for parameter in model.parameters()]

        found = run_watched(work, _RANKS)
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
    models = [_model_with_gradients(rank, is_missing) for rank in range(_RANKS)]
    for place, (name, _) in enumerate(models[0].named_parameters()):
        given, before = [found[place] for found in results], [list(model.parameters())[place].grad for model in models]
        if None in given:
            return says("none", rank=given.index(None), ranks=_RANKS, name=name)
        own = [torch.zeros(2, dtype=torch.float64) if each is None else each for each in before]  # the bias alone
        total = torch.stack(own).sum(0)
        usual: dict[str, Expected] = {"sum": total, "unchanged": own, "divided_twice": total / _RANKS**2}
        if said := compare(given, total / _RANKS, usual):
            return says("otherwise" if said.name == "differ" else said.name, **said.gaps, name=name)
    return None


# Lesson 4: ZeRO.


def check_step(function: Any) -> Said:
    """Runs the reader's step on four and three ranks: the parameters, then the operations."""
    before = torch.arange(24, dtype=torch.float64).sin()
    for ranks in (4, 3):
        gradients = [torch.arange(24, dtype=torch.float64).add(7 * rank).cos() for rank in range(ranks)]
        found = run_with(function, [[before, own, 0.1] for own in gradients])
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
        gathered = torch.cat([comm.brought["all_gather"][0].flatten() for comm in found.comms])
        if not torch.allclose(gathered, before - 0.1 * mean):
            return says("not_updated")
    return RIGHT


# Lesson 5: FSDP.

_SHAPE, _ROWS = (6, 4), 5


class _Called(NamedTuple):
    """What the reader's function gave on one rank: output, gradients, and operations in forward and in all."""

    output: Any
    of_x: torch.Tensor | None
    of_slice: torch.Tensor | None
    forward: dict[str, int]
    both: dict[str, int]
    is_kept: bool  # whether the weights of other ranks are in memory between forward and backward


def check_linear(function: Any) -> Said:
    """Runs the reader's layer on two and four ranks: output, gradients, then the operations."""
    weight = torch.arange(24, dtype=torch.float64).sin().view(_SHAPE)
    for ranks in (2, 4):
        inputs = [torch.arange(20, dtype=torch.float64).add(3 * rank).cos().view(_ROWS, 4) for rank in range(ranks)]

        def work(comm: WatchedCommunicator, own: Sequence[torch.Tensor] = inputs) -> _Called:
            mine = weight.flatten().chunk(comm.size)[comm.rank].clone().requires_grad_()
            x = own[comm.rank].clone().requires_grad_()
            with Storages() as storages:
                output = function(comm, x, mine, _SHAPE)
            forward, is_kept = dict(comm.calls), bool(torch.isin(weight, storages.alive()).all())
            if getattr(output, "requires_grad", False):
                output.square().sum().backward()
            return _Called(output, x.grad, mine.grad, forward, dict(comm.calls), is_kept)

        called = run_watched(work, ranks).results
        if said := _passes_wrong(called, weight, inputs) or _calls_wrong(called[0]):
            return said
    return RIGHT


def _passes_wrong(called: Sequence[_Called], weight: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Said | None:
    """Compares outputs and gradients. The loss is the sum of squares of a rank's own output."""
    ranks, own = len(called), [2 * (x @ weight.T).T @ x for x in inputs]
    total = sum(own[1:], own[0])

    def cut(wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [whole.flatten().chunk(ranks)[rank] for rank, whole in enumerate(wholes)]

    of_weight = {"sum": cut([total] * ranks), "own": cut(own)}
    given = zip(*((each.output, each.of_x, each.of_slice) for each in called), strict=True)
    right = [[x @ weight.T for x in inputs], [2 * x @ weight.T @ weight for x in inputs], cut([total / ranks] * ranks)]
    names = (("shape", "output"), ("no_gradient_of_x", "gradient_of_x"), ("no_gradient", "gradient"))
    for values, expected, (missing, wrong) in zip(given, right, names, strict=True):
        if said := compare(values, expected, of_weight if missing == "no_gradient" else {}):
            return says({"shape": missing, "otherwise": wrong}.get(said.name, said.name), **said.gaps)
    return None


def _calls_wrong(called: _Called) -> Said | None:
    if called.is_kept or called.both.get("all_gather") == 1:
        return says("kept")
    if called.forward != {"all_gather": 1} or called.both != {"all_gather": 2, "reduce_scatter": 1}:
        return says("calls", called=shown_calls(called.both))
    return None


# Lesson 6: tensor parallelism.


def check_mlp(function: Any) -> Said:
    """Runs the reader's MLP on two and four ranks: the output, then what was summed."""
    parts = [torch.arange(count, dtype=torch.float64).mul(step).sin() for count, step in ((12, 1), (32, 2), (32, 3))]
    x, up, down = parts[0].view(3, 4), parts[1].view(8, 4), parts[2].view(4, 8)
    bias = torch.arange(4, dtype=torch.float64).add(1)
    product = F.gelu(x @ up.T) @ down.T
    for ranks in (2, 4):
        found = run_with(function, [[x, up, down, bias]] * ranks)
        usual = {
            "biases": product + ranks * bias,
            "no_bias": product,
            "averaged": product / ranks + bias,
            "whole_and_summed": ranks * product + bias,
        }
        said = compare(found.results, product + bias, usual) or _sums_wrong(found.comms[0], product.nbytes)
        if said is not None:
            return said
        summands = [comm.brought["all_reduce"][0] for comm in found.comms]
        if all_close(summands, summands[0]):
            return says("whole")
    return RIGHT


def _sums_wrong(first: WatchedCommunicator, expected: int) -> Said | None:
    """Says what is wrong with what the first rank sent: one sum of ``expected`` bytes is enough."""
    if not first.calls:
        return says("nothing_sent")
    if first.calls != {"all_reduce": 1}:
        return says("calls", called=shown_calls(first.calls))
    if (sent := first.brought["all_reduce"][0].nbytes) != expected:
        return says("bytes", sent=sent, expected=expected)
    return None


# Functions that were broken and should be mended, by what all ranks return in the end.

Trial = tuple[Sequence[Any], Expected, Mapping[str, Expected]]  # what ranks bring, should return, and usually do


def _judge(function: Any, *trials: Trial) -> Said:
    """Runs the function with what each rank brings, and compares what the ranks return."""
    for brings, right, usual in trials:
        if said := compare(run_with(function, brings).results, right, usual):
            return said
    return RIGHT


def check_shift(function: Any) -> Said:
    own = [torch.arange(4.0) + 10 * rank for rank in range(3)]
    after, before = own[1:] + own[:1], own[-1:] + own[:-1]
    return _judge(function, ([[each] for each in own], before, {"unchanged": own, "other_way": after}))


def check_mean(function: Any) -> Said:
    def trial(*counts: int) -> Trial:  # samples of each rank
        losses = torch.arange(1.0, 7).square()
        parts = torch.split(losses, list(counts))
        of_means = torch.stack([each.mean() for each in parts]).mean()
        usual = {"mean_of_means": of_means, "sum": losses.sum(), "per_rank": losses.sum() / len(counts)}
        return [[each] for each in parts], losses.mean(), usual

    return _judge(function, trial(3, 1, 2), trial(4, 0, 2))


def check_step_means(function: Any) -> Said:
    table = torch.tensor([[4.0, math.nan, math.nan], [1.0, 2.0, 9.0], [7.0, 5.0, math.nan]])
    brings = [[[loss for loss in row if not loss.isnan()]] for row in table]
    return _judge(function, (brings, table.nanmean(0), {"all_ranks": table.nansum(0) / 3}))


def check_buffers(function: Any) -> Said:
    """Averages three tensors through buffers, of which at least two are under way at once."""
    own = [[torch.arange(4.0) + 10 * place + 100 * rank**2 for place in range(3)] for rank in range(3)]
    whole = torch.stack([torch.stack(each) for each in own])
    found = run_with(function, [[each] for each in own])
    usual: dict[str, Expected] = {"sum": whole.sum(0), "unchanged": list(whole), "last": whole.mean(0)[2].expand(3, 4)}
    if said := compare(found.results, whole.mean(0), usual):
        return said
    comm = found.comms[0]
    return says("serial") if comm.most_under_way < min(2, comm.calls.total()) else RIGHT


def check_skipped(function: Any) -> Said:
    """With gradients that are finite, then with one that is not, on one rank."""

    def trial(times: float) -> Trial:
        gradients = [torch.arange(1.0, 4), torch.arange(3.0) + 2, times * torch.ones(3)]
        step = 0.1 * torch.stack(gradients).mean(0)
        usual = {"sum": torch.ones(3) - 3 * step} if math.isfinite(times) else {"taken": torch.ones(3) - step}
        right = torch.ones(3) - (step if math.isfinite(times) else 0)
        return [[torch.ones(3), each] for each in gradients], right, usual

    return _judge(function, trial(2.0), trial(math.inf), trial(math.nan))


CHECKS = {
    "1.1": check_all_gather,
    "1.4": check_shift,
    "2.2": check_reduce_scatter,
    "3.1": check_average,
    "3.4": check_mean,
    "3.5": check_step_means,
    "3.6": check_buffers,
    "4.2": check_step,
    "5.2": check_linear,
    "6.2": check_mlp,
    "8.4": check_skipped,
}
