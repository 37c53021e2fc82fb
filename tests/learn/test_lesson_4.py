"""Lesson 4: right answers pass, and wrong ones get the words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from judged import words_of_right, words_of_wrong

from paceline.comm.base import Communicator
from paceline_course.course import find, judge


def test_the_states_of_one_rank() -> None:
    assert "moments" in words_of_right("4.1", 8 * 3 + 8 * 3 / 8)


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
    assert "reduce-scatter" in words_of_right("4.2", sharded_step)


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
    assert words in words_of_wrong("4.2", function)


@pytest.mark.parametrize("answer", ["zero2", "ZeRO 2", "zero-2"])
def test_the_cheapest_strategy_that_fits(answer: str) -> None:
    assert "68.5 of 80 GB" in words_of_right("4.3", answer)


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


def rank_bytes(strategy: str, *given: float, how: str = "") -> float:
    """The whole memory of a rank. ``how`` plants one mistake."""
    parameters, ranks, samples, tokens, width, layers, is_checkpointed = given
    whole, shared = {"ddp": (18, 0), "zero1": (6, 12), "zero2": (2, 16), "fsdp": (0, 16)}[strategy]
    if how == "masters whole" and strategy != "ddp":
        whole, shared = whole + 4, shared - 4
    if how == "no masters":
        whole -= 2
    stream = samples * tokens * width
    again = 0 if how == "inputs" else 34 * stream
    kept = 2 * stream * layers + again if is_checkpointed and how != "kept" else 34 * stream * layers
    if how == "shared":
        kept /= ranks
    return (whole + shared / ranks) * parameters + (0 if how == "states" else kept) + (1e9 if how == "more" else 0)


def test_all_of_a_rank() -> None:
    verdict = judge(find("4.4"), rank_bytes)
    assert verdict.is_right
    for strategy, gib in (("fsdp", 29.5), ("ddp", 129.3)):
        assert rank_bytes(strategy, 6.7e9, 8, 1, 4096, 4096, 32, False) / 2**30 == pytest.approx(gib, abs=0.1)
        assert f"{gib} GiB" in verdict.words


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("states", "the states alone"),
        ("shared", "divided the activations by N"),
        ("kept", "with checkpointing a block keeps its input"),
        ("inputs", "it has all of its activations"),
        ("no masters", "16 P bytes of states"),
        ("masters whole", "the optimizer updates a slice of the masters"),
        ("more", "your function gives 1.399e+11 bytes"),
    ],
)
def test_wrong_memories_get_words_that_help(how: str, words: str) -> None:
    assert words in words_of_wrong("4.4", lambda *given: rank_bytes(*given, how=how))


def test_what_is_no_number_of_bytes_is_named() -> None:
    assert "returns None. It should return a number" in judge(find("4.4"), lambda *_: None).words
