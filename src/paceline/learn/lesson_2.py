"""The exercises of lesson 2: the bytes of a ring, a reduce-scatter in a ring, and what leaves a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.cluster.costs import Placement, host_link_bytes, sent_bytes
from paceline.learn.counted import Counted, other_operations, run_counted, tensor_of
from paceline.learn.exercise import Exercise, Verdict, right, wrong

_RING_RANKS, _RING_BYTES = 8, 4_000_000
_HOSTS = Placement(ranks=32, hosts=4)
_HOST_BYTES = 100_000_000
_WORLDS = (2, 3, 4)


def check_ring_bytes(answer: float) -> Verdict:
    """Compares with the formula of the ring."""
    truth = sent_bytes("ring", _RING_BYTES, Placement(ranks=_RING_RANKS), 0)
    if answer == truth:
        return right("That is less than twice the tensor, and it stays below that for any number of ranks.")
    if answer == truth / 4:
        return wrong("That is the number of elements. How many bytes does a float32 have?")
    if answer == truth / 2:
        return wrong("That is off by a factor of 2: a ring has two halves, one that adds and one that copies.")
    if answer == 2 * _RING_BYTES:
        return wrong("You counted N rounds for each half. A slice is complete after fewer.")
    if answer == truth * _RING_RANKS:
        return wrong("That is what all ranks send together. How much does one of them send?")
    if answer == (_RING_RANKS - 1) * _RING_BYTES:
        return wrong("That is what rank 0 of a star sends. In a ring a round sends one slice, not the whole tensor.")
    return wrong("Multiply the number of rounds of both halves by the bytes of one slice.")


def check_reduce_scatter(function: Callable[[Any, torch.Tensor], Any]) -> Verdict:
    """Runs the reader's reduce-scatter on two, three and four ranks: the values, then the bytes, then the ring."""
    for size in _WORLDS:
        elements = 2 * size
        found = run_counted(lambda comm, n=elements: function(comm, tensor_of(comm.rank, n)), size)  # type: ignore[misc]
        if called := other_operations(found):
            return wrong(f"Your function calls {called}. Use comm.send and comm.recv alone.")
        words = _sums_wrong(found.results, size) or _bytes_wrong(found, size) or _ring_wrong(found, size)
        if words:
            return wrong(words)
    return right("Each rank sends N-1 slices, M (N-1)/N bytes. An all-gather in the same ring makes it an all-reduce.")


def _sums_wrong(results: list[Any], size: int) -> str:
    """Says what is wrong with the slices that the ranks returned; "" if nothing is."""
    expected = torch.stack([tensor_of(rank, 2 * size) for rank in range(size)]).sum(0).chunk(size)
    where = f"In a world of {size}"
    for rank, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            return f"{where}, rank {rank} returned {type(result).__name__}: return a tensor, the slice of the sum."
        if result.shape != expected[rank].shape:
            return (
                f"{where}, rank {rank} returned a tensor of shape {tuple(result.shape)}: "
                f"a slice of {2 * size} elements on {size} ranks has shape {tuple(expected[rank].shape)}."
            )
    if all(map(torch.equal, results, expected)):
        return ""
    for shift in range(1, size):
        if all(torch.equal(results[rank], expected[(rank + shift) % size]) for rank in range(size)):
            return f"{where}, rank r returned the sum of slice r + {shift}. Begin with another slice."
    own = [tensor_of(rank, 2 * size).chunk(size)[rank] for rank in range(size)]
    if all(map(torch.equal, results, own)):
        return (
            f"{where}, every rank returned its own part alone: no round added anything to the slice that it returned. "
            "Does each round add what comes in? And which slice is complete on rank r after the last round?"
        )
    if any(torch.equal(result * size, whole) for result, whole in zip(results, expected, strict=True)):
        return f"{where}, rank 0 returned the mean. The sum is asked for."
    return f"{where}, some parts are missing from the sums, or are in them twice. How many rounds does a slice need?"


