"""Objects, numbers, means and clocks between ranks, built on the communicator's verbs: not for the step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch

from paceline.comm.base import Communicator, ReduceOp, Work, control_device
from paceline.comm.plain import from_bytes, to_bytes
from paceline.errors import PacelineError, UsageError

T = TypeVar("T")


def gather_objects(comm: Communicator, value: T) -> list[T]:
    """Returns every rank's ``value`` in rank order, on every rank. Two all-gathers."""
    payload, length = _to_bytes(value, comm)
    lengths = _empty(comm, comm.size, torch.int64)
    comm.all_gather(lengths, length).wait()
    sizes = [int(size) for size in lengths.tolist()]
    longest = max(sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=payload.device)
    padded[: payload.numel()] = payload
    everything = _empty(comm, comm.size * longest)
    comm.all_gather(everything, padded).wait()
    return [_from_bytes(row[:size]) for row, size in zip(everything.cpu().view(comm.size, longest), sizes, strict=True)]


def broadcast_object(comm: Communicator, value: T, source: int = 0) -> T:
    """Returns the ``value`` of rank ``source`` on every rank. Two broadcasts."""
    if comm.rank == source:
        payload, length = _to_bytes(value, comm)
    else:
        length = torch.zeros(1, dtype=torch.int64, device=control_device(comm))
    comm.broadcast(length, source).wait()
    if comm.rank != source:
        payload = _empty(comm, int(length.item()))
    comm.broadcast(payload, source).wait()
    result: T = _from_bytes(payload)
    return result


def reduce_number(comm: Communicator, value: float, op: ReduceOp) -> float:
    """Returns the reduction of one number over all ranks, which all call it. One all-reduce; a sync point."""
    number = torch.tensor([value], dtype=torch.float64, device=control_device(comm))
    comm.all_reduce(number, op).wait()
    return float(number.item())


def ask_first_rank(comm: Communicator, function: Callable[[], T]) -> T:
    """Calls ``function`` on rank 0; every rank returns what it returned, or raises the PacelineError that it raised."""
    value: T | None = None
    problem: PacelineError | None = None
    if comm.rank == 0:
        try:
            value = function()
        except PacelineError as error:
            problem = error
    value, problem = broadcast_object(comm, (value, problem))
    if problem is not None:
        raise problem
    return cast(T, value)


def send_object(comm: Communicator, value: object, to: int, tag: int = 0) -> list[Work]:
    """Sends ``value`` to one rank, which calls ``receive_object``; returns the works under way."""
    payload, length = _to_bytes(value, comm)
    return [comm.send(length, to, tag), comm.send(payload, to, tag)]


def receive_object(comm: Communicator, source: int, tag: int = 0) -> Any:
    """Returns what ``source`` sends."""
    comm.recv(length := _empty(comm, 1, torch.int64), source, tag).wait()
    comm.recv(payload := _empty(comm, int(length.item())), source, tag).wait()
    return _from_bytes(payload)


def _empty(comm: Communicator, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=control_device(comm))


def _to_bytes(value: object, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a value as bytes, and how many these are."""
    raw = np.frombuffer(to_bytes(value), dtype=np.uint8).copy()
    device = control_device(comm)
    return torch.from_numpy(raw).to(device), torch.tensor([len(raw)], dtype=torch.int64, device=device)


def _from_bytes(payload: torch.Tensor) -> Any:
    return from_bytes(payload.cpu().numpy().tobytes())


def mean(total: float | torch.Tensor, count: float | torch.Tensor, comm: Communicator) -> float:
    """Returns the sum of ``total`` over all ranks by the sum of ``count``: the same number on every rank.

    ``total`` is a *sum* over this rank's samples (or tokens), of which there are ``count``, perhaps none. All ranks
    call it. A mean of the ranks' means would weigh the samples of a small batch more. Added up in float64.

    Raises UsageError where no rank has a sample, or what is given is not one number.
    """
    values = [torch.as_tensor(value).detach() for value in (total, count)]
    if any(value.numel() != 1 for value in values):
        shapes = [list(value.shape) for value in values]
        raise UsageError(
            f"a mean of tensors of the shapes {shapes[0]} and {shapes[1]}\n"
            "  a total and a count are one number each\n  sum over the samples first: total=losses.sum()"
        )
    device = control_device(comm)
    sums = torch.stack([value.reshape(()).to(device, torch.float64) for value in values])
    comm.all_reduce(sums).wait()
    added, samples = sums.tolist()
    if samples == 0 or math.isnan(samples):
        raise UsageError(
            f"a mean over {samples:g} samples of {comm.size} ranks\n  it needs at least one\n"
            "  check that the loader has batches, and that count is added up"
        )
    return float(added / samples)


_ROUNDS = 10


def clock_offset(comm: Communicator, read: Callable[[], float] = time.time) -> tuple[float, float]:
    """Returns how far this rank's clock is ahead of rank 0's, and by how much that may be wrong. All ranks call it.

    Costs ``2 x rounds`` messages a rank, one rank after the other. ``read`` reads the clock.
    """
    best = (float("inf"), 0.0)
    for rank in range(1, comm.size):
        for _ in range(_ROUNDS):
            if comm.rank == 0:
                ping = torch.zeros(1, dtype=torch.float64, device=comm.device)
                comm.recv(ping, rank).wait()
                ping.fill_(read())
                comm.send(ping, rank).wait()
            elif comm.rank == rank:
                pong = torch.zeros(1, dtype=torch.float64, device=comm.device)
                start = read()
                comm.send(pong, 0).wait()
                comm.recv(pong, 0).wait()
                reading, end = float(pong.item()), read()
                best = min(best, (end - start, (start + end) / 2 - reading))
    return (0.0, 0.0) if comm.rank == 0 else (best[1], best[0] / 2)
