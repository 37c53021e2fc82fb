"""Small Python objects between ranks, built on the communicator's verbs. For set-up and verdicts, not for the step."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import numpy as np
import torch

from paceline.comm.base import Communicator, Work, control_device

T = TypeVar("T")


def gather_objects(comm: Communicator, value: T) -> list[T]:
    """Returns every rank's ``value`` in rank order, on every rank. Two all-gathers."""
    payload = _to_bytes(value, control_device(comm))
    lengths = torch.empty(comm.size, dtype=torch.int64, device=control_device(comm))
    comm.all_gather(lengths, torch.tensor([payload.numel()], dtype=torch.int64, device=control_device(comm))).wait()
    sizes = [int(size) for size in lengths.tolist()]
    longest = max(sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=control_device(comm))
    padded[: payload.numel()] = payload
    everything = torch.empty(comm.size * longest, dtype=torch.uint8, device=control_device(comm))
    comm.all_gather(everything, padded).wait()
    rows = everything.cpu().view(comm.size, longest)
    return [pickle.loads(rows[i, :size].numpy().tobytes()) for i, size in enumerate(sizes)]


def broadcast_object(comm: Communicator, value: T, source: int = 0) -> T:
    """Returns the ``value`` of rank ``source`` on every rank. Two broadcasts."""
    payload = _to_bytes(value, control_device(comm)) if comm.rank == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device=control_device(comm))
    comm.broadcast(length, source).wait()
    if comm.rank != source:
        payload = torch.empty(int(length.item()), dtype=torch.uint8, device=control_device(comm))
    comm.broadcast(payload, source).wait()
    result: T = pickle.loads(payload.cpu().numpy().tobytes())
    return result


def send_object(comm: Communicator, value: object, to: int, tag: int = 0) -> list[Work]:
    """Sends ``value`` to one rank, which calls ``receive_object``; returns what is under way."""
    payload = _to_bytes(value, control_device(comm))
    length = torch.tensor([payload.numel()], dtype=torch.int64, device=control_device(comm))
    return [comm.send(length, to, tag), comm.send(payload, to, tag)]


def receive_object(comm: Communicator, source: int, tag: int = 0) -> Any:
    """Returns what ``source`` sends."""
    length = torch.empty(1, dtype=torch.int64, device=control_device(comm))
    comm.recv(length, source, tag).wait()
    payload = torch.empty(int(length.item()), dtype=torch.uint8, device=control_device(comm))
    comm.recv(payload, source, tag).wait()
    return pickle.loads(payload.cpu().numpy().tobytes())


def _to_bytes(value: object, device: torch.device) -> torch.Tensor:
    raw = np.frombuffer(pickle.dumps(value), dtype=np.uint8).copy()
    return torch.from_numpy(raw).to(device)
