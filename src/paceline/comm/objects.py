"""Small Python objects between ranks, built on the communicator's verbs. For set-up and verdicts, not for the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch

from paceline.comm.base import Communicator, ReduceOp, Work, control_device
from paceline.comm.plain import from_bytes, to_bytes
from paceline.errors import PacelineError

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