def _bytes_wrong(found: Counted, size: int) -> str:
    """Says what is wrong with what the ranks sent; "" if nothing is. A slice has two float64 elements."""
    least = 16 * (size - 1)
    if max(found.sent_bytes) <= least:
        return ""
    rank = found.sent_bytes.index(max(found.sent_bytes))
    sends = found.calls("send")[rank]
    if sends <= size - 1:
        return (
            f"The sums are right, but in a world of {size} rank {rank} sends {found.sent_bytes[rank]} bytes in "
            f"{sends} messages: send one slice in each round, not the whole tensor."
        )
    return (
        f"The sums are right, but in a world of {size} rank {rank} sends {sends} messages with "
        f"{found.sent_bytes[rank]} bytes: N-1 = {size - 1} of 16 bytes, one slice each, are enough."
    )


def _ring_wrong(found: Counted, size: int) -> str:
    """Says which rank sends to more than one other; "" if none does."""
    for rank, receivers in enumerate(found.receivers):
        if len(receivers) > 1:
            named = " and ".join(map(str, sorted(receivers)))
            return (
                f"The sums and the bytes are right, but in a world of {size} rank {rank} sends to ranks {named}. "
                "In a ring a rank sends to the next rank alone, which adds its own part and passes the slice on."
            )
    return ""


def check_host_bytes(answer: float) -> Verdict:
    """Compares with what the formula says leaves a host."""
    truth = host_link_bytes("hierarchical", _HOST_BYTES, _HOSTS)
    if answer == truth:
        return right("The number of ranks in a host does not matter. Only the number of hosts does.")
    if answer == truth / 2:
        return wrong("That is off by a factor of 2: sums go out, and the sums of others are spread.")
    if answer == host_link_bytes("ring", _HOST_BYTES, _HOSTS):
        return wrong(
            "That is what leaves a host in a ring of all ranks. Here only hosts exchange, after they have added up."
        )
    if answer == 2 * _HOST_BYTES:
        return wrong("That is 2 M. How much of it does a host keep, because it is responsible for it?")
    if answer == truth / _HOSTS.node_ranks:
        return wrong("That is what one rank sends to other hosts. All ranks of a host share its link.")
    if answer == truth * _HOSTS.hosts:
        return wrong("That is what leaves all hosts together. How much leaves one of them?")
    if answer == truth / 1e6:
        return wrong("That looks like megabytes. Give bytes.")
    return wrong("Treat each host as one member of a ring that holds the whole tensor.")


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="2.1",
        title="The bytes of a ring",
        asks=(
            "Eight ranks all-reduce a tensor of 1,000,000 float32 elements in a ring. "
            "How many bytes does each rank send?"
        ),
        answer="number",
        hints=(
            "A slice has 1/8 of the tensor's bytes, and a float32 element has 4 bytes.",
            "In each round a rank sends one slice. There are N-1 rounds to add, and as many to copy.",
        ),
        check=check_ring_bytes,
    ),
    Exercise(
        number="2.2",
        title="A reduce-scatter in a ring",
        asks=(
            "Write ring_reduce_scatter(comm, tensor) with comm.send and comm.recv alone. It returns slice comm.rank of "
            "the sum of all ranks' tensors. The number of elements is a multiple of N. Each rank sends N-1 slices and "
            "no more, all to the next rank."
        ),
        answer="function",
        function="ring_reduce_scatter",
        hints=(
            "Begin with the first half of ring_all_reduce of the lesson. It leaves slice r + 1 on rank r.",
            "A slice that ends on rank r began its way at rank r + 1. So rank r begins with slice r - 1.",
            "In round i, rank r sends slice (r - 1 - i) % N and adds what comes to slice (r - 2 - i) % N.",
        ),
        check=check_reduce_scatter,
    ),
    Exercise(
        number="2.3",
        title="What leaves a host",
        asks=(
            "Four hosts with eight ranks each all-reduce 100 MB (100,000,000 bytes) with the hierarchical algorithm. "
            "How many bytes leave each host?"
        ),
        answer="number",
        hints=(
            "The rounds inside a host send nothing out of it. After the first, its ranks together hold one tensor.",
            "The hosts then all-reduce these bytes among themselves, like a ring of H members: 2 M (H-1)/H.",
        ),
        check=check_host_bytes,
    ),
)
