"""Virtual ranks that run a reader's function, with what each rank sent counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.base import Communicator, Work
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual

_TIMEOUT_S = 20.0  # of a rank that computes without talking: a loop that does not end


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the ranks returned, and the count of what each called, by rank."""

    results: list[Any]
    traces: list[Trace]
    receivers: list[frozenset[int]]  # the ranks to which each rank sent

    @property
    def sent_bytes(self) -> list[int]:
        """The bytes that each rank sent by ``send``."""
        return [trace.num_bytes["send"] for trace in self.traces]

    @property
    def operations(self) -> frozenset[str]:
        """The names of all operations that any rank called."""
        return frozenset(kind for trace in self.traces for kind in trace.num_operations)

    def calls(self, kind: str) -> list[int]:
        """Returns how often each rank called an operation."""
        return [trace.num_operations[kind] for trace in self.traces]


class _CountingCommunicator(TracedCommunicator):
    """Counts what passes through, and keeps the ranks to which messages go."""

    def __init__(self, inner: Communicator, trace: Trace) -> None:
        super().__init__(inner, trace)
        self.receivers: set[int] = set()

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        self.receivers.add(to)
        return super().send(tensor, to, tag)


def run_counted(work: Callable[[Any], Any], ranks: int) -> Counted:
    """Runs ``work(comm)`` on virtual ranks, each with a communicator that counts."""

    def counted(comm: Any) -> tuple[Any, Trace, frozenset[int]]:
        counting = _CountingCommunicator(comm, Trace(comm.device))
        return work(counting), counting.trace, frozenset(counting.receivers)

    results, traces, receivers = zip(*run_virtual(counted, ranks=ranks, timeout_s=_TIMEOUT_S), strict=True)
    return Counted(results=list(results), traces=list(traces), receivers=list(receivers))


def tensor_of(rank: int, elements: int) -> torch.Tensor:
    """Returns the tensor that a rank brings to a check: no two elements of all ranks are equal."""
    return torch.arange(elements, dtype=torch.float64) + 100.0 * (rank + 1)


def other_operations(found: Counted) -> str:
    """Names the collectives that were called where only messages are allowed; "" where there are none."""
    return ", ".join(sorted(found.operations - {"send", "recv"}))
