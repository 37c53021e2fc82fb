"""Checks of lesson 1: an all-gather from messages, the bytes of a star, and what an all-reduce is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.comm.virtual.communicator import run_virtual
from paceline.learn.counted import run_counted, tensor_of
from paceline.learn.exercise import RIGHT, Said, judge_number, says

_ELEMENTS = 3
_STAR_RANKS, _STAR_ELEMENTS = 8, 1000
_COLLECTIVES = ("broadcast", "reduce_scatter", "all_gather", "all_to_all", "all_reduce")


def check_all_gather(function: Callable[[Any, torch.Tensor], Any]) -> Said:
    """Runs the reader's all-gather on one, two and four ranks, and compares with the tensors that the ranks brought."""
    for size in (1, 2, 4):
        found = run_counted(lambda comm: function(comm, tensor_of(comm.rank, _ELEMENTS)), size)
        if called := found.calls_besides("send", "recv"):
            return says("calls", called=called)
        for rank, result in enumerate(found.results):
            if said := _gathered_wrong(result, size):
                return says(said.name, size=size, rank=rank, **said.gaps)
    own = 8 * _ELEMENTS
    return says("right", most=max(found.sent_bytes) / own, total=sum(found.sent_bytes) / own)


def _gathered_wrong(result: Any, size: int) -> Said | None:
    """Says what is wrong with the list that one rank returned; None if nothing is."""
    if not isinstance(result, list | tuple) or not all(isinstance(each, torch.Tensor) for each in result):
        return says("no_list", kind=type(result).__name__)
    if len(result) != size:
        return says("count", count=len(result))
    expected = [tensor_of(each, _ELEMENTS) for each in range(size)]
    if any(each.shape != expected[0].shape for each in result):
        return says("shape", shape=tuple(result[0].shape))
    if all(map(torch.equal, result, expected)):
        return None
    if sorted(each.tolist() for each in result) == [each.tolist() for each in expected]:
        return says("order")
    return says("same" if size > 1 and all(torch.equal(each, result[0]) for each in result) else "otherwise")


def check_star_bytes(answer: float) -> Said:
    """Compares with what rank 0 really sends, counted on virtual ranks."""
    truth = run_counted(_star, _STAR_RANKS).sent_bytes[0]
    one = 4 * _STAR_ELEMENTS
    mistakes = {"elements": truth / 4, "twice": truth * 2, "to_itself": one * _STAR_RANKS, "one_message": one}
    return judge_number(answer, truth, mistakes)


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


def check_first_half(answer: str) -> Said:
    """Calls the collective of that name on virtual ranks, then an all-gather, and compares with an all-reduce."""
    name = "_".join(answer.replace("-", " ").replace("_", " ").split())
    name = {"reducescatter": "reduce_scatter", "allgather": "all_gather", "allreduce": "all_reduce"}.get(name, name)
    if name not in _COLLECTIVES:
        return says("unknown", answer=answer, known=", ".join(_COLLECTIVES))
    if name == "all_reduce":
        return says("all_reduce")
    results = run_virtual(lambda comm: _followed_by_gather(comm, name), ranks=4)
    if all(gathered == reduced for gathered, reduced in results):
        return RIGHT
    gathered, reduced = results[0]
    return says("otherwise", name=name, gathered=gathered, reduced=reduced)


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


CHECKS = {"1.1": check_all_gather, "1.2": check_star_bytes, "1.3": check_first_half}
