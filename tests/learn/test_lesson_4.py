"""Lesson 4: right answers pass, and wrong ones get the words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.base import Communicator
from paceline.learn.course import find, judge
from paceline.learn.lessons_4_to_6 import state_bytes


def test_states_are_those_of_the_formula() -> None:
    assert state_bytes(1000, "ddp", 4) == 16 * 1000
    assert state_bytes(1000, "zero1", 4) == 8 * 1000 + 8 * 1000 // 4
    assert state_bytes(1000, "zero2", 4) == 4 * 1000 + 12 * 1000 // 4
    assert state_bytes(1000, "fsdp", 4) == 16 * 1000 // 4


def test_the_states_of_one_rank() -> None:
    verdict = judge(find("4.1"), 8 * 3 + 8 * 3 / 8)
    assert verdict.is_right
    assert "moments" in verdict.words


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (48, "data parallelism"),
        (16.5, "gradients stay whole"),
        (6, "FSDP"),
        (27 / 4, "4 bytes"),
        (24, "slice"),
        (15, "One kind is missing"),
        (25.5, "two moments"),
        (27e9 / 2**30, "GiB"),
        (27e9, "bytes"),
        (54, "factor of 2"),
        (-1, "above 0"),
    ],
)
def test_wrong_states_get_words_that_help(answer: Any, words: str) -> None:
    verdict = judge(find("4.1"), answer)
    assert not verdict.is_right
    assert words in verdict.words
    assert "27" not in verdict.words.replace(str(answer), "")


def sharded_step(
    comm: Communicator, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float
) -> torch.Tensor:
    mine = parameters.chunk(comm.size)[comm.rank].clone()
    mean = torch.empty_like(mine)
    comm.reduce_scatter(mean, gradients, "avg").wait()
    mine -= step_size * mean
    comm.all_gather(parameters, mine).wait()
    return parameters


def with_sum(comm: Communicator, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float) -> torch.Tensor:
    return sharded_step(comm, parameters, gradients, step_size * comm.size)


def uphill(comm: Communicator, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float) -> torch.Tensor:
    return sharded_step(comm, parameters, gradients, -step_size)


def without_reduction(
    comm: Communicator, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float
) -> torch.Tensor:
    mine = (parameters - step_size * gradients).chunk(comm.size)[comm.rank].contiguous()
    comm.all_gather(parameters, mine).wait()
    return parameters


def without_gather(
    comm: Communicator, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float
) -> torch.Tensor:
    mine = parameters.chunk(comm.size)[comm.rank]
    mean = torch.empty_like(mine)
    comm.reduce_scatter(mean, gradients, "avg").wait()
    mine -= step_size * mean
    return parameters


def with_all_reduce(
    comm: Communicator, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float
) -> torch.Tensor:
    comm.all_reduce(gradients, "avg").wait()
    return parameters - step_size * gradients


def with_too_much(
    comm: Communicator, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float
) -> torch.Tensor:
    found = sharded_step(comm, parameters, gradients, step_size)
    comm.broadcast(found).wait()
    return found


def slice_alone(
    comm: Communicator, parameters: torch.Tensor, gradients: torch.Tensor, step_size: float
) -> torch.Tensor:
    return without_gather(comm, parameters, gradients, step_size).chunk(comm.size)[comm.rank]


def test_a_step_that_shares_the_update() -> None:
    verdict = judge(find("4.2"), sharded_step)
    assert verdict.is_right, verdict.words
    assert "reduce-scatter" in verdict.words


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (with_sum, "not their sum"),
        (uphill, "up the gradient"),
        (without_reduction, "averaged over the ranks first"),
        (without_gather, "different parameters"),
        (with_all_reduce, "you call all_reduce"),
        (with_too_much, "1 x broadcast"),
        (slice_alone, "return all 24 parameters"),
        (lambda *given: given[1], "before the step"),
        (lambda *_: None, "returned NoneType"),
        (lambda *given: given[1] + 1, "not those of one process"),
    ],
)
def test_wrong_steps_get_words_that_help(function: Any, words: str) -> None:
    verdict = judge(find("4.2"), function)
    assert not verdict.is_right
    assert words in verdict.words


@pytest.mark.parametrize("answer", ["zero2", "ZeRO 2", "zero-2"])
def test_the_cheapest_strategy_that_fits(answer: str) -> None:
    verdict = judge(find("4.3"), answer)
    assert verdict.is_right
    assert "68.5 of 80 GB" in verdict.words


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("ddp", "needs 142 GB"),
        ("zero1", "needs 93 GB"),
        ("fsdp", "sends more"),
        ("zero3", "sends more"),
        ("7", "none of"),
    ],
)
def test_wrong_strategies_get_words_that_help(answer: str, words: str) -> None:
    verdict = judge(find("4.3"), answer)
    assert not verdict.is_right
    assert words in verdict.words
    assert "zero2" not in verdict.words or words == "none of"
