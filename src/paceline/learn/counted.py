"""Virtual ranks that run a reader's function, with what each rank sent counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.base import Communicator, Work
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.learn.exercise import Said, says

_TIMEOUT_S = 20.0  # of a rank that computes without talking: a loop that does not end


class CountingCommunicator(TracedCommunicator):
    """Counts what passes through, and keeps the ranks to which messages go."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner, Trace(inner.device))
        self.receivers: set[int] = set()

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        self.receivers.add(to)
        return super().send(tensor, to, tag)

    @property
    def calls(self) -> dict[str, int]:
        """How often each operation was called so far."""
        return dict(self.trace.num_operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the ranks returned, and the communicators that counted, by rank."""

    results: list[Any]
    comms: list[CountingCommunicator]

    @property
    def sent_bytes(self) -> list[int]:
        """The bytes that each rank sent by ``send``."""
        return [comm.trace.num_bytes["send"] for comm in self.comms]

    def calls_besides(self, *allowed: str) -> str:
        """Names the operations that any rank called besides those that are allowed; "" where there are none."""
        return ", ".join(sorted({kind for comm in self.comms for kind in comm.calls} - set(allowed)))


def run_counted(
    work: Callable[[Any], Any], ranks: int, counter: type[CountingCommunicator] = CountingCommunicator
) -> Counted:
    """Runs ``work(comm)`` on virtual ranks, each with a communicator that counts."""

    def counted(comm: Any) -> tuple[Any, CountingCommunicator]:
        counting = counter(comm)
        return work(counting), counting

    results, comms = zip(*run_virtual(counted, ranks=ranks, timeout_s=_TIMEOUT_S), strict=True)
    return Counted(results=list(results), comms=list(comms))


def shown_calls(calls: dict[str, int]) -> str:
    """Returns how often operations were called, as words."""
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(calls.items())) or "no collective"


def all_close(values: Sequence[torch.Tensor], expected: torch.Tensor) -> bool:
    """Says whether all ranks have what was expected."""
    return all(torch.allclose(value, expected) for value in values)


def compare(values: Sequence[Any], expected: torch.Tensor, usual: Mapping[str, torch.Tensor]) -> Said | None:
    """Compares what ranks returned with what was expected, and with what usual mistakes give; None: all is right."""
    ranks = len(values)
    for rank, value in enumerate(values):
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.shape != expected.shape:
            shape = tuple(value.shape) if is_tensor else type(value).__name__
            return says("shape", rank=rank, ranks=ranks, shape=shape, expected=expected.numel())
    if all_close(values, expected):
        return None
    name = next((name for name, value in usual.items() if all_close(values, value)), "otherwise")
    return says("differ" if name == "otherwise" and not all_close(values, values[0]) else name, ranks=ranks)


def tensor_of(rank: int, elements: int) -> torch.Tensor:
    """Returns the tensor that a rank brings to a check: no two elements of all ranks are equal."""
    return torch.arange(elements, dtype=torch.float64) + 100.0 * (rank + 1)
