"""Collectives as algorithms of our own, made of ``send`` and ``recv``: they run on every backend.

For a tensor of B bytes on N ranks, H hosts of L ranks each (bytes that a rank sends, and rounds):

    ring               2 B (N-1)/N             2 (N-1)            the least bytes; latency grows with the ranks
    halving_doubling   2 B (N-1)/N             2 ceil(log2 N)     the same bytes (on average, unless N is 2, 4, 8, ...)
    tree               2 B at most             about 2 log2 N     small tensors; others in chunks, one behind another
    hierarchical       2 B (L-1)/L inside      2 and those of     2 B (H-1)/H on the link of a host, the least there
                       and 2 B/L (H-1)/H       H hosts

The rounds are data (``rounds.py``), one executor runs them (``lanes.py``), and ``auto`` takes what the formulas in
``cluster/costs.py`` say is fastest, or for an all-reduce a table that was measured, where there is one for its ranks.
Narrow floats travel as they are: they are added in float32 and rounded once in each round that they go through.

Ring, halving-doubling and, on hosts of as many ranks each, hierarchical have forms of reduce-scatter and all-gather
too, and ring (rank to rank) and tree of broadcast; all other verbs are those of the inner communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import torch

from paceline.cluster import costs
from paceline.cluster.costs import CHUNK_BYTES, Algorithm, MeasuredTable, Placement, Wires
from paceline.comm.algorithms import rounds
from paceline.comm.algorithms.lanes import InFlight, MessageLane, WorkBehind
from paceline.comm.algorithms.rounds import ElementRange, Round, Topology, cut, state_topology
from paceline.comm.base import DONE, Call, Communicator, ReduceOp, Work, WrappedCommunicator, check_reduction
from paceline.comm.objects import reduce_number
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.errors import CommunicationError, UsageError, did_you_mean

AlgorithmName: TypeAlias = Literal["ring", "tree", "halving_doubling", "hierarchical", "auto"]
_NAMES: tuple[AlgorithmName, ...] = get_args(AlgorithmName)
_Form: TypeAlias = Callable[..., list[Round]]
_REDUCE_SCATTER: dict[Algorithm, _Form] = {
    "ring": rounds.ring_reduce_scatter,
    "halving_doubling": rounds.halving_reduce_scatter,
    "hierarchical": rounds.hierarchical_reduce_scatter,
}
_ALL_GATHER: dict[Algorithm, _Form] = {
    "ring": rounds.ring_all_gather,
    "halving_doubling": rounds.doubling_all_gather,
    "hierarchical": rounds.hierarchical_all_gather,
}
# Far from the tags of users and those of ``torch_dist.py``. A tag says which operation and lane a message belongs to.
_FIRST_TAG = 2**29
_MOST_LANES = 48
_RING_LANES = 8
_TREE_WINDOW = 4  # lanes, two of each tree: fewer leave gaps on a link of 1 Gbit/s, and more let one child run ahead
_MOST_OPERATIONS = 2**20  # in flight at once; tags are used again after as many


class AlgorithmCommunicator(WrappedCommunicator):
    """Runs collectives by an algorithm on the messages of ``inner``.

    Operations are finished in the order of their issue, by whichever ``wait`` comes first, of this group or of one
    split from it (which shares ``in_flight``); so all ranks issue in one order, across the groups that they share. NCCL
    has no tags: there, ranks also wait in one order. Raises UsageError for a hierarchical algorithm without two hosts.
    """

    def __init__(
        self,
        inner: Communicator,
        algorithm: AlgorithmName,
        topology: Topology | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        in_flight: InFlight | None = None,
        table: MeasuredTable | None = None,
    ) -> None:
        if algorithm not in _NAMES:
            hint = did_you_mean(algorithm, _NAMES, "take one of these")
            raise UsageError(f"algorithm {algorithm!r} is not one of {', '.join(_NAMES)}\n  {hint}")
        if chunk_bytes < 1:
            raise UsageError(f"chunk_bytes = {chunk_bytes}: a chunk has at least one byte")
        if topology is not None and sorted(r for host in topology.hosts for r in host) != list(range(inner.size)):
            raise UsageError(f"topology {topology.hosts} on {inner.size} ranks: it names each of them once")
        has_hosts = topology is not None and len(topology.hosts) > 1
        is_whole = in_flight is None  # and no subgroup: there, hosts may be gone
        if is_whole and algorithm == "hierarchical" and inner.size > 1 and not has_hosts:
            known = "no topology" if topology is None else f"all {inner.size} ranks on one host"
            what = f"algorithm 'hierarchical' with {known}: it reduces inside hosts and then across them"
            fix = "give a topology of at least two hosts (state_topology, detect_topology), or take another algorithm"
            raise UsageError(f"{what}\n  {fix}")
        super().__init__(inner)
        self.algorithm = algorithm
        self.topology = state_topology(inner.size, inner.size) if topology is None else topology
        self._links, self._chunk_bytes = Wires(), chunk_bytes
        self._in_flight = InFlight() if in_flight is None else in_flight
        self._num_issued = 0
        self._placement = self.topology.placement
        self._table = table

    def issue(self, call: Call) -> Work:
        """Makes a collective of messages where it can; the work of any other is finished after those issued before."""
        if call.kind in ("all_reduce", "reduce_scatter"):
            check_reduction(call.kind, call.tensor.dtype, call.op)
        make = MADE.get(call.kind)
        if make is not None and not call.whole.numel():
            return DONE
        work = None if make is None or self.size == 1 else getattr(self, make)(call)
        if work is None:
            work, before = self.inner.issue(call), self._in_flight.newest()
            work = work if before is None else WorkBehind(work, self._in_flight, before)
        return work

    def _make_all_reduce(self, call: Call) -> Work | None:
        tensor = call.tensor
        if self.algorithm == "auto" and self._table is not None and self._table.where == self._placement:
            algorithm = self._table.fastest(tensor.nbytes)
        else:
            algorithm = self._choose(costs.fastest_all_reduce, tensor)
        if algorithm == "native":
            return None
        flat = _flat(tensor)
        spans = cut((0, flat.numel()), self._num_lanes(algorithm, flat))
        lanes = [lane for span in spans for lane in self._all_reduce_rounds(algorithm, span)]
        return self._start(call, algorithm, flat, lanes, flat)

    def _make_scatter(self, call: Call) -> Work | None:
        """Makes a reduce-scatter or an all-gather; unless by halving, a lane has a part of every slice."""
        is_gather, output, tensor = call.kind == "all_gather", call.output, call.tensor
        algorithm = self._choose(costs.fastest_scatter, call.whole)
        if algorithm == "tree" or (algorithm == "hierarchical" and len(set(map(len, self.topology.hosts))) > 1):
            return None
        flat = _flat(output) if is_gather else tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
        slices = cut((0, flat.numel()), self.size)
        own = flat[slice(*slices[self.rank])]
        if is_gather and (own.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous()):
            own.copy_(tensor.detach().reshape(-1))
        form = (_ALL_GATHER if is_gather else _REDUCE_SCATTER)[algorithm]
        place = (self.rank, self.topology) if algorithm == "hierarchical" else (self.rank,)
        num_lanes = 1 if algorithm == "halving_doubling" else self._num_lanes("ring", flat)
        parts = zip(*(cut(each, num_lanes) for each in slices), strict=True)
        lanes = [form(*place, part) for part in parts]
        return self._start(call, algorithm, flat, lanes, flat if is_gather else own)

    def _make_broadcast(self, call: Call) -> Work | None:
        algorithm = self._choose(costs.fastest_broadcast, call.tensor)
        if algorithm not in ("ring", "tree"):
            return None
        flat = _flat(call.tensor)
        tree = costs.chain(self.size, call.peer) if algorithm == "ring" else costs.rooted_tree(self.size, call.peer)
        spans = cut((0, flat.numel()), self._num_lanes("tree", flat))
        lanes = [rounds.tree_broadcast(self.rank, tree, span) for span in spans]
        return self._start(call, algorithm, flat, lanes, flat)

    def barrier(self) -> None:
        """Finishes what is in flight, and returns when every rank has called it."""
        self._in_flight.finish_through(self._in_flight.newest())
        self.inner.barrier()

    def split(self, ranks: Sequence[int]) -> AlgorithmCommunicator:
        return AlgorithmCommunicator(
            self.inner.split(ranks),
            self.algorithm,
            self.topology.restrict(ranks),
            chunk_bytes=self._chunk_bytes,
            in_flight=self._in_flight,
            table=self._table,
        )

    def _choose(self, fastest: Callable[[float, Placement, Wires], Algorithm], tensor: torch.Tensor) -> Algorithm:
        return fastest(tensor.nbytes, self._placement, self._links) if self.algorithm == "auto" else self.algorithm

    def _all_reduce_rounds(self, algorithm: Algorithm, span: ElementRange) -> list[list[Round]]:
        """Returns the rounds of a lane, or, for two trees, of two."""
        if algorithm == "hierarchical":
            return [rounds.hierarchical_all_reduce(self.rank, self.topology, span)]
        if algorithm == "tree":
            halves = zip(costs.double_tree(self.size), cut(span, 2), strict=True)
            both = (rounds.tree_reduce, rounds.tree_broadcast)
            return [[each for form in both for each in form(self.rank, tree, half)] for tree, half in halves]
        slices = cut(span, self.size)
        return [_REDUCE_SCATTER[algorithm](self.rank, slices) + _ALL_GATHER[algorithm](self.rank, slices)]

    def _num_lanes(self, algorithm: Algorithm, flat: torch.Tensor) -> int:
        """One for each chunk of a message. A tree passes on chunk by chunk; others add one and send one."""
        pieces, most = (2, _MOST_LANES // 2) if algorithm == "tree" else (self.size, _RING_LANES)
        return min(max(flat.nbytes // (pieces * self._chunk_bytes), 1), most)

    def _start(
        self, call: Call, algorithm: Algorithm, flat: torch.Tensor, lanes: Sequence[list[Round]], result: torch.Tensor
    ) -> Work:
        """Issues rounds on the elements ``flat``, of which ``result`` is put into the call's output at the end."""
        output = call.output  # no more of the call is kept alive
        first = _FIRST_TAG + (self._num_issued % _MOST_OPERATIONS) * _MOST_LANES
        self._num_issued += 1
        comm = self._messages(call, algorithm, lanes)
        made = [MessageLane(comm, flat, lane, call.op, first + number) for number, lane in enumerate(lanes)]
        # NCCL carries out what is posted in the order of posting: there, all lanes receive at once.
        is_held_back = call.kind == "all_reduce" and algorithm == "tree" and self.device.type == "cpu"
        return self._in_flight.issue(made, lambda: _put_back(output, result), _TREE_WINDOW if is_held_back else None)

    def _messages(self, _call: Call, _algorithm: Algorithm, _lanes: Sequence[list[Round]]) -> Communicator:
        return self.inner


