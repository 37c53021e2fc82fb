"""Lesson 5: right answers pass, and wrong ones get the words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from judged import words_of_right, words_of_wrong

from paceline.comm.base import Communicator
from paceline_course.course import find, judge


def test_count_the_gathers() -> None:
    assert "last block" in words_of_right("5.1", 2 * 10 * 3)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (66, "every unit twice"),
        (63, "One gather too many"),
        (20, "one microbatch"),
        (33, "forward alone"),
        (11, "forward of one microbatch"),
        (40, "freed after each microbatch"),
        (58, "ends with all units freed"),
        (57, "did you count the root"),
        (30, "factor of 2"),
        (61, "a little"),
    ],
)
def test_wrong_counts_get_words_that_help(answer: int, words: str) -> None:
    verdict = judge(find("5.1"), answer)
    assert not verdict.is_right
    assert words in verdict.words
    assert "60" not in verdict.words


def gather(comm: Communicator, mine: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    whole = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(whole, mine.detach()).wait()
    return whole.view(shape)


class Sharded(torch.autograd.Function):
    """The layer that the exercise asks for. ``how`` plants one mistake."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, comm: Communicator, x: torch.Tensor, mine: torch.Tensor, shape: tuple[int, int], how: str
    ) -> torch.Tensor:
        whole = gather(comm, mine, shape)
        ctx.comm, ctx.shape, ctx.how = comm, shape, how
        ctx.whole = whole if how == "keeps" else None
        ctx.save_for_backward(x, mine)
        return x @ whole.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, mine = ctx.saved_tensors
        whole = gather(ctx.comm, mine, ctx.shape) if ctx.whole is None else ctx.whole
        of_weight = (gradient.T @ x).flatten()
        of_slice = of_weight.chunk(ctx.comm.size)[ctx.comm.rank].clone()
        if ctx.how != "own":
            ctx.comm.reduce_scatter(of_slice, of_weight, "sum" if ctx.how == "sum" else "avg").wait()
        if ctx.how == "barrier":
            ctx.comm.all_reduce(torch.ones(1)).wait()
        of_x = None if ctx.how == "no x" else 2 * gradient @ whole if ctx.how == "twice" else gradient @ whole
        return None, of_x, -of_slice if ctx.how == "sign" else of_slice, None, None


def sharded_linear(how: str = "") -> Any:
    def function(comm: Communicator, x: torch.Tensor, mine: torch.Tensor, shape: tuple[int, int]) -> Any:
        return Sharded.apply(comm, x, mine, shape, how)

    return function


def plain_gather(comm: Communicator, x: torch.Tensor, mine: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return x @ gather(comm, mine, shape).T


def without_transpose(comm: Communicator, x: torch.Tensor, mine: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return x @ gather(comm, mine, (shape[1], shape[0]))


def test_a_linear_layer_that_is_gathered() -> None:
    assert "FSDP" in words_of_right("5.2", sharded_linear())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (plain_gather, "no gradient"),
        (without_transpose, "not x @ weight.T"),
        (lambda *given: given[2], "x @ weight.T is (5, 6)"),
        (lambda *_: None, "NoneType"),
        (sharded_linear("keeps"), "gather again in backward"),
        (sharded_linear("sum"), "not the sum"),
        (sharded_linear("own"), "this rank's samples alone"),
        (sharded_linear("no x"), "x has no gradient"),
        (sharded_linear("twice"), "gradient of x is wrong"),
        (sharded_linear("sign"), "transposed gradient"),
        (sharded_linear("barrier"), "1 x all_reduce"),
    ],
)
def test_wrong_layers_get_words_that_help(function: Any, words: str) -> None:
    assert words in words_of_wrong("5.2", function)


def test_enough_tokens() -> None:
    assert judge(find("5.3"), 2 * 400e12 / (2 * 50e9) * 63 / 64).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (8000, "its own slice already"),
        (15750, "4 bytes"),
        (3937.5, "2 bytes on its way"),
        (2625, "forward alone"),
        (7875 / 64, "divide by N"),
        (7875 * 64, "one rank's microbatch"),
        (63000, "not in bits"),
        (7000, "a little"),
    ],
)
def test_wrong_tokens_get_words_that_help(answer: float, words: str) -> None:
    verdict = judge(find("5.3"), answer)
    assert not verdict.is_right
    assert words in verdict.words
    assert "7875" not in verdict.words
