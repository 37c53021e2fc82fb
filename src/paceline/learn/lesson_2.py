"""Checks of lesson 2: the bytes of a ring, a reduce-scatter in a ring, and what leaves a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.cluster.costs import Placement, host_link_bytes, sent_bytes
from paceline.learn.counted import Counted, run_counted, tensor_of
from paceline.learn.exercise import RIGHT, Said, judge_number, says

_RING_RANKS, _RING_BYTES = 8, 4_000_000
_HOSTS = Placement(ranks=32, hosts=4)
_HOST_BYTES = 100_000_000


def check_ring_bytes(answer: float) -> Said:
    truth = sent_bytes("ring", _RING_BYTES, Placement(ranks=_RING_RANKS), 0)
    mistakes = {"elements": truth / 4, "half": truth / 2, "rounds": 2 * _RING_BYTES, "all_ranks": truth * _RING_RANKS}
    return judge_number(answer, truth, mistakes | {"star": (_RING_RANKS - 1) * _RING_BYTES})


def check_reduce_scatter(function: Callable[[Any, torch.Tensor], Any]) -> Said:
    """Runs the reader's reduce-scatter on two, three and four ranks: the values, then the bytes, then the ring."""
    for size in (2, 3, 4):
        elements = 2 * size
        found = run_counted(lambda comm, n=elements: function(comm, tensor_of(comm.rank, n)), size)  # type: ignore[misc]
        if called := found.calls_besides("send", "recv"):
            return says("calls", called=called)
        if said := _sums_wrong(found.results, size) or _messages_wrong(found, size):
            return says(said.name, size=size, **said.gaps)
    return RIGHT


def _sums_wrong(results: list[Any], size: int) -> Said | None:
    """Says what is wrong with the slices that the ranks returned; None if nothing is."""
    expected = torch.stack([tensor_of(rank, 2 * size) for rank in range(size)]).sum(0).chunk(size)
    for rank, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            return says("no_tensor", rank=rank, kind=type(result).__name__)
        shape = tuple(expected[rank].shape)
        if result.shape != shape:
            return says("shape", rank=rank, shape=tuple(result.shape), elements=2 * size, expected=shape)
    if all(map(torch.equal, results, expected)):
        return None
    for shift in range(1, size):
        if all(torch.equal(results[rank], expected[(rank + shift) % size]) for rank in range(size)):
            return says("shifted", shift=shift)
    own = [tensor_of(rank, 2 * size).chunk(size)[rank] for rank in range(size)]
    if all(map(torch.equal, results, own)):
        return says("own")
    is_mean = any(torch.equal(result * size, whole) for result, whole in zip(results, expected, strict=True))
    return says("mean" if is_mean else "otherwise")


def _messages_wrong(found: Counted, size: int) -> Said | None:
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


def check_host_bytes(answer: float) -> Said:
    """Compares with what the formula says leaves a host."""
    truth = host_link_bytes("hierarchical", _HOST_BYTES, _HOSTS)
    mistakes = {
        "half": truth / 2,
        "ring": host_link_bytes("ring", _HOST_BYTES, _HOSTS),
        "kept": 2 * _HOST_BYTES,
        "one_rank": truth / _HOSTS.node_ranks,
        "all_hosts": truth * _HOSTS.hosts,
        "megabytes": truth / 1e6,
    }
    return judge_number(answer, truth, mistakes)


CHECKS = {"2.1": check_ring_bytes, "2.2": check_reduce_scatter, "2.3": check_host_bytes}