MADE = {"all_reduce": "_make_all_reduce", "broadcast": "_make_broadcast"}
MADE |= {"reduce_scatter": "_make_scatter", "all_gather": "_make_scatter"}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements one after another: the tensor's own memory if they lie so, and else a copy."""
    return tensor.detach().contiguous().view(-1)


def _put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    if tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def join_hosts(comm: Communicator, topology: Topology, *, timeout_s: float = 300.0) -> Communicator | None:
    """Returns this rank's host as a group that shares memory; None where some ranks cannot. Called by every rank."""
    sizes = {len(host) for host in topology.hosts}
    if comm.device.type != "cpu" or not comm.takes_real_time or len(sizes) != 1 or sizes == {1}:
        return None
    host = next(host for host in topology.hosts if comm.rank in host)
    local: Communicator | None
    try:
        local = SharedMemoryCommunicator.join(comm.split(host), timeout_s=timeout_s)
    except CommunicationError:
        local = None
    return local if reduce_number(comm, local is not None, "min") else None


class TwoLevelCommunicator(AlgorithmCommunicator):
    """Reduces inside hosts through ``local`` (for CPUs, shared memory), and across them by messages of ``inner``.

    An all-reduce is a reduce-scatter inside, a ring across, and an all-gather inside: one after another, so that no two
    ranks wait for each other on different levels. All else is the hierarchical algorithm on messages alone.
    """

    def __init__(self, inner: Communicator, topology: Topology, local: Communicator) -> None:
        super().__init__(inner, "hierarchical", topology)
        if {len(host) for host in topology.hosts} != {local.size}:
            raise UsageError(f"hosts {topology.hosts} and {local.size} ranks on this one: every host has as many ranks")
        self._local = local
        peers = [host[local.rank] for host in topology.hosts]
        self._across = AlgorithmCommunicator(inner.split(peers), "ring")

    def _make_all_reduce(self, call: Call) -> Work:
        tensor, op = call.tensor, call.op
        adds: ReduceOp = "sum" if op == "avg" else op
        whole = _flat(tensor)
        if short := -whole.numel() % self._local.size:  # so many that every rank of a host has as large a piece
            whole = torch.cat([whole, whole[-1:].expand(short)])  # the last again: also for the smallest and largest
        piece = torch.empty(whole.numel() // self._local.size, dtype=whole.dtype)
        first = self._local.reduce_scatter(piece, whole, adds)

        def go_on() -> None:
            first.wait()
            self._across.all_reduce(piece, adds).wait()
            if op == "avg":
                piece.div_(self.size)
            self._local.all_gather(whole, piece).wait()
            _put_back(tensor, whole[: tensor.numel()])

        return self._in_flight.issue([], go_on)
