"""The exercises of lesson 2: right answers pass, and usual mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline_course.course import find, judge
from paceline_course.exercise import Verdict


def verdict(number: str, answer: Any) -> Verdict:
    return judge(find(number), answer)


def scatter(comm: Any, tensor: torch.Tensor, *, start: int = 1, steps: int | None = None) -> torch.Tensor:
    slices = tensor.chunk(comm.size)
    received = torch.empty_like(slices[0])
    for step in range(comm.size - 1 if steps is None else steps):
        sending = comm.send(slices[(comm.rank - start - step) % comm.size], to=(comm.rank + 1) % comm.size)
        comm.recv(received, source=(comm.rank - 1) % comm.size).wait()
        sending.wait()
        slices[(comm.rank - start - 1 - step) % comm.size].add_(received)
    return slices[comm.rank]


def shifted(comm: Any, tensor: torch.Tensor) -> torch.Tensor:
    scatter(comm, tensor, start=0)
    return tensor.chunk(comm.size)[(comm.rank + 1) % comm.size]


def one_step(comm: Any, tensor: torch.Tensor) -> torch.Tensor:
    return scatter(comm, tensor, steps=1)


def whole_tensor(comm: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Passes whole tensors around, and adds at the end."""
    passed, total = tensor.clone(), tensor.clone()
    for _ in range(comm.size - 1):
        received = torch.empty_like(passed)
        sending = comm.send(passed, to=(comm.rank + 1) % comm.size)
        comm.recv(received, source=(comm.rank - 1) % comm.size).wait()
        sending.wait()
        passed = received
        total += passed
    return total.chunk(comm.size)[comm.rank]


def element_by_element(comm: Any, tensor: torch.Tensor) -> torch.Tensor:
    result = scatter(comm, tensor)
    sends = [comm.send(tensor[:1], to=(comm.rank + 1) % comm.size) for _ in range(3)]
    for _ in sends:
        comm.recv(torch.empty(1, dtype=tensor.dtype), source=(comm.rank - 1) % comm.size).wait()
    for each in sends:
        each.wait()
    return result


def straight_to_its_owner(comm: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Sends slice j straight to rank j: right sums and bytes, and no ring."""
    slices, others = tensor.chunk(comm.size), [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [comm.send(slices[rank], to=rank) for rank in others]
    total, received = slices[comm.rank].clone(), torch.empty_like(slices[0])
    for rank in others:
        comm.recv(received, source=rank).wait()
        total += received
    for each in sends:
        each.wait()
    return total


def by_library(comm: Any, tensor: torch.Tensor) -> torch.Tensor:
    part = tensor.chunk(comm.size)[0].clone()
    comm.reduce_scatter(part, tensor).wait()
    return part


def test_the_bytes_of_a_ring() -> None:
    found = verdict("2.1", "7,000,000")
    assert found.is_right
    assert "less than twice the tensor" in found.words


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (1_750_000, "the number of elements"),
        (3_500_000, "off by a factor of 2"),
        (8_000_000, "You counted N rounds"),
        (56_000_000, "what all ranks send together"),
        (28_000_000, "what rank 0 of a star sends"),
        (1, "Multiply the number of rounds"),
    ],
)
def test_mistakes_in_the_bytes_of_a_ring_are_named(answer: int, words: str) -> None:
    found = verdict("2.1", answer)
    assert not found.is_right
    assert words in found.words


def test_a_reduce_scatter_in_a_ring_passes() -> None:
    assert verdict("2.2", scatter).is_right


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (shifted, "rank r returned the sum of slice r + 1. Begin with another slice"),
        (one_step, "In a world of 3, every rank returned its own part alone"),
        (lambda comm, tensor: scatter(comm, tensor) + 1, "some parts are missing from the sums"),
        (whole_tensor, "send one slice in each round, not the whole tensor"),
        (element_by_element, "N-1 = 1 of 16 bytes, one slice each, are enough"),
        (straight_to_its_owner, "in a world of 3 rank 0 sends to ranks 1 and 2"),
        (lambda comm, tensor: scatter(comm, tensor, start=0), "which slice is complete on rank r after the last round"),
        (by_library, "Your function calls reduce_scatter"),
        (
            lambda comm, tensor: tensor.chunk(comm.size)[comm.rank],
            "In a world of 2, every rank returned its own part alone",
        ),
        (lambda comm, tensor: scatter(comm, tensor) / comm.size, "returned the mean"),
        (lambda comm, tensor: scatter(comm, tensor) is None, "returned bool: return a tensor"),
        (lambda comm, tensor: (scatter(comm, tensor), tensor)[1], "returned (4,): return a tensor"),
    ],
)
def test_mistakes_of_a_reduce_scatter_are_named(function: Any, words: str) -> None:
    found = verdict("2.2", function)
    assert not found.is_right
    assert words in found.words


def test_what_leaves_a_host() -> None:
    assert verdict("2.3", "1.5e8").is_right


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (75_000_000, "off by a factor of 2"),
        (193_750_000, "what leaves a host in a ring of all ranks"),
        (200_000_000, "That is 2 M"),
        (18_750_000, "what one rank sends to other hosts"),
        (600_000_000, "what leaves all hosts together"),
        (150, "Give bytes"),
        (5, "Treat each host as one member"),
    ],
)
def test_mistakes_in_what_leaves_a_host_are_named(answer: int, words: str) -> None:
    found = verdict("2.3", answer)
    assert not found.is_right
    assert words in found.words
