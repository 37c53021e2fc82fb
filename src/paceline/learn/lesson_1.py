"""The exercises of lesson 1: an all-gather from messages, the bytes of a star, and what an all-reduce is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.comm.virtual.communicator import run_virtual
from paceline.learn.counted import Counted, other_operations, run_counted, tensor_of
from paceline.learn.exercise import Exercise, Verdict, right, wrong

_WORLDS = (1, 2, 4)
_ELEMENTS = 3
_STAR_RANKS, _STAR_ELEMENTS = 8, 1000
_COLLECTIVES = ("broadcast", "reduce_scatter", "all_gather", "all_to_all", "all_reduce")


def check_all_gather(function: Callable[[Any, torch.Tensor], Any]) -> Verdict:
    """Runs the reader's all-gather on one, two and four ranks, and compares with the tensors that the ranks brought."""
    for size in _WORLDS:
        found = run_counted(lambda comm: function(comm, tensor_of(comm.rank, _ELEMENTS)), size)
        if called := other_operations(found):
            return wrong(f"Your function calls {called}. Use comm.send and comm.recv alone.")
        for rank in range(size):
            if words := _gathered_wrong(found.results[rank], rank, size):
                return wrong(words)
    return right(_gathered_words(found))


def _gathered_wrong(result: Any, rank: int, size: int) -> str:
    """Says what is wrong with the list that one rank returned; "" if nothing is."""
    where = f"In a world of {size}, rank {rank}"
    if not isinstance(result, list | tuple) or not all(isinstance(each, torch.Tensor) for each in result):
        return f"{where} returned {type(result).__name__}: return a list of tensors, one for each rank."
    if len(result) != size:
        return f"{where} returned {len(result)} tensors for {size} ranks: its own tensor belongs to the list too."
    expected = [tensor_of(each, _ELEMENTS) for each in range(size)]
    if any(each.shape != expected[0].shape for each in result):
        return f"{where} returned tensors of shape {tuple(result[0].shape)}: they have the shape of the argument."
    if all(map(torch.equal, result, expected)):
        return ""
    if sorted(each.tolist() for each in result) == [each.tolist() for each in expected]:
        return f"{where} has all tensors, in another order: the tensor of rank r belongs to place r on every rank."
    if size > 1 and all(torch.equal(each, result[0]) for each in result):
        return f"{where} has the same tensor at every place: receive each one into a tensor of its own."
    return f"{where} has a tensor that no rank brought, or one twice. Did you wait for every receive?"


def _gathered_words(found: Counted) -> str:
    most, total = max(found.sent_bytes), sum(found.sent_bytes)
    own = 8 * _ELEMENTS
    return (
        f"On 4 ranks the busiest rank sent {most / own:g} times its tensor, and all together {total / own:g} times. "
        "Every rank needs 3 tensors of others, so that 12 is the least for all together."
    )


def check_star_bytes(answer: float) -> Verdict:
    """Compares with what rank 0 really sends, counted on virtual ranks."""
    truth = run_counted(_star, _STAR_RANKS).sent_bytes[0]
    if answer == truth:
        return right(
            "All of these bytes leave through one link, and as many come in: rank 0 is what the others wait for."
        )
    if answer == truth / 4:
        return wrong("That is the number of elements. How many bytes does a float32 have?")
    if answer == truth * 2:
        return wrong(
            "That is off by a factor of 2: either a float32 has fewer bytes, or you counted what rank 0 receives."
        )
    if answer == 4 * _STAR_RANKS * _STAR_ELEMENTS:
        return wrong("Rank 0 does not send the sum to itself.")
    if answer == 4 * _STAR_ELEMENTS:
        return wrong("That is one message. To how many ranks does rank 0 send the sum?")
    return wrong("Count the messages that rank 0 sends after it has added all tensors, and the bytes of one of them.")


def _star(comm: Any) -> None:
    """The all-reduce of the lesson."""
    tensor = torch.ones(_STAR_ELEMENTS)
    if comm.rank:
        comm.send(tensor, to=0).wait()
        comm.recv(tensor, source=0).wait()
        return
    received = torch.empty_like(tensor)
    for other in range(1, comm.size):
        comm.recv(received, source=other).wait()
        tensor += received
    for other in range(1, comm.size):
        comm.send(tensor, to=other).wait()


def check_first_half(answer: str) -> Verdict:
    """Calls the collective of that name on virtual ranks, then an all-gather, and compares with an all-reduce."""
    name = "_".join(answer.replace("-", " ").replace("_", " ").split())
    name = {"reducescatter": "reduce_scatter", "allgather": "all_gather", "allreduce": "all_reduce"}.get(name, name)
    if name not in _COLLECTIVES:
        return wrong(f"{answer!r} is none of the collectives of the lesson: {', '.join(_COLLECTIVES)}.")
    if name == "all_reduce":
        return wrong("An all-reduce alone gives it already, and an all-gather of whole sums would give N copies.")
    results = run_virtual(lambda comm: _followed_by_gather(comm, name), ranks=4)
    if all(gathered == reduced for gathered, reduced in results):
        return right(
            "Each half sends M (N-1)/N bytes a rank, and ZeRO and FSDP use the two halves apart (lessons 4 and 5)."
        )
    gathered, reduced = results[0]
    return wrong(
        f"On 4 ranks, {name} and then an all-gather give rank 0 {gathered}, and an all-reduce gives {reduced}. "
        "Which collective adds anything up?"
    )


def _followed_by_gather(comm: Any, name: str) -> tuple[list[float], list[float]]:
    mine = torch.arange(4.0) + 10 * comm.rank
    part, whole = torch.empty(1), torch.empty(4)
    if name == "reduce_scatter":
        comm.reduce_scatter(part, mine).wait()
    elif name == "all_gather":
        comm.all_gather(whole, mine[:1].clone()).wait()
        part = whole[comm.rank : comm.rank + 1].clone()
    elif name == "all_to_all":
        comm.all_to_all(whole, mine).wait()
        part = whole[:1].clone()
    else:
        copied = mine.clone()
        comm.broadcast(copied).wait()
        part = copied[comm.rank : comm.rank + 1].clone()
    comm.all_gather(whole, part).wait()
    comm.all_reduce(mine).wait()
    return whole.tolist(), mine.tolist()


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="1.1",
        title="An all-gather from messages",
        asks=(
            "Write all_gather(comm, tensor) with comm.send and comm.recv alone. On every rank it returns a list of the "
            "tensors of all ranks, in the order of ranks."
        ),
        answer="function",
        function="all_gather",
        hints=(
            "A rank knows its own tensor: put it at its own place of the list.",
            "For each other rank, send yours to it and receive its tensor into a new tensor: torch.empty_like(tensor).",
            "Issue all sends first and keep what they return; receive from each rank; wait for the sends at the end.",
        ),
        check=check_all_gather,
    ),
    Exercise(
        number="1.2",
        title="The bytes of a star",
        asks="Eight ranks run star_all_reduce on tensors of 1000 float32 elements. How many bytes does rank 0 send?",
        answer="number",
        hints=(
            "A float32 element has 4 bytes.",
            "Rank 0 sends the whole sum to every other rank, once, and nothing to itself.",
        ),
        check=check_star_bytes,
    ),
    Exercise(
        number="1.3",
        title="Two halves of an all-reduce",
        asks="One collective, followed by an all-gather, gives every rank what an all-reduce gives. Which one?",
        answer="word",
        hints=(
            "Before the all-gather, rank r must hold part r of the sum.",
            "Look at the picture of the lesson: after which collective does each rank hold one part of the sum?",
        ),
        check=check_first_half,
    ),
)
