"""The exercises of lesson 1: right answers pass, and usual mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline_course.course import find, judge
from paceline_course.exercise import Verdict


def verdict(number: str, answer: Any) -> Verdict:
    return judge(find(number), answer)


def gather(comm: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(comm.size)]
    found[comm.rank] = tensor
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [comm.send(tensor, to=rank) for rank in others]
    for rank in others:
        comm.recv(found[rank], source=rank).wait()
    for each in sends:
        each.wait()
    return found


def rotated(comm: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    found = gather(comm, tensor)
    return found[comm.rank :] + found[: comm.rank]


def without_own(comm: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [each for rank, each in enumerate(gather(comm, tensor)) if rank != comm.rank]


def one_buffer(comm: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    found = gather(comm, tensor)
    return [found[0]] * comm.size


def by_library(comm: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    whole = torch.empty(comm.size * tensor.numel(), dtype=tensor.dtype)
    comm.all_gather(whole, tensor).wait()
    return list(whole.chunk(comm.size))


def test_an_all_gather_from_messages_passes() -> None:
    found = verdict("1.1", gather)
    assert found.is_right
    assert "busiest rank sent 3 times its tensor, and all together 12 times" in found.words


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (rotated, "has all tensors, in another order"),
        (without_own, "its own tensor belongs to the list too"),
        (one_buffer, "has the same tensor at every place"),
        (by_library, "Your function calls all_gather. Use comm.send and comm.recv alone"),
        (lambda comm, tensor: torch.stack(gather(comm, tensor)), "return a list of tensors"),
        (lambda comm, tensor: [each + 1 for each in gather(comm, tensor)], "a tensor that no rank brought"),
        (lambda comm, tensor: [each[:1] for each in gather(comm, tensor)], "returned tensors of shape (1,)"),
        (
            lambda comm, _: comm.recv(torch.empty(3), source=0).wait(),
            "The ranks that ran your function all_gather stopped",
        ),
    ],
)
def test_mistakes_of_an_all_gather_are_named(function: Any, words: str) -> None:
    found = verdict("1.1", function)
    assert not found.is_right
    assert words in found.words


def test_the_bytes_of_a_star() -> None:
    assert verdict("1.2", "28_000").is_right
    assert verdict("1.2", 28_000).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (7_000, "the number of elements"),
        (56_000, "off by a factor of 2"),
        (32_000, "does not send the sum to itself"),
        (4_000, "That is one message"),
        (3, "Count the messages"),
    ],
)
def test_mistakes_in_the_bytes_of_a_star_are_named(answer: int, words: str) -> None:
    found = verdict("1.2", answer)
    assert not found.is_right
    assert words in found.words
    assert "28" not in found.words


@pytest.mark.parametrize("answer", ["reduce_scatter", "reduce-scatter", "Reduce Scatter", "ReduceScatter"])
def test_the_first_half_of_an_all_reduce(answer: str) -> None:
    assert verdict("1.3", answer).is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("broadcast", "nothing is added up"),
        ("all_to_all", "adds nothing up"),
        ("all-gather", "nothing is added up"),
        ("all_reduce", "An all-reduce alone gives it already"),
        ("gossip", "none of the collectives of the lesson"),
    ],
)
def test_other_collectives_are_tried_and_shown(answer: str, words: str) -> None:
    found = verdict("1.3", answer)
    assert not found.is_right
    assert words in found.words
