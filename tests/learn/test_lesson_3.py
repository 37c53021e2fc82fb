"""The exercises of lesson 3: right answers pass, and usual mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline_course.course import find, judge
from paceline_course.exercise import Verdict


def verdict(number: str, answer: Any) -> Verdict:
    return judge(find(number), answer)


def averaging(
    op: str = "avg", finish: Callable[[torch.Tensor], torch.Tensor] = torch.clone, times: int = 1
) -> Callable[[Any, Any], None]:
    """Makes an answer to 3.1: all gradients in one tensor, reduced by ``op``, with ``finish`` applied to the parts."""

    def average_gradients(model: Any, comm: Any) -> None:
        parameters = list(model.parameters())
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        flat = torch.cat([part.detach().flatten() for part in parts])
        for _ in range(times):
            comm.all_reduce(flat, op).wait()
        for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = None if finish is drop else finish(part.view_as(parameter))

    return average_gradients


def drop(part: torch.Tensor) -> torch.Tensor:
    return part


def one_by_one(model: Any, comm: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        comm.all_reduce(parameter.grad, "avg").wait()


def only_those_with_gradients(model: Any, comm: Any) -> None:
    parts = [each for each in model.parameters() if each.grad is not None]
    flat = torch.cat([part.grad.flatten() for part in parts])
    comm.all_reduce(flat, "avg").wait()
    for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.grad.copy_(mean.view_as(part))


def by_gathering(model: Any, comm: Any) -> None:
    for parameter in model.parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        whole = torch.empty(comm.size * own.numel(), dtype=own.dtype)
        comm.all_gather(whole, own.flatten()).wait()
        parameter.grad = whole.view(comm.size, *own.shape).mean(0)


def flat_gradient(model: Any, comm: Any) -> None:
    averaging()(model, comm)
    model.weight.grad = None
    model.weight.data = model.weight.data.flatten()
    model.weight.grad = torch.zeros(6, dtype=torch.float64)


def test_gradients_in_one_all_reduce_pass() -> None:
    found = verdict("3.1", averaging())
    assert found.is_right
    assert "pays the latency once" in found.words


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (averaging("sum"), "On 4 ranks, weight.grad is the sum over the ranks: it is N times too large"),
        (averaging(finish=lambda part: part / 4), 'is the mean divided by N once more: the operation "avg" divides'),
        (averaging(finish=lambda part: part + 1), "is not the mean over the ranks"),
        (averaging(finish=drop), "is None, and other ranks have a gradient"),
        (averaging(times=2), "your function calls all_reduce 2 times"),
        (lambda _model, _comm: None, "is what it was before: copy the mean back"),
        (one_by_one, "your function calls all_reduce 2 times. One all_reduce for all is asked for"),
        (by_gathering, "your function calls all_gather"),
        (only_those_with_gradients, "The ranks that ran your function average_gradients stopped"),
        (flat_gradient, "has shape (6,), and the parameter has 6 elements"),
    ],
)
def test_mistakes_in_averages_are_named(function: Any, words: str) -> None:
    found = verdict("3.1", function)
    assert not found.is_right
    assert words in found.words


def test_the_bytes_of_a_step() -> None:
    assert verdict("3.2", "3.75e9").is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (1.875e9, "Is it the number of elements?"),
        (7.5e9, "it fits gradients in float32"),
        (4e9, "use N-1"),
        (60e9, "what all ranks send together"),
        (2e9, "That is M"),
        (3.75, "gigabytes or megabytes"),
        (1, "Take M = 2 P bytes"),
    ],
)
def test_mistakes_in_the_bytes_of_a_step_are_named(answer: float, words: str) -> None:
    found = verdict("3.2", answer)
    assert not found.is_right
    assert words in found.words


@pytest.mark.parametrize("answer", [7875, "7,875", 7870, 7900])
def test_enough_tokens(answer: Any) -> None:
    assert verdict("3.3", answer).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (8000, "You are close"),
        (15_750, "twice too much"),
        (3937.5, "half of it"),
        (5250, "You counted forward and backward"),
        (504_000, "of all ranks together"),
        (7.875, "Look at the units"),
        (1, "Put the times equal"),
    ],
)
def test_mistakes_in_the_tokens_are_named(answer: float, words: str) -> None:
    found = verdict("3.3", answer)
    assert not found.is_right
    assert words in found.words
