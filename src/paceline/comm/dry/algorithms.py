"""Collectives of our own in a world that is not there: the real rounds, whose messages are counted and go nowhere.

``AlgorithmCommunicator`` chooses, cuts and adds up as it always does. What is recorded of an operation is

    when it is issued     its first round, which travels while the compute goes on
    when it is driven     all other rounds (a ``wait`` carries them out), which the compute waits for

each with its share of the rounds and the messages that it is made of. What the operation takes is a matter of the
formulas in ``cluster/costs.py``: messages of one rank do not tell how long a tree of many is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline.cluster.costs import Algorithm
from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.algorithms.rounds import Round
from paceline.comm.base import DONE, Communicator, ReduceOp, Work
from paceline.comm.dry.communicator import DryCommunicator, Messages
from paceline.comm.group import WrappedCommunicator


class DryAlgorithmCommunicator(AlgorithmCommunicator):
    """Records what an ``AlgorithmCommunicator`` would send for collectives of one rank."""

    inner: DryCommunicator

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        self._set_values(self.inner.all_reduce, tensor, op)
        return super().all_reduce(_shape(tensor), op)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        self._set_values(self.inner.reduce_scatter, output, tensor, op)
        return super().reduce_scatter(_shape(output), _shape(tensor), op)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        self._set_values(self.inner.all_gather, output, tensor)
        return super().all_gather(_shape(output), _shape(tensor))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        self._set_values(self.inner.broadcast, tensor, source)
        return super().broadcast(_shape(tensor), source)

    def split(self, ranks: Sequence[int]) -> DryAlgorithmCommunicator:
        inner, topology = self.inner.split(ranks), self.topology.restrict(ranks)
        return DryAlgorithmCommunicator(inner, self.algorithm, topology, in_flight=self._in_flight, table=self._table)

    def _set_values(self, verb: Callable[..., Work], tensor: torch.Tensor, *arguments: object) -> None:
        """Gives tensors that the host reads the values that ``verb`` of the dry communicator makes up."""
        if not tensor.is_meta:
            with self.inner.unrecorded():
                verb(tensor, *arguments)

    def _messages(
        self, kind: str, algorithm: Algorithm, flat: torch.Tensor, lanes: Sequence[list[Round]]
    ) -> Communicator:
        rounds = max(len(lane) for lane in lanes)

        def record(share: float, part: slice) -> Work:
            messages = _count_messages([lane[part] for lane in lanes], flat.element_size())
            return self.inner.record(kind, flat.nbytes, algorithm=algorithm, share=share, messages=messages)

        rest = partial(record, 1 - 1 / rounds, slice(1, None)) if rounds > 1 else None
        return _DryMessages(self.inner, record(1 / rounds, slice(1)), rest)


class _DryMessages(WrappedCommunicator):
    """Takes the messages of one operation. The first wait for one of them records all rounds that are left."""

    inner: DryCommunicator

    def __init__(self, inner: DryCommunicator, begun: Work, record_rest: Callable[[], Work] | None) -> None:
        super().__init__(inner)
        self.device = torch.device("cpu" if inner.device_kind == "cpu" else "meta")  # receives are posted as there
        self._begun = begun
        self._record_rest = record_rest

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        del tensor, to, tag
        return self

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        del tensor, source, tag
        return self

    def split(self, ranks: Sequence[int]) -> DryCommunicator:
        return self.inner.split(ranks)

    def wait(self) -> None:
        """Records what is left of the operation, and that the compute waits for it."""
        begun, self._begun = self._begun, DONE
        begun.wait()
        record_rest, self._record_rest = self._record_rest, None
        if record_rest is not None:
            record_rest().wait()


def _count_messages(lanes: Sequence[Sequence[Round]], element_size: int) -> Messages:
    """Counts what a rank sends and receives in rounds: kind, number and bytes."""
    rounds = [each for lane in lanes for each in lane]
    sent = [m.stop - m.start for each in rounds for m in each.sends]
    received = [m.stop - m.start for each in rounds for m in (*each.copies, *each.sums)]
    counted = [(kind, [each for each in lengths if each]) for kind, lengths in (("send", sent), ("recv", received))]
    return tuple((kind, len(full), sum(full) * element_size) for kind, full in counted if full)


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape without values."""
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
