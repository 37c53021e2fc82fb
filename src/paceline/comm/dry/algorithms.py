"""Collectives of our own in a world that is not there: the real rounds, whose messages are counted and go nowhere.

``AlgorithmCommunicator`` chooses, cuts and adds up as it always does. What is noted of an operation is

    when it is issued     its first round, which travels while the compute goes on
    when it is driven     all other rounds (a ``wait`` carries them out), which the compute waits for

each with its share of the rounds and the messages that it is made of. What the operation takes is a matter of the
formulas in ``cluster/costs.py``: messages of one rank do not tell how long a tree of many is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.cluster.costs import Algorithm, Links, Placement
from paceline.cluster.measured import Choice, MeasuredTable
from paceline.comm.algorithms.communicator import AlgorithmCommunicator, AlgorithmName
from paceline.comm.algorithms.steps import InFlight, Lane
from paceline.comm.algorithms.topology import Topology
from paceline.comm.base import DONE, ReduceOp, Work
from paceline.comm.dry.communicator import DryCommunicator, Parcel
from paceline.comm.virtual.rounds import Round


class DryAlgorithmCommunicator(AlgorithmCommunicator):
    """Notes what an ``AlgorithmCommunicator`` would send for collectives of one rank."""

    def __init__(
        self,
        inner: DryCommunicator,
        algorithm: AlgorithmName,
        topology: Topology,
        *,
        in_flight: InFlight | None = None,
        table: MeasuredTable | None = None,
    ) -> None:
        super().__init__(inner, algorithm, topology, in_flight=in_flight, table=table)
        self._dry = inner
        self._chosen = ""
        self._verb = ("", 0)  # the kind and the bytes of what is being issued

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Notes an all-reduce."""
        self._verb = ("all_reduce", _bytes(tensor))
        if not tensor.is_meta:
            with self._dry.quietly():
                self._dry.all_reduce(tensor, op)
        return super().all_reduce(_shape(tensor), op)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Notes a reduce-scatter."""
        self._verb = ("reduce_scatter", _bytes(tensor))
        if not tensor.is_meta:
            with self._dry.quietly():
                self._dry.reduce_scatter(output, tensor, op)
        return super().reduce_scatter(_shape(output), _shape(tensor), op)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Notes an all-gather."""
        self._verb = ("all_gather", _bytes(output))
        if not output.is_meta:
            with self._dry.quietly():
                self._dry.all_gather(output, tensor)
        return super().all_gather(_shape(output), _shape(tensor))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Notes a broadcast."""
        self._verb = ("broadcast", _bytes(tensor))
        if not tensor.is_meta:
            with self._dry.quietly():
                self._dry.broadcast(tensor, source)
        return super().broadcast(_shape(tensor), source)

    def split(self, ranks: Sequence[int]) -> DryAlgorithmCommunicator:
        """Makes a subgroup with the same algorithm, on what is left of the topology."""
        inner, topology = self._dry.split(ranks), self.topology.restrict(ranks)
        return DryAlgorithmCommunicator(inner, self.algorithm, topology, in_flight=self._in_flight, table=self._table)

    def _choose_all_reduce(self, tensor: torch.Tensor) -> Choice:
        chosen = super()._choose_all_reduce(tensor)
        self._chosen = chosen
        return chosen

    def _choose(self, fastest: Callable[[float, Placement, Links], Algorithm], tensor: torch.Tensor) -> Algorithm:
        chosen = super()._choose(fastest, tensor)
        self._chosen = chosen
        return chosen

    def _issue(
        self,
        flat: torch.Tensor,
        lanes: Sequence[list[Round]],
        op: ReduceOp,
        deliver: Callable[[], None],
        window: int | None = None,
    ) -> Work:
        rounds = max(len(lane) for lane in lanes)
        each = flat.element_size()
        first = Parcel(algorithm=self._chosen, share=1 / rounds, messages=_messages([x[:1] for x in lanes], each))
        rest = Parcel(algorithm=self._chosen, share=1 - 1 / rounds, messages=_messages([x[1:] for x in lanes], each))
        carrier = _Carrier(self._dry, self._verb, rest if rounds > 1 else None)
        made = [Lane(carrier, flat, lane, op, 0) for lane in lanes]
        operation = self._in_flight.issue(made, deliver, window)
        carrier.begun = self._dry.note(*self._verb, first)
        return operation


class _Carrier:
    """Takes the messages of one operation. Who first waits for one of them lets all rounds travel that are left."""

    def __init__(self, dry: DryCommunicator, verb: tuple[str, int], rest: Parcel | None) -> None:
        self.rank = dry.rank
        self.size = dry.size
        self.device = torch.device("cpu" if dry.stands_for == "cpu" else "meta")  # receives are posted as there
        self.begun: Work = DONE
        self._dry = dry
        self._verb = verb
        self._rest = rest

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Takes a message to another rank."""
        del tensor, to, tag
        return self

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Lets nothing come in."""
        del tensor, source, tag
        return self

    def wait(self) -> None:
        """Notes what is left of the operation, and that the compute waits for it."""
        begun, self.begun = self.begun, DONE
        begun.wait()
        rest, self._rest = self._rest, None
        if rest is not None:
            self._dry.note(*self._verb, rest).wait()


def _messages(lanes: Sequence[Sequence[Round]], element_size: int) -> tuple[tuple[str, int, int], ...]:
    """Counts what a rank sends and receives in rounds: kind, number and bytes."""
    found = []
    rounds = [each for lane in lanes for each in lane]
    sent = [m.stop - m.start for each in rounds for m in each.sends]
    received = [m.stop - m.start for each in rounds for m in (*each.copies, *each.sums)]
    for kind, lengths in (("send", sent), ("recv", received)):
        full = [length for length in lengths if length]
        if full:
            found.append((kind, len(full), sum(full) * element_size))
    return tuple(found)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without values: numbers that the host reads are told by ``DryCommunicator``."""
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
